"""The system calls that this process may go on making: what computing and reading need, and no others."""

import ctypes
import os
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SYSCALLS = {
    # name: number on x86_64, on aarch64
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "access": (21, None),
    "faccessat": (269, 48),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "uname": (63, 160),
    "restart_syscall": (219, 128),
    "exit_group": (231, 94),
}
_OPENAT = (257, 56)
_OPENAT_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOCTTY

# Classic BPF: operations, and where seccomp_data keeps what they read.
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000 | 1
"""Denied calls fail with EPERM; a call through the door of another architecture ends the process."""

_SET_SECCOMP, _FILTER = 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


def filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter for a machine as BPF instructions: operation, jump if true, jump if false, operand."""
    column = list(_ARCHITECTURES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for numbers in _SYSCALLS.values():
        if (number := numbers[column]) is not None:
            program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return [
        *program,
        (_IF_EQUAL, 1, 0, _OPENAT[column]),
        (_RETURN, 0, 0, _DENY),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, ~_OPENAT_FLAGS & 0xFFFFFFFF),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]


def allow_computing() -> None:
    """Leave this process the system calls of the list, for good; OSError where that is not possible.

    The process must have given up gaining privileges before.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"the processor is {machine}, expected {' or '.join(_ARCHITECTURES)}")
    instructions = [struct.pack("=HBBI", *instruction) for instruction in filter_program(machine)]
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code))
    if _libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) != 0:
        raise OSError(f"seccomp is not available ({os.strerror(ctypes.get_errno())})")
