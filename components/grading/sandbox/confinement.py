"""Confinement of a process, irreversibly, before it runs untrusted code.

It sets resource limits, Landlock rules (only a few files can be read) and a seccomp filter (only system calls that
computing and reading need). Imports must be fast, since every run starts a new interpreter.
"""

import ctypes
import importlib
import os
import resource
import struct

from components.workers.limits import end_with_parent, limit

CPU_S = 4
MEMORY_BYTES = 512 * 2**20
"""Address space, including the interpreter's."""
OPEN_FILES = 32

_LIMITS = {
    resource.RLIMIT_CPU: CPU_S,
    resource.RLIMIT_AS: MEMORY_BYTES,
    resource.RLIMIT_NOFILE: OPEN_FILES,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_CORE: 0,
}
_SET_SECCOMP, _SET_NO_NEW_PRIVS = 22, 38  # options of prctl

_libc = ctypes.CDLL(None, use_errno=True)


def confine(files: list[str], folders: list[str], parent: int) -> None:
    """Restrict this process to computing, reading `files` and listing `folders`; OSError if that is not possible."""
    for kind, value in _LIMITS.items():
        limit(kind, value)
    end_with_parent(parent)
    if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(f"prctl {_SET_NO_NEW_PRIVS} failed ({os.strerror(ctypes.get_errno())})")
    _restrict_files(files, folders)
    _restrict_system_calls()
    # Imports must find modules by opening them, since `stat` is denied: it would show which files exist.
    importlib._bootstrap_external._path_stat = _stat_opened  # type: ignore[attr-defined]


def _stat_opened(path: str) -> os.stat_result:
    """The result of `os.stat` for a file or folder that may be read; OSError for all others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def environment() -> dict[str, str]:
    """Return an environment without secrets, with a fixed order of sets and what the interpreter needs to start."""
    return {"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def print_readable_paths() -> None:
    """Print, as JSON, the files and folders that the interpreter needs to import its standard library."""
    import contextlib
    import json
    import sys
    from pathlib import Path

    folders = [Path(folder) for folder in sys.path if Path(folder).is_dir()]
    installed = {"site-packages", "dist-packages"}
    entries = [entry for folder in folders for entry in folder.iterdir() if entry.name not in installed]
    for entry in entries:  # load the extension modules, to find the shared libraries that they link to
        if entry.suffix == ".so" and not entry.name.startswith(("_test", "_xx", "xx", "_tkinter")):
            with contextlib.suppress(ImportError):  # built without a library that it needs
                importlib.import_module(entry.name.partition(".")[0])
    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split(maxsplit=5)[-1] for line in maps if ".so" in line}
    print(json.dumps([sorted({*map(str, entries), *libraries}), [*map(str, folders)]]))


# Landlock.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NUM_FILE_RIGHTS_SINCE_5 = 16
_TCP = 0b11
_SCOPES = 0b11  # abstract Unix sockets and signals
_DO_NOT_LOG = 1


def _restrict_files(files: list[str], folders: list[str]) -> None:
    """Restrict this process to reading `files`, also folders with all below them, and listing `folders`.

    Later versions of Landlock have more access rights; all rights of this kernel's version are denied.
    """
    version = _landlock(_CREATE_RULESET, None, 0, _GET_VERSION)
    file_rights = (1 << _NUM_FILE_RIGHTS.get(version, _NUM_FILE_RIGHTS_SINCE_5)) - 1
    handled = struct.pack("QQQ", file_rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = _landlock(_CREATE_RULESET, handled, len(handled), 0)
    for paths, right in ((files, _READ_FILE), (folders, _READ_DIR)):
        for path in paths:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            _landlock(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", right, beneath), 0)
            os.close(beneath)
    _landlock(_RESTRICT_SELF, ruleset, _DO_NOT_LOG if version >= 7 else 0)
    os.close(ruleset)


def _landlock(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(f"Landlock is not available ({os.strerror(ctypes.get_errno())})")
    return result


# seccomp.

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name, number on x86_64, number on aarch64 (- where it has none).
_SYSCALLS = """
read 0 63             write 1 64                  close 3 57           fstat 5 80         lseek 8 62
pread64 17 67         getdents64 217 61           getcwd 79 17         mmap 9 222         mprotect 10 226
munmap 11 215         mremap 25 216               madvise 28 233       brk 12 214         rt_sigaction 13 134
rt_sigprocmask 14 135 rt_sigreturn 15 139         sigaltstack 131 132  futex 202 98       sched_yield 24 124
nanosleep 35 101      clock_nanosleep 230 115     clock_gettime 228 113                   clock_getres 229 114
gettimeofday 96 169   time 201 -                  getrandom 318 278    getpid 39 172      gettid 186 178
getppid 110 173       getuid 102 174              geteuid 107 175      getgid 104 176     getegid 108 177
uname 63 160          restart_syscall 219 128     exit_group 231 94
"""
_OPENAT = (257, 56)
_OPENAT_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOCTTY
_NEWFSTATAT = (262, 79)
_EMPTY_PATH = 0x1000  # flag by which some versions of glibc ask for the status of an open file

# Classic BPF: operations, and offsets in seccomp_data.
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 32, 40
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000 | 1
"""Denied calls fail with EPERM; a call with the system call numbers of another architecture ends the process."""
_FILTER = 2


def filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter for a machine as BPF instructions: operation, how many to skip if true, if false, operand."""
    column = list(_ARCHITECTURES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in _SYSCALLS.split()[1 + column :: 3]:
        if number != "-":
            program += [(_IF_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
    return [
        *program,
        # The status of an open file, but of no path.
        (_IF_EQUAL, 0, 4, _NEWFSTATAT[column]),
        (_LOAD, 0, 0, _FOURTH_ARGUMENT),
        (_IF_EQUAL, 0, 1, _EMPTY_PATH),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # All other calls are denied, except opening a file without any flag that could change one.
        (_IF_EQUAL, 1, 0, _OPENAT[column]),
        (_RETURN, 0, 0, _DENY),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, ~_OPENAT_FLAGS & 0xFFFFFFFF),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _restrict_system_calls() -> None:
    """Deny this process all system calls outside `filter_program`; PR_SET_NO_NEW_PRIVS must have been set before."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"the processor is {machine}, expected {' or '.join(_ARCHITECTURES)}")
    instructions = [struct.pack("=HBBI", *instruction) for instruction in filter_program(machine)]
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code))
    if _libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) != 0:
        raise OSError(f"seccomp is not available ({os.strerror(ctypes.get_errno())})")
