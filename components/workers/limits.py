"""What a process does to itself so that it can do no more than it should; nothing here takes long to import."""

import ctypes
import os
import resource

_SET_PARENT_DEATH_SIGNAL, _SIGKILL = 1, 9  # of prctl; and of signal, which takes longer to import
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, signal: int = _SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends, or `parent`, which is its process."""
    if _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)


def limit(kind: int, value: int) -> None:
    """Lower a resource limit of this process, for good."""
    _, hard = resource.getrlimit(kind)
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowest, lowest))
