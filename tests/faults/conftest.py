from collections.abc import Iterator
from pathlib import Path

import pytest

from components.policy.checkpoint import save
from components.shared.problem import Split, write_problems
from tests import tiny
from tests.faults.place import Place


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
def places(tmp_path: Path, inputs: dict[str, Path]) -> Iterator[tuple[Place, Place]]:
    """Places for two GRPO runs, an undisturbed and a disturbed one; their processes end with the test."""
    both = Place(tmp_path / "straight", inputs), Place(tmp_path / "disturbed", inputs)
    yield both
    for place in both:
        place.end()


@pytest.fixture
def place(places: tuple[Place, Place]) -> Place:
    """The place of one GRPO run."""
    return places[1]
