"""What ranks do in tests of those who launch them."""

import errno
import os
import signal
import time
from pathlib import Path

from components.shared.config import Config
from components.shared.errors import RetryableError

STOP_REQUESTED = "stop-requested"
_HANDLE_REQUESTS = ("stop", "hang")


class JobConfig(Config):
    """What one of the ranks does, while the others sleep."""

    ending: str
    """Name of a function below."""
    rank: int
    seconds: float
    """For which the others sleep."""


def act(config: JobConfig, *, folder: Path) -> dict[str, float]:
    """Write this process's number to the folder; then end as the config says, or sleep."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == config.rank and config.ending in _HANDLE_REQUESTS:  # before anybody knows of this process
        signal.signal(signal.SIGTERM, lambda number, frame: (folder / STOP_REQUESTED).touch())
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    print(f"hello from rank {rank}", flush=True)
    while len(list(folder.glob("*.pid"))) < size:
        time.sleep(0.01)
    if rank == config.rank:
        globals()[config.ending](folder)
    else:
        time.sleep(config.seconds)
    return {"rank": rank, "size": size, "pid": os.getpid()}


def go_on(_: Path) -> None:
    """Do nothing."""


def fill_the_disk(_: Path) -> None:
    """Find a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/far/away")


def crash(_: Path) -> None:
    """Raise an error that is a bug."""
    raise ZeroDivisionError("there is nothing to divide by")


def be_killed(_: Path) -> None:
    """Be killed, as by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(folder: Path) -> None:
    """Stop on request."""
    while not (folder / STOP_REQUESTED).exists():
        time.sleep(0.01)
    raise RetryableError("stopped: step 3 is saved")


def hang(_: Path) -> None:
    """Ignore all requests."""
    time.sleep(120)
