"""A folder in the memory of this host, for weights on their way from the trainer to a sampler."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")
_PREFIX = "grpo-pipeline-"
_COPIES = 3
"""Weights that may be there at once: what is being written, what is loaded, and room to spare."""
_GUARD = Path(__file__).with_name("guard.py")


@contextmanager
def memory_folder(like: Path, otherwise: Path) -> Iterator[Path]:
    """Give a folder with room for copies of the files in `like`: in memory, or `otherwise` where there is too little.

    It goes away with the block, and with this process where it is killed: a guard removes it. Should the guard be
    killed too, the next run does.
    """
    _sweep()
    size = sum(path.stat().st_size for path in like.rglob("*") if path.is_file())
    roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _COPIES * size
    folder = _MEMORY / f"{_PREFIX}{os.getpid()}" if roomy else otherwise
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _guarded(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    """Have the folder removed when the block ends, or this process."""
    guard = subprocess.Popen(
        [sys.executable, "-P", str(_GUARD), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # whoever reads this process's output to its end does not wait for the guard
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # apart from signals to this process's group
    )
    with guard:  # which closes the pipe, and waits
        yield


def _sweep() -> None:
    """Remove the folders of processes that are no more."""
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        try:
            os.kill(int(folder.name.removeprefix(_PREFIX)), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            continue
