"""What ranks are made to do in tests of the launcher."""

import errno
import os
import signal
import time
from pathlib import Path

from components.shared.config import Config
from components.shared.errors import PipelineError, RetryableError


class JobConfig(Config):
    """What becomes of a rank."""

    ending: str
    """Name of a function below."""
    rank: int
    """The one that it is about."""
    seconds: float


_told: list[int] = []
_HEEDING = ("stop_when_told", "finish_the_step", "stay")
TOLD = "told"
"""The file that a rank which heeds requests leaves when it is told to stop."""
STEP_ENDS = "step-ends"
"""The file at which a step of `finish_the_step` comes to its end."""


def act(config: JobConfig, *, folder: Path) -> dict[str, float]:
    """Leave this process's number in the folder; then end in the way the config says, if it is this rank's turn."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == config.rank and config.ending in _HEEDING:  # before anybody knows that this process is there
        signal.signal(signal.SIGTERM, lambda number, _: _tell(folder))
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    print(f"hello from rank {rank}", flush=True)
    while len(list(folder.glob("*.pid"))) < size:
        time.sleep(0.01)
    if rank == config.rank:
        globals()[config.ending](folder)
    else:
        time.sleep(config.seconds)
    return {"rank": rank, "size": size, "pid": os.getpid()}


def _tell(folder: Path) -> None:
    _told.append(signal.SIGTERM)
    (folder / TOLD).touch()


def go_on(_: Path) -> None:
    """Do nothing."""


def be_refused(_: Path) -> None:
    """Stop with an error for people."""
    raise PipelineError("the data are no data")


def lose_another(_: Path) -> None:
    """Stop because another one is gone."""
    raise RetryableError("rank 7 did not come")


def fill_the_disk(_: Path) -> None:
    """Meet a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/far/away")


def have_a_bug(_: Path) -> None:
    """Crash."""
    raise ZeroDivisionError("there is nothing to divide by")


def be_killed(_: Path) -> None:
    """Be killed, as by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_when_told(_: Path) -> None:
    """Wait to be told to stop, and stop."""
    while not _told:
        time.sleep(0.01)
    raise RetryableError("told to stop: all is kept")


def finish_the_step(folder: Path) -> None:
    """Wait to be told to stop, finish the step that is under way, and stop."""
    while not _told or not (folder / STEP_ENDS).exists():
        time.sleep(0.01)
    raise RetryableError("told to stop: all is kept")


def stay(_: Path) -> None:
    """Go on for longer than anybody waits, whatever one is told."""
    time.sleep(120)
