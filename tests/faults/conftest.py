from collections.abc import Iterator
from pathlib import Path

import pytest

from components.policy.checkpoint import save
from components.shared.problem import Split, write_problems
from components.train_grpo.config import TrainGRPOConfig
from tests import tiny
from tests.faults.place import NewPlace, Place
from tests.train_grpo.settings import grpo_config


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Problems and an untrained reference."""
    folder = tmp_path_factory.mktemp("inputs")
    folders = {name: folder / name for name in ("problems", "reference")}
    for path in folders.values():
        path.mkdir()
    write_problems(folders["problems"], Split.TRAIN, tiny.PROBLEMS)
    save(tiny.checkpoint(), folders["reference"])
    return folders


@pytest.fixture
def new_place(tmp_path: Path, inputs: dict[str, Path]) -> Iterator[NewPlace]:
    """Make places for runs by name; their processes end with the test."""
    made = []

    def make(name: str, stage: str = "train_grpo") -> Place:
        own = inputs if stage == "train_grpo" else {"problems": inputs["problems"]}
        made.append(Place(tmp_path / name, stage, own))
        return made[-1]

    yield make
    for place in made:
        place.end()


@pytest.fixture
def place(new_place: NewPlace) -> Place:
    """The place of one GRPO run."""
    return new_place("run")


@pytest.fixture(scope="session")
def config() -> TrainGRPOConfig:
    """A run in one process with a checkpoint after every step."""
    return grpo_config(
        num_steps=40,
        prompts_per_step=2,
        group_size=2,
        reward__weights={"accuracy": 1.0, "tests.faults.rewards:shortness": 1.0},
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_best": False, "grace_s": 20},
    )


@pytest.fixture(scope="session")
def undisturbed(config: TrainGRPOConfig, inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """That run without any fault."""
    place = Place(tmp_path_factory.mktemp("undisturbed"), "train_grpo", inputs)
    try:
        assert place.run(config) == 0, place.err
        place.assert_nothing_left()
    finally:
        place.end()
    return place
