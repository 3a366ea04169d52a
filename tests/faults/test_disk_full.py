import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from components.shared.errors import PipelineError
from components.train_grpo.config import TrainGRPOConfig
from tests.faults.place import Place

pytestmark = pytest.mark.long(minutes=2)
SIZE = 64 << 20
"""Bytes of the disk for unfinished work."""


@pytest.fixture
def disk(place: Place) -> Iterator[Path]:
    """A small disk for the unfinished work."""
    work = place.folder / "work"
    work.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(work)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    yield work
    place.end()
    subprocess.run(["umount", str(work)], check=True)


def test_a_full_disk_leaves_earlier_checkpoints_intact(
    place: Place, config: TrainGRPOConfig, undisturbed: Place, disk: Path
) -> None:
    """The run stops with one line; with room again it resumes to the results of an undisturbed run."""
    command = place.start(config)
    place.wait_for_checkpoint(2, command)
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    assert command.wait(60) == PipelineError.exit_code
    assert ": no space left on device: the earlier checkpoints are complete" in place.error_line
    assert place.error_line.endswith("are free; make room and run again")
    step = place.checkpoints()[-1]
    assert 2 <= step < config.num_steps
    place.assert_latest_checkpoint(step)
    place.assert_nothing_runs()
    (disk / "filler").unlink()
    assert place.run(config) == 0, place.err
    assert f"resuming after step {step}\n" in place.out
    assert place.results() == undisturbed.results()
