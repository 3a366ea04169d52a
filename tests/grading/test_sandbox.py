"""The sandbox against code that tries to break out of it, to break it, or just to run in it."""

import gc
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.grading.sandbox import run as sandbox
from components.grading.sandbox.confinement import CPU_S, filter_program
from components.grading.sandbox.run import MAX_OUTPUT_BYTES, Failed, Outcome, Returned, require_sandbox, run
from components.shared.errors import PipelineError
from tests.grading.processes import children, is_gone, processor_time, wait_until

ROOT = Path(__file__).parents[2]
SECRET = "the-secret-of-the-parent"


def one(code: str, call: str = "attack()") -> Outcome:
    """The outcome of a single call."""
    (outcome,) = run(code, [call])
    return outcome


def reason(code: str, call: str = "attack()") -> str:
    """Why a single call failed."""
    outcome = one(code, call)
    assert isinstance(outcome, Failed), outcome
    return outcome.reason


def value(code: str, call: str = "attack()") -> object:
    """The value that a single call returned."""
    outcome = one(code, call)
    assert isinstance(outcome, Returned), outcome
    return outcome.value


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test no process and no descriptor is left. There is a secret to steal, and time enough."""
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sandbox, "DEADLINE_S", 600)  # a busy machine fails no test
    gc.collect()  # which closes what garbage has open
    descriptors, before = sorted(Path("/proc/self/fd").iterdir()), children()
    yield
    gc.collect()
    assert sorted(Path("/proc/self/fd").iterdir()) == descriptors
    assert children() <= before


ATTEMPT = """
import os
def attempt(action, *arguments, **options):
    try:
        return repr(action(*arguments, **options))
    except BaseException as error:
        return type(error).__name__
"""
"""The result of an action, or how it fails; for code that tries several."""


# Ordinary solutions.


def test_ordinary_code_runs_as_a_module_and_the_same_each_time() -> None:
    """All of the standard library is there; code for scripts does not run, and standard input is empty."""
    code = """
from __future__ import annotations
import asyncio, collections, dataclasses, datetime, decimal, hashlib, json, math, random, re, sqlite3, statistics, zlib
import email.mime.text, unittest.mock, xml.etree.ElementTree
@dataclasses.dataclass
class P:
    x: int
if __name__ == "__main__":
    raise ValueError
def shuffled():
    return list({str(i) for i in range(50)})
"""
    assert run(code, ["P(3).x", "math.gcd(12, 18)"]) == [Returned(3), Returned(6)]
    assert value(code, "shuffled()") == value(code, "shuffled()")
    assert "EOFError" in reason("n = input()", "n")


def test_installed_packages_are_not_there() -> None:
    """Only the standard library is; the reason names the package."""
    assert reason("import numpy") == "could not be called: ModuleNotFoundError: No module named 'numpy'"
    for folder, package in ((Path(pytest.__file__).parents[1], "pytest"), (ROOT, "tests.tiny")):
        hidden = f"import sys; sys.path.append({str(folder)!r})\nimport {package}"
        failure = reason(hidden).removeprefix("could not be called: ")
        assert failure.startswith(("PermissionError", "ModuleNotFoundError"))


def test_each_call_fails_or_returns_by_itself() -> None:
    """A call that raises or that calls what is not there fails alone; what it changed is seen by the next."""
    code = "import sys\nseen = []\ndef f(x):\n    seen.append(x)\n    return 10 // x"
    assert run(code, ["f(0)", "f(5)", "g(1)", "sys.exit(0)", "seen", "f(1) +"]) == [
        Failed("raised ZeroDivisionError: integer division or modulo by zero"),
        Returned(2),
        Failed("raised NameError: name 'g' is not defined"),
        Failed("raised SystemExit: 0"),
        Returned([0, 5]),
        Failed("raised SyntaxError: invalid syntax (<string>, line 1)"),
    ]


# Secrets, files and the network.


def test_the_secrets_of_the_parent_cannot_be_read(tmp_path: Path) -> None:
    """Neither from its environment nor from /proc, whichever way."""
    (tmp_path / "secret").write_text(SECRET)
    code = f"""
import ctypes, gc, itertools, subprocess
{ATTEMPT}
def read(path):
    with open(path, "rb") as file:
        return file.read()
def attack():
    pids = [os.getppid(), os.getpid(), "self", 1]
    parts = ["environ", "cmdline", "mem", "maps", "stat", "status", "fd", "cwd", "root", "exe", "task"]
    paths = [f"/proc/{{pid}}/{{part}}" for pid in pids for part in parts] + [{str(tmp_path / "secret")!r}]
    errors = [attempt(action, path) for path in paths for action in (read, os.listdir, os.readlink)]
    errors += [attempt(os.open, path, flags) for path in paths for flags in (os.O_RDONLY, os.O_PATH, os.O_DIRECTORY)]
    errors += [attempt(subprocess.check_output, ["ps", "eww"]), attempt(os.popen, "env")]
    assert set(errors) <= {{"PermissionError", "NotADirectoryError"}}, set(errors)
    libc = ctypes.CDLL(None)
    environment = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    variables = list(itertools.takewhile(bool, map(environment.__getitem__, itertools.count())))
    objects = [repr(each) for each in gc.get_objects() if type(each) in (dict, list, tuple) and "SECRET" in each]
    return sorted(os.environ), variables, objects
"""
    assert value(code) == (["LC_CTYPE", "PYTHONHASHSEED"], [b"PYTHONHASHSEED=0", b"LC_CTYPE=C.UTF-8"], [])


def test_nothing_can_be_read_or_asked_but_of_the_standard_library() -> None:
    """Not the system's files, not the project, not its tests, not even the folder it is in.

    Neither whether a file exists, nor its kind, size, times or owner can be asked for; of an open file, all of it.
    """
    paths = ["/etc/passwd", "/", "/tmp", ".", "/dev/null", "/dev/urandom", str(ROOT), __file__]
    code = f"""
import glob, pathlib
{ATTEMPT}
def read():
    return sorted({{attempt(action, path) for path in {paths} for action in (open, os.listdir)}})
def ask():
    paths, folder = {[*paths, "/no/such/file", os.__file__]}, os.open(os.path.dirname(os.__file__), os.O_RDONLY)
    stat = lambda path: pathlib.Path(path).stat()
    asked = [attempt(ask, path) for path in paths for ask in (os.stat, os.lstat, os.readlink, os.statvfs, stat)]
    asked += [attempt(os.stat, name, dir_fd=folder) for name in (*paths, "../../../../../../etc/passwd", "json")]
    known = [ask(path) for path in paths for ask in (os.path.exists, os.path.isfile)] + glob.glob("/etc/*")
    known += [os.access(path, mode) for path in paths for mode in (os.F_OK, os.R_OK)]
    with open(os.__file__) as file:
        return sorted(set(asked)), any(known), os.fstat(file.fileno()).st_size, file.read()
"""
    library = Path(os.__file__)
    assert value(code, "read()") == ["NotADirectoryError", "PermissionError"]
    assert value(code, "ask()") == (["PermissionError"], False, library.stat().st_size, library.read_text())


def test_nothing_can_be_written(tmp_path: Path) -> None:
    """No file is created, changed, cut, renamed, linked, made readable or removed; no disk can be filled."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    code = f"""
{ATTEMPT}
def attack():
    victim, folder = {str(victim)!r}, {str(tmp_path)!r}
    paths = ["x", "/x", "/tmp/x", "/dev/shm/x", folder + "/x", victim, os.__file__, os.path.expanduser("~") + "/x"]
    results = [attempt(open, path, mode) for path in paths for mode in ("w", "a", "x", "r+")]
    results += [attempt(os.open, path, os.O_RDONLY | os.O_TRUNC) for path in paths]
    results += [attempt(os.open, folder, os.O_TMPFILE | os.O_RDWR), attempt(os.memfd_create, "x")]
    results += [attempt(action, victim) for action in (os.unlink, os.rmdir, os.mkdir, os.mkfifo, os.utime, os.chdir)]
    results += [attempt(action, victim, folder + "/y") for action in (os.rename, os.link, os.symlink, os.replace)]
    results += [attempt(os.symlink, "/etc/passwd", "link"), attempt(os.chmod, victim, 0o777)]
    results += [attempt(os.truncate, victim, 0), attempt(os.chown, victim, 1, 1), attempt(os.mknod, folder + "/z")]
    results += [attempt(os.setxattr, victim, "user.x", b"1"), attempt(os.write, 0, bytes(2**20))]
    return sorted(set(results))
"""
    changed = victim.stat().st_mtime_ns
    assert value(code) == ["OSError", "PermissionError"]  # OSError: the request itself cannot grow
    assert (victim.read_text(), victim.stat().st_mtime_ns) == ("untouched", changed)
    assert list(tmp_path.iterdir()) == [victim]


def test_there_is_no_network(tmp_path: Path) -> None:
    """No socket of any family can be made: neither TCP nor UDP nor names nor Unix sockets, abstract ones included."""
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0sandbox-test")
    abstract.listen()
    code = f"""
import socket
{ATTEMPT}
def connect(family, kind, address):
    socket.socket(family, kind).connect(address)
def attack():
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW)
    families = range(0, 46)
    results = [attempt(socket.socket, family, kind) for family in families for kind in kinds]
    results += [attempt(connect, socket.AF_UNIX, socket.SOCK_STREAM, "\\0sandbox-test"), attempt(socket.socketpair)]
    results += [attempt(socket.create_connection, ("127.0.0.1", 80))]
    return sorted(set(results)), attempt(socket.getaddrinfo, "localhost", 80)
"""
    with abstract:
        assert value(code) == (["PermissionError"], "gaierror")


# Processes, threads and signals.


def test_no_other_process_is_started_or_harmed() -> None:
    """No fork, thread or program is started, none is signalled or traced, and no limit is raised."""
    code = f"""
import ctypes, multiprocessing, resource, signal, subprocess, threading
{ATTEMPT}
def attack():
    parent = os.getppid()
    assert parent == {os.getpid()}
    results = [attempt(os.kill, pid, number) for pid in (parent, -1, 0, 1, -parent) for number in (9, 15, 19, 0)]
    results += [attempt(os.killpg, 0, 9), attempt(os.pidfd_open, parent), attempt(os.fork), attempt(os.forkpty)]
    results += [attempt(os.execv, "/bin/sh", ["sh"]), attempt(os.posix_spawn, "/bin/sh", ["sh"], {{}})]
    results += [attempt(subprocess.run, ["true"]), attempt(os.popen, "true"), attempt(os.setsid), attempt(os.pipe)]
    results += [attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1)) for pid in (0, parent)]
    results += [attempt(os.sched_setaffinity, 0, [0]), attempt(os.nice, -5), attempt(os.setuid, 0)]
    results += [attempt(os.dup2, 1, 9), attempt(multiprocessing.Process(target=print).start)]
    assert set(results) == {{"PermissionError"}}, results
    assert os.system("true") != 0
    libc = ctypes.CDLL(None)
    assert [libc.ptrace(request, parent, 0, 0) for request in (0, 16, 0x4206)] == [-1] * 3
    return attempt(threading.Thread(target=print).start)
"""
    assert value(code) == "RuntimeError"


def test_system_calls_outside_the_list_are_denied_to_machine_code() -> None:
    """Of all numbers, those that are not on the list fail with EPERM, in the table for other word sizes too."""
    harmless = {3, 5, 8, 9, 10, 11, 12, 13, 14, 17, 24, 25, 28, 39, 63, 79, 96, 102, 104, 107, 108, 110}
    harmless |= {131, 186, 201, 202, 217, 228, 229, 257, 318}
    blocking = {0, 1, 15, 35, 219, 230, 231}
    unfiltered = {335, 336}  # uretprobe and uprobe pass every filter, and end their caller
    numbers = sorted(set(range(470)) - harmless - blocking - unfiltered)
    code = f"""
import ctypes
def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    def call(number):
        return libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()
    return [number for number in {numbers} + [2**30 + n for n in range(550)] if call(number) != (-1, 1)]
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    assert value(code) == []


def _verdict(machine: str, audit: int, number: int, *arguments: int) -> int:
    """What the filter returns for a call, by the rules of classic BPF."""
    words = struct.pack("<IIQ", number, audit, 0) + struct.pack("<6Q", *arguments, *[0] * (6 - len(arguments)))
    program, position, loaded = filter_program(machine), 0, 0
    while True:
        operation, if_true, if_false, operand = program[position]
        position += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            (loaded,) = struct.unpack_from("<I", words, operand)
        else:
            hit = loaded == operand if operation == 0x15 else bool(loaded & operand)
            position += if_true if hit else if_false


ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000


@pytest.mark.parametrize(
    ("machine", "audit", "allowed", "denied", "openat", "newfstatat"),
    [
        # read write mmap brk getrandom exit_group; clone fork vfork execve kill tgkill ptrace socket connect prctl
        # clone3 faccessat statx readlinkat, on x86_64 stat lstat access; neither fork nor vfork on aarch64
        (
            *("x86_64", 0xC000003E, (0, 1, 9, 12, 318, 231)),
            *((56, 57, 58, 59, 62, 234, 101, 41, 42, 157, 435, 269, 332, 267, 4, 6, 21), 257, 262),
        ),
        (
            *("aarch64", 0xC00000B7, (63, 64, 222, 214, 278, 94)),
            *((220, 221, 129, 131, 117, 198, 203, 167, 435, 48, 291, 78), 56, 79),
        ),
    ],
)
def test_the_filter_of_each_machine_allows_computing_and_reading(
    machine: str, audit: int, allowed: tuple[int, ...], denied: tuple[int, ...], openat: int, newfstatat: int
) -> None:
    """Files open for reading only, and have a status once they are open; another architecture's numbers end it."""
    assert {_verdict(machine, audit, number) for number in allowed} == {ALLOW}
    assert {_verdict(machine, audit, number) for number in denied} == {EPERM}
    assert {_verdict(machine, audit, number | 2**30) for number in allowed} == {EPERM}
    assert {_verdict(machine, audit ^ 1, number) for number in allowed} == {KILL}
    at_here = 2**32 - 100
    assert _verdict(machine, audit, openat, at_here, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_PATH, os.O_TMPFILE):
        assert _verdict(machine, audit, openat, at_here, 0, flag) == EPERM, flag
    assert _verdict(machine, audit, newfstatat, 3, 0, 0, 0x1000) == ALLOW
    assert {_verdict(machine, audit, newfstatat, at_here, 0, 0, flags) for flags in (0, 0x100, 0x1100)} == {EPERM}


# Time, memory and output.

_ENDLESS = {
    "a loop that catches everything": """
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "a loop in C": "10**10**8",
    "sleep behind deaf signals": """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1000)
""",
    "closed pipes": "import os; os.closerange(0, 99)\nwhile True: pass",
}


@pytest.mark.slow
def test_code_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its deadline if it waits, else by the limit of processor time, regardless of what it catches."""
    monkeypatch.setattr(sandbox, "DEADLINE_S", 3)
    with ThreadPoolExecutor(len(_ENDLESS)) as executor:
        outcomes = executor.map(lambda code: one(code, "1"), _ENDLESS.values())
    used = Failed(f"was not finished: it used more than {CPU_S} s of processor time, or was killed for its memory")
    expected = dict.fromkeys(_ENDLESS, used) | {
        "sleep behind deaf signals": Failed("was not finished: it took longer than 3 s")
    }
    assert dict(zip(_ENDLESS, outcomes, strict=True)) == expected


def test_a_busy_machine_does_not_end_code_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for code that waits: what computes has its processor time, however long that takes."""
    monkeypatch.setattr(sandbox, "DEADLINE_S", 0.2)
    code = "import time\ndef compute():\n    while time.process_time() < 0.8: pass\n    return 1"
    late = Failed("was not finished: it took longer than 0.2 s")
    assert run(code, ["compute()", "time.sleep(3000)"]) == [Returned(1), late]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = 'a' * 10**10", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 10**7)", "MemoryError"),
        ("import mmap; x = mmap.mmap(-1, 2**30)", "OSError: [Errno 12] Cannot allocate memory"),
        ("import os; x = [open(os.__file__) for _ in range(100)]", "OSError: [Errno 24] Too many open files"),
    ],
)
def test_memory_and_open_files_are_limited(code: str, error: str) -> None:
    """A run has half a gibibyte of address space, whichever way it asks for more, and few files."""
    assert reason(code, "1").startswith(f"could not be called: {error}")


@pytest.mark.parametrize("stream", ["sys.stdout", "sys.stderr"])
def test_output_is_discarded_up_to_a_limit(stream: str) -> None:
    """Printing changes no result; printing without end is ended at once, and so are results without end."""
    code = f"import sys\ndef say(n):\n    {stream}.write('x' * n)\n    {stream}.flush()\n    return n"
    assert run(code, ["say(100_000)", "say(10)"]) == [Returned(100_000), Returned(10)]
    assert reason(code, f"say({MAX_OUTPUT_BYTES} * 50)") == "was not finished: it wrote more than 1 MiB"
    code = "import os\ndef attack():\n    while True: os.write(3, b'[1]' * 10000)"
    assert reason(code) == "was not finished: it wrote more than 1 MiB"
    assert reason("", "'a' * 10**7") == "was not finished: it wrote more than 1 MiB"


# Crashes and odd ends.


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import os\nos._exit(0)", "it ended with status 0"),
        ("import os\nos._exit(7)", "it ended with status 7"),
        ("import ctypes\nctypes.string_at(0)", "it crashed (SIGSEGV)"),
        ("import os\nos.abort()", "it crashed (SIGSEGV)"),
        ("import ctypes\nctypes.CDLL(None).exit(0)", "it ended with status 0"),
        ("import sys, builtins\nsys.modules.clear()\nbuiltins.__dict__.clear()", "it ended with status 1"),
    ],
)
def test_ending_early_leaves_every_call_unfinished(code: str, ending: str) -> None:
    """An exit, a crash, a wrecked interpreter: nothing is passed, and the reason says how it ended."""
    assert run(code, ["1", "2"]) == [Failed(f"was not finished: {ending}")] * 2


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import sys\nsys.exit(0)", "could not be called: SystemExit: 0"),
        ("raise KeyboardInterrupt", "could not be called: KeyboardInterrupt"),
        ("def f(:", "could not be called: SyntaxError: invalid syntax (solution.py, line 1)"),
        ("x = '\0'", "could not be called: SyntaxError: source code string cannot contain null bytes"),
        ("x = '\ud800'", "could not be called: UnicodeEncodeError: 'utf-8' codec can't encode character"),
        ("def f(): f()\nf()", "could not be called: RecursionError: maximum recursion depth exceeded"),
        ("(" * 500 + ")" * 500, "could not be called: SyntaxError: too many nested parentheses"),
        ("raise Exception('x' * 10**6)", "could not be called: Exception: xxxxxxxxxx"),
        ("class E(Exception):\n  def __str__(self): return 1\nraise E", "was not finished: it ended with status 1"),
    ],
)
def test_code_that_does_not_load_fails_every_call(code: str, failure: str) -> None:
    """The exception that is raised on the way, an exit included, is the reason."""
    outcomes = run(code, ["1", "2"])
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.reason.startswith(failure)
        assert len(outcome.reason) < 300


# Values.

VALUES = [
    *(None, True, False, 0, -1, 2**64, -(10**50), 1.5, -0.0, 1e308, float("inf"), 1j, complex(1, -2.5)),
    *("", "a\n\"'\\", "\ud800\x00é\U0001f600", b"", b"\xff\x00", [], [[1], [2.0, "x"]], (), (1, (2,))),
    *(set(), {1, (2, "x")}, frozenset({1}), {}, {1: "a", (1, 2): [3], None: {}}, {"k": {"n": {1, 2}}}),
]


def forging(lines: bytes) -> str:
    """Code that writes its own lines into the pipe for results, and ends."""
    return f"import os\ndef attack():\n    os.write(3, {lines!r})\n    os._exit(0)"


def test_plain_data_arrives_unchanged() -> None:
    """Type and value of every kind of plain data, and those of their parts."""
    outcomes = run("inf = float('inf')", [repr(value) for value in VALUES])
    assert [(type(outcome.value), repr(outcome.value)) for outcome in outcomes if isinstance(outcome, Returned)] == [
        (type(value), repr(value)) for value in VALUES
    ]


def test_subclasses_arrive_as_their_built_in_bases() -> None:
    """A Counter is a dict and a named tuple a tuple, as for Python's `==`; overridden methods have no effect."""
    code = """
import collections, enum
class Text(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def encode(self, *how): return b"forged"
class Number(int):
    def __eq__(self, other): return True
    def __format__(self, how): return "2a"
Point = collections.namedtuple("Point", "x y")
"""
    calls = ["collections.Counter('aab')", "Point(1, 2)", "Text('t')", "Number(7)", "enum.IntEnum('E', 'A').A"]
    values = [outcome.value for outcome in run(code, calls) if isinstance(outcome, Returned)]
    assert values == [{"a": 2, "b": 1}, (1, 2), "t", 7, 1]
    assert [type(value) for value in values] == [dict, tuple, str, int, int]


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ("object()", "returned a object, which is not plain data"),
        ("(x for x in [])", "returned a generator, which is not plain data"),
        ("__import__('fractions').Fraction(1, 2)", "returned a Fraction, which is not plain data"),
        ("[print]", "returned a builtin_function_or_method, which is not plain data"),
        ("nested(60)", "returned a value that is nested too deeply"),
        ("nested(100_000)", "returned a value that is nested too deeply"),
        ("endless()", "returned a value that is nested too deeply"),
        ("set(range(2000))", "returned nothing that can be read"),
    ],
)
def test_values_that_are_not_plain_data_fail(call: str, failure: str) -> None:
    """Objects, cycles and deep nesting; the reason names the type."""
    code = """
def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value
def endless():
    value = []
    value.append(value)
    return value
"""
    assert run(code, [call]) == [Failed(failure)]


def test_a_huge_number_takes_no_time() -> None:
    """It is written in hexadecimal: decimal digits take the square of their number, and Python refuses many of them."""
    with processor_time(1):
        assert run("", ["7 ** 10**6"]) == [Returned(7**10**6)]


MALFORMED = rb"""
{}
[]
["returned"]
["returned",NaN]
["returned",["int",5]]
["returned",["int","zz"]]
["returned",["list",[5]]]
["returned",["set",[["list",[]]]]]
["returned",["dict",[["int","1"]]]]
["returned",["float","0x1p99999"]]
["returned",["str","ff"]]
["returned",["__import__",[]]]
["failed",null]
["passed",true]
"""


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"\n", b"\x00\xff\n", b'["returned",true]'),
        *(line + b"\n" for line in MALFORMED.split(b"\n")[1:-1]),
        *(b'["returned",' + b"9" * 10_000 + b"]\n", b'["returned",' + b"[" * 100_000 + b"\n"),
        b'["returned",' + b'["list",[' * 400 + b"]]" * 400 + b"]\n",
    ],
)
def test_a_malformed_message_is_a_failure(message: bytes) -> None:
    """No bytes that the code writes instead of a result raise anything."""
    assert isinstance(run(forging(message), ["attack()"])[0], Failed)


def test_a_forged_result_counts_only_for_its_call() -> None:
    """Lines are taken in the order of the calls; more lines than calls are ignored."""
    code = forging(b'["returned",true]\n' * 3 + b'["returned",false]\n' * 100)
    assert run(code, ["attack()", "1"]) == [Returned(True), Returned(True)]
    assert run(code, ["1", "attack()", "2"]) == [Returned(1), Returned(True), Returned(True)]


def test_colliding_hashes_take_the_reader_no_time() -> None:
    """Building a large set of numbers with one hash would take this process quadratic time, so sets are limited."""
    assert isinstance(run("", ["{n * (2**61 - 1) for n in range(1, 1001)}"])[0], Returned)
    numbers = ",".join(f'["int","{number * (2**61 - 1):x}"]' for number in range(20_000))
    forged = forging(f'["returned",["set",[{numbers}]]]\n'.encode())
    with processor_time(1):
        assert isinstance(run(forged, ["attack()"])[0], Failed)


# Where there is no sandbox.

_WITHOUT = """
import ctypes, struct, sys
number, argument, error = map(int, sys.argv[1:4])
instructions = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), (0x15, 0, 1, argument)]
instructions += [(6, 0, 0, 0x00050000 | error), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in instructions))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code)), 0, 0) == 0
from components.shared.errors import PipelineError
from components.grading.unit_tests import grade_code
from components.grading.verifier import require_sandbox
print(grade_code("assert f() == 1", f"```python\\nopen({sys.argv[4]!r}, 'x')\\ndef f(): return 1\\n```"))
try:
    require_sandbox()
except PipelineError as refused:
    print(refused)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize(
    ("number", "argument", "error", "missing"),
    [
        (444, 0, 38, "Landlock is not available (Function not implemented)"),
        (157, 22, 22, "seccomp is not available (Invalid argument)"),
        (157, 38, 22, "prctl 38 failed (Invalid argument)"),
    ],
)
def test_without_a_protection_no_code_is_run(
    number: int, argument: int, error: int, missing: str, tmp_path: Path
) -> None:
    """A kernel that lacks Landlock or seccomp is refused in one line that says what is missing and what to do."""
    trace = tmp_path / "trace"
    command = [sys.executable, "-c", _WITHOUT, str(number), str(argument), str(error), str(trace)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    grade, refusal = ran.stdout.splitlines()
    assert "UNSCORABLE" in grade
    assert not trace.exists()
    assert refusal.startswith(f"the sandbox for code answers cannot be set up: {missing}; it needs Linux")
    assert "leave out the problems whose answers are unit tests" in refusal


def test_a_confinement_that_does_not_hold_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a stage tries what should be denied, and does not rely on what a system reports."""
    require_sandbox()
    idle = "main.__globals__['confine'] = lambda *paths: None\nmain()"
    monkeypatch.setattr(sandbox, "_CHILD", sandbox._CHILD.replace("\nmain()", f"\n{idle}"))
    with pytest.raises(PipelineError, match=r"listdir\('/'\) is not denied; it needs Linux"):
        require_sandbox()


def test_an_interpreter_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the environment, not of the code."""
    monkeypatch.setattr(sandbox, "_CHILD", "import sys; sys.exit('no luck')")
    with pytest.raises(PipelineError, match="cannot be set up: it ended with status 1; no luck"):
        run("", ["1"])


def test_a_run_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its pipes are closed, which a process forked in the meantime may hold open; and nothing is lost."""
    start = sandbox._start
    held: list[int] = []

    def hold(code: str, calls: list[str]) -> subprocess.Popen[bytes]:
        started = start(code, calls)
        held.extend(os.open(f"/proc/{started.pid}/fd/{number}", os.O_WRONLY) for number in (1, 2))
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        return started

    monkeypatch.setattr(sandbox, "_start", hold)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(run, "", ["1", "'x' * 20_000"])
        try:
            assert running.result(timeout=300) == [Returned(1), Returned("x" * 20_000)]
        finally:
            for descriptor in held:
                os.close(descriptor)


def test_code_whose_parent_has_ended_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would end it: the kernel was asked too late to end it with its parent."""
    monkeypatch.setattr(os, "getpid", lambda: 0)
    with pytest.raises(PipelineError, match="it ended with status 1"):
        run("", ["1"])


@pytest.mark.slow
def test_a_run_does_not_outlive_its_parent() -> None:
    """When the process that asked for it is killed, so is the run."""
    code = "from components.grading.sandbox.run import run; run('import time; time.sleep(1000)', ['1'])"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    # One that runs under a filter of system calls.
    wait_until(lambda: any("Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text() for pid in children(parent.pid)))
    (child,) = children(parent.pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(child))
