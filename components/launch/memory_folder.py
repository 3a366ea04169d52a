"""A folder in the memory of this host, for weights on their way from the trainer to a sampler."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")
_PREFIX = "grpo-pipeline-"
_COPIES = 3
"""Weights that may be there at once: what is being written, what is loaded, and room to spare."""


@contextmanager
def memory_folder(like: Path, otherwise: Path) -> Iterator[Path]:
    """Give a folder with room for copies of the files in `like`: in memory, or `otherwise` where there is too little.

    It goes away with the block. What a killed run has left in memory goes away too.
    """
    _sweep()
    size = sum(path.stat().st_size for path in like.rglob("*") if path.is_file())
    roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _COPIES * size
    folder = _MEMORY / f"{_PREFIX}{os.getpid()}" if roomy else otherwise
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of processes that are no more."""
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        try:
            os.kill(int(folder.name.removeprefix(_PREFIX)), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            continue
