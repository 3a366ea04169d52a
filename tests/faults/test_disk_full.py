import resource
import subprocess
from collections.abc import Callable, Iterator
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
def disk(place: Place) -> Iterator[Path | None]:
    """A small disk for the unfinished work, or None without the right to mount one."""
    work = place.folder / "work"
    work.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(work)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield work if mounted else None
    place.end()
    if mounted:
        subprocess.run(["umount", str(work)], check=True)


@pytest.fixture
def leave_no_room(disk: Path | None) -> Callable[[int], None]:
    """Fill the disk, or limit the size of the process's files, so that no further checkpoint fits."""

    def fill(pid: int) -> None:
        if disk is None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            return
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    return fill


def test_a_full_disk_leaves_earlier_checkpoints_intact(
    place: Place, config: TrainGRPOConfig, undisturbed: Place, disk: Path | None, leave_no_room: Callable[[int], None]
) -> None:
    """The run stops with one line; with room again it resumes to the results of an undisturbed run."""
    command = place.start(config)
    place.wait_for_checkpoint(2, command)
    leave_no_room(command.pid)
    assert command.wait(60) == PipelineError.exit_code
    assert (
        f": {'no space left on device' if disk else 'file too large'}: the earlier checkpoints are complete"
        in place.error_line
    )
    assert place.error_line.endswith("are free; make room and run again")
    step = place.checkpoints()[-1]
    assert 2 <= step < config.num_steps
    place.assert_latest_checkpoint(step)
    place.assert_nothing_runs()
    if disk:
        (disk / "filler").unlink()
    assert place.run(config) == 0, place.err
    assert f"resuming after step {step}\n" in place.out
    assert place.results() == undisturbed.results()
