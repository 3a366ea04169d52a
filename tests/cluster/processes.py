"""Processes of tests that run for real: what there is of them, and waiting for what they do."""

import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], object], limit_s: float = 120) -> None:
    """Wait until something is true; the limit only ends a test that has failed."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def pids(folder: Path) -> list[int]:
    """The processes of the ranks that `tests.cluster.ranks.act` runs in, in the order of their ranks."""
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid")) if path.read_text()]
