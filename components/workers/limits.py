"""Limits that a process sets on itself. Imported at the start of every sandbox, so it imports little."""

import ctypes
import os
import resource

_SET_PARENT_DEATH_SIGNAL, _SIGKILL = 1, 9  # of prctl; and of signal, which takes longer to import
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, signal: int = _SIGKILL) -> None:
    """Make the kernel signal this process when the thread that started it ends; exit if `parent` has already ended."""
    if _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)


def limit(kind: int, value: int) -> None:
    """Lower a resource limit of this process, soft and hard, so that it cannot be raised again."""
    _, hard = resource.getrlimit(kind)
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowest, lowest))
