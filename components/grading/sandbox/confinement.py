"""Confinement: what a process gives up before it runs code that nobody has read."""

import ctypes
import os
import resource

from components.grading.sandbox.landlock import allow_reading
from components.grading.sandbox.limits import CPU_S, MEMORY_BYTES, OPEN_FILES
from components.grading.sandbox.seccomp import allow_computing

_SET_PARENT_DEATH_SIGNAL, _SET_NO_NEW_PRIVS = 1, 38
_SIGKILL = 9
_LIMITS = {
    resource.RLIMIT_CPU: CPU_S,
    resource.RLIMIT_AS: MEMORY_BYTES,
    resource.RLIMIT_NOFILE: OPEN_FILES,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_CORE: 0,
}

_libc = ctypes.CDLL(None, use_errno=True)


def confine(files: list[str], folders: list[str]) -> None:
    """Give up everything but computing and reading `files` and the names in `folders`; OSError where that fails."""
    for kind, limit in _LIMITS.items():
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
    for option, value in ((_SET_PARENT_DEATH_SIGNAL, _SIGKILL), (_SET_NO_NEW_PRIVS, 1)):
        if _libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(f"prctl {option} failed ({os.strerror(ctypes.get_errno())})")
    allow_reading(files, folders)
    allow_computing()
