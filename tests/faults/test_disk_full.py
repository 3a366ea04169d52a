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
"""Bytes that a disk for unfinished work holds."""


@pytest.fixture
def disk(place: Place) -> Iterator[Path | None]:
    """A small disk for the unfinished work; none where it cannot be mounted, as only root can."""
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
    """Leave no room for another checkpoint of that process: on its disk, or in any file that it writes."""

    def fill(pid: int) -> None:
        if disk is None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            return
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    return fill


def test_a_checkpoint_there_is_no_room_for_costs_none_before_it(
    place: Place, config: TrainGRPOConfig, undisturbed: Place, disk: Path | None, leave_no_room: Callable[[int], None]
) -> None:
    """The run stops with a line about it; given room, it goes on from what it had to where it would have come to."""
    command = place.start(config)
    place.wait_for_checkpoint(2, command)
    leave_no_room(command.pid)
    assert command.wait(60) == PipelineError.exit_code
    assert f": {'no space left on device' if disk else 'file too large'}: the checkpoint takes" in place.error_line
    assert place.error_line.endswith("the earlier checkpoints are whole: make room and run again")
    step = place.checkpoints()[-1]
    assert 2 <= step < config.num_steps
    place.assert_whole(step)
    place.assert_nothing_runs()
    if disk:
        (disk / "filler").unlink()
    assert place.run(config) == 0, place.err
    assert f"going on after step {step}\n" in place.out
    assert place.results() == undisturbed.results()
