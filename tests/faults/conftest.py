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
    """Problems, and a reference that guesses."""
    folder = tmp_path_factory.mktemp("inputs")
    found = {name: folder / name for name in ("problems", "reference")}
    for path in found.values():
        path.mkdir()
    write_problems(found["problems"], Split.TRAIN, tiny.PROBLEMS)
    save(tiny.checkpoint(), found["reference"])
    return found


@pytest.fixture
def new_place(tmp_path: Path, inputs: dict[str, Path]) -> Iterator[NewPlace]:
    """Places for runs by name, where nothing goes on running after the test."""
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
    """Where one run of GRPO is made."""
    return new_place("run")


@pytest.fixture(scope="session")
def config() -> TrainGRPOConfig:
    """A run in one process that keeps every step."""
    return grpo_config(
        num_steps=40,
        prompts_per_step=2,
        group_size=2,
        reward__weights={"accuracy": 1.0, "tests.faults.rewards:shortness": 1.0},
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_best": False, "grace_s": 20},
    )


@pytest.fixture(scope="session")
def undisturbed(config: TrainGRPOConfig, inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """That run, made without a disturbance."""
    place = Place(tmp_path_factory.mktemp("undisturbed"), "train_grpo", inputs)
    try:
        assert place.run(config) == 0, place.err
        place.assert_nothing_left()
    finally:
        place.end()
    return place
