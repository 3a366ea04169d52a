"""The sandbox against code that tries to break out of it, to break it, or just to be run in it."""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.grading.sandbox import process
from components.grading.sandbox.limits import CPU_S, OUTPUT_BYTES
from components.grading.sandbox.run import Failed, Gave, Outcome, require_sandbox, run
from components.grading.sandbox.seccomp import filter_program
from components.shared.errors import PipelineError

ROOT = Path(__file__).parents[2]
SECRET = "the-secret-of-the-parent"


def one(code: str, call: str = "attack()") -> Outcome:
    """What a single call gives."""
    (outcome,) = run(code, [call])
    return outcome


def reason(code: str, call: str = "attack()") -> str:
    """Why a single call failed."""
    outcome = one(code, call)
    assert isinstance(outcome, Failed), outcome
    return outcome.reason


def value(code: str, call: str = "attack()") -> object:
    """What a single call gave."""
    outcome = one(code, call)
    assert isinstance(outcome, Gave), outcome
    return outcome.value


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does: no process and no descriptor stays behind; and there is a secret to be stolen."""
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    descriptors, before = sorted(Path("/proc/self/fd").iterdir()), _children()
    yield
    assert sorted(Path("/proc/self/fd").iterdir()) == descriptors
    assert _children() <= before


def _children() -> set[str]:
    return {child for each in Path("/proc/self/task").glob("*/children") for child in each.read_text().split()}


ATTEMPT = """
import os
def attempt(action, *arguments):
    try:
        return repr(action(*arguments))
    except BaseException as error:
        return type(error).__name__
"""
"""What an action does, or how it fails; for code that tries several."""


# What ordinary solutions do.

LIBRARY = {
    "math": "math.gcd(12, 18)",
    "collections": "collections.Counter('aab').most_common(1)",
    "itertools": "list(itertools.permutations([1, 2]))",
    "heapq": "heapq.nsmallest(2, [3, 1, 2])",
    "re": "re.findall(r'[0-9]+', 'a1b22')",
    "functools": "functools.reduce(lambda a, b: a * b, [1, 2, 3])",
    "string": "string.ascii_lowercase[:3]",
    "random": "random.Random(1).randint(1, 1)",
    "datetime": "datetime.date(2024, 2, 28) + datetime.timedelta(days=2) == datetime.date(2024, 3, 1)",
    "json": "json.loads(json.dumps({'a': [1, None]}))",
    "typing": "typing.get_args(typing.Optional[int])[1] is type(None)",
    "bisect": "bisect.bisect([1, 2, 3], 2)",
    "fractions": "str(fractions.Fraction(6, 4))",
    "decimal": "str(decimal.Decimal('0.1') + decimal.Decimal('0.2'))",
    "statistics": "statistics.median([1, 5, 2])",
    "operator": "operator.itemgetter(1)('ab')",
    "copy": "copy.deepcopy([[1]])",
    "cmath": "cmath.sqrt(-1)",
    "hashlib": "hashlib.md5(b'a').hexdigest()[:6]",
    "zlib": "zlib.crc32(b'a')",
    "dataclasses": "dataclasses.make_dataclass('P', ['x'])(3).x",
    "enum": "enum.IntEnum('E', 'A B').B + 0",
    "array": "array.array('i', [1, 2]).tolist()",
    "calendar": "calendar.isleap(2024)",
    "textwrap": "textwrap.shorten('a b c', 3, placeholder='')",
}


def test_the_standard_library_can_be_used() -> None:
    """What solutions import is there and gives what it gives outside."""
    names = {name: __import__(name) for name in LIBRARY}
    code = "".join(f"import {name}\n" for name in LIBRARY)
    outcomes = run(code, list(LIBRARY.values()))
    assert outcomes == [Gave(eval(call, names)) for call in LIBRARY.values()]


def test_installed_packages_are_not_there() -> None:
    """Only the standard library is; the reason names the package."""
    assert reason("import numpy") == "could not be called: ModuleNotFoundError: No module named 'numpy'"
    for folder, package in ((Path(pytest.__file__).parents[1], "pytest"), (ROOT, "tests.tiny")):
        hidden = f"import sys; sys.path.append({str(folder)!r})\nimport {package}"
        failure = reason(hidden).removeprefix("could not be called: ")
        assert failure.startswith(("PermissionError", "ModuleNotFoundError"))


def test_each_call_is_a_matter_of_its_own() -> None:
    """A call that raises or that calls what is not there fails alone; what it changed is seen by the next."""
    code = "import sys\nseen = []\ndef f(x):\n    seen.append(x)\n    return 10 // x"
    assert run(code, ["f(0)", "f(5)", "g(1)", "sys.exit(0)", "seen", "f(1) +"]) == [
        Failed("raised ZeroDivisionError: integer division or modulo by zero"),
        Gave(2),
        Failed("raised NameError: name 'g' is not defined"),
        Failed("raised SystemExit: 0"),
        Gave([0, 5]),
        Failed("raised SyntaxError: invalid syntax (<string>, line 1)"),
    ]


def test_what_is_only_for_scripts_is_left_out() -> None:
    """Code under `if __name__ == "__main__"` does not run; standard input is empty."""
    assert value("if __name__ == '__main__':\n    raise ValueError\nx = 1", "x") == 1
    assert "EOFError" in reason("n = input()", "n")


def test_sets_have_the_same_order_in_every_run() -> None:
    """Equal inputs give equal verdicts, even where an answer lists the elements of a set."""
    code = "def f():\n    return list({str(i) for i in range(50)})"
    assert value(code, "f()") == value(code, "f()")


def test_code_in_which_dataclasses_look_for_their_module_runs() -> None:
    """The code is a module that can be found under its name."""
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int"
    assert value(code, "P(3).x") == 3


# Secrets, files and the network.


def test_the_secrets_of_the_parent_are_nowhere(tmp_path: Path) -> None:
    """Neither its environment nor what /proc tells of it can be read, whichever way."""
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
    found = [attempt(action, path) for path in paths for action in (read, os.listdir, os.readlink)]
    found += [attempt(os.open, path, flags) for path in paths for flags in (os.O_RDONLY, os.O_PATH, os.O_DIRECTORY)]
    found += [attempt(subprocess.check_output, ["ps", "eww"]), attempt(os.popen, "env")]
    assert set(found) <= {{"PermissionError", "NotADirectoryError"}}, set(found)
    libc = ctypes.CDLL(None)
    environment = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    variables = list(itertools.takewhile(bool, map(environment.__getitem__, itertools.count())))
    objects = [repr(each) for each in gc.get_objects() if type(each) in (dict, list, tuple) and "SECRET" in each]
    return sorted(os.environ), variables, objects
"""
    assert value(code) == (["LC_CTYPE", "PYTHONHASHSEED"], [b"PYTHONHASHSEED=0", b"LC_CTYPE=C.UTF-8"], [])


@pytest.mark.parametrize("path", ["/etc/passwd", "/", "/tmp", ".", "/dev/null", "/dev/urandom", str(ROOT), __file__])
def test_nothing_can_be_read_but_the_standard_library(path: str) -> None:
    """Not the system's files, not the project, not its tests, not even the folder it is in."""
    attack = f"{ATTEMPT}\ndef attack():\n    return [attempt(open, {path!r}), attempt(os.listdir, {path!r})]"
    given = value(attack)
    assert isinstance(given, list)
    assert set(given) <= {"PermissionError", "IsADirectoryError", "NotADirectoryError"}
    assert value("import os", "open(os.__file__).read()") == Path(os.__file__).read_text()


def test_packages_beside_the_standard_library_cannot_be_read() -> None:
    """They lie in its folder, but are no part of it."""
    folder = Path(os.__file__).parent
    installed = next((file for name in ("site-packages", "dist-packages") for file in folder.glob(f"{name}/*/*")), None)
    if installed is None:
        pytest.skip("no package is installed there")
    assert "PermissionError" in reason("", f"open({str(installed)!r})")


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


def test_no_other_process_comes_to_be_or_to_harm() -> None:
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


def test_a_fork_bomb_is_a_dud() -> None:
    """Forking in a loop, whatever is caught, starts nothing."""
    code = """
import os
def attack():
    forked = 0
    for _ in range(1000):
        try:
            forked += os.fork() >= 0
        except OSError:
            pass
    return forked
"""
    assert value(code) == 0


def test_system_calls_outside_the_list_are_denied_to_machine_code() -> None:
    """Of all numbers, those that are not on the list fail with EPERM, in the table for other word sizes too."""
    harmless = {3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 17, 21, 24, 25, 28, 39, 63, 79, 96, 102, 104, 107, 108, 110}
    harmless |= {131, 186, 201, 202, 217, 228, 229, 257, 262, 269, 318}
    waiting = {0, 1, 15, 35, 219, 230, 231}
    kernels_own = {335, 336}  # uretprobe and uprobe pass every filter, and end whoever calls them
    numbers = sorted(set(range(470)) - harmless - waiting - kernels_own)
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
    ("machine", "audit", "allowed", "denied", "openat"),
    [
        # read write mmap brk getrandom exit_group; clone fork vfork execve kill tgkill ptrace socket connect prctl
        # clone3; there is neither fork nor vfork on aarch64
        ("x86_64", 0xC000003E, (0, 1, 9, 12, 318, 231), (56, 57, 58, 59, 62, 234, 101, 41, 42, 157, 435), 257),
        ("aarch64", 0xC00000B7, (63, 64, 222, 214, 278, 94), (220, 221, 129, 131, 117, 198, 203, 167, 435), 56),
    ],
)
def test_the_filter_of_each_machine_allows_computing_and_reading(
    machine: str, audit: int, allowed: tuple[int, ...], denied: tuple[int, ...], openat: int
) -> None:
    """Files open for reading only; the numbers of another architecture end the process."""
    assert {_verdict(machine, audit, number) for number in allowed} == {ALLOW}
    assert {_verdict(machine, audit, number) for number in denied} == {EPERM}
    assert {_verdict(machine, audit, number | 2**30) for number in allowed} == {EPERM}
    assert {_verdict(machine, audit ^ 1, number) for number in allowed} == {KILL}
    at_here = 2**32 - 100
    assert _verdict(machine, audit, openat, at_here, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_PATH, os.O_TMPFILE):
        assert _verdict(machine, audit, openat, at_here, 0, flag) == EPERM, flag


# Time, memory and output.

_ENDLESS = {
    "a loop": "while True: pass",
    "a loop that catches everything": """
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "a loop in C": "10**10**8",
    "sleep": "import time; time.sleep(1000)",
    "sleep behind deaf signals": """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1000)
""",
    "closed pipes": "import os; os.closerange(0, 99)\nwhile True: pass",
    "a lock that nobody opens": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a regular expression": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "the reason of a failure": """
class E(Exception):
    def __str__(self):
        while True: pass
raise E
""",
    "a destructor": """
class D:
    def __del__(self):
        while True: pass
D()
""",
}


@pytest.mark.slow
def test_what_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it hangs in and whatever it catches, it is over when its deadline is."""
    monkeypatch.setattr(process, "DEADLINE_S", 3)
    with ThreadPoolExecutor(len(_ENDLESS)) as executor:
        outcomes = executor.map(lambda code: one(code, "1"), _ENDLESS.values())
    assert dict(zip(_ENDLESS, outcomes, strict=True)) == dict.fromkeys(
        _ENDLESS, Failed("was not finished: it took longer than 3 s")
    )


@pytest.mark.slow
def test_computing_is_limited_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends what computes for too long even if nobody is watching the clock."""
    monkeypatch.setattr(process, "DEADLINE_S", 60)
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert f"more than {CPU_S} s of processor time" in reason(code, "1")


def test_the_clock_starts_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting an interpreter may take longer; what was given before the deadline counts, the rest is unfinished."""
    monkeypatch.setattr(process, "DEADLINE_S", 0.5)
    monkeypatch.setattr(process, "_CHILD", f"import time; time.sleep(0.6){process._CHILD}")
    late = Failed("was not finished: it took longer than 0.5 s")
    assert run("import time", ["time.sleep(0.1)", "time.sleep(30)", "2"]) == [Gave(None), late, late]


@pytest.mark.parametrize(
    "code",
    [
        "x = 'a' * 10**10",
        "x = [0] * 10**10",
        "x = []\nwhile True: x.append('a' * 10**7)",
        "x = bytearray(2**29)",
        "import mmap; x = mmap.mmap(-1, 2**30)",
    ],
)
def test_memory_is_limited(code: str) -> None:
    """A run has half a gibibyte of address space, whichever way it asks for more."""
    assert reason(code, "1") in {
        "could not be called: MemoryError",
        "could not be called: OSError: [Errno 12] Cannot allocate memory",
    }


def test_few_files_can_be_open_at_once() -> None:
    """The limit is the run's own, and far below what a process usually has."""
    assert "OSError: [Errno 24] Too many open files" in reason("import os", "[open(os.__file__) for _ in range(100)]")


@pytest.mark.parametrize("stream", ["sys.stdout", "sys.stderr"])
def test_output_is_thrown_away_up_to_a_limit(stream: str) -> None:
    """Printing changes no result; printing without end is ended at once."""
    code = f"import sys\ndef say(n):\n    {stream}.write('x' * n)\n    {stream}.flush()\n    return n"
    assert run(code, ["say(100_000)", "say(10)"]) == [Gave(100_000), Gave(10)]
    assert reason(code, f"say({OUTPUT_BYTES} * 50)") == "was not finished: it wrote more than 1 MiB"


def test_a_flood_of_results_is_ended() -> None:
    """What is sent as results is limited like what is printed."""
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
    """Whatever is raised on the way, an exit included, is the reason."""
    outcomes = run(code, ["1", "2"])
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.reason.startswith(failure)
        assert len(outcome.reason) < 300


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
        (444, 0, 95, "Landlock is not available (Operation not supported)"),
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
    assert refusal.startswith(f"the sandbox for code answers cannot be set up: {missing}; it takes Linux")
    assert "leave out the problems whose answers are tests" in refusal


def test_this_machine_has_a_sandbox() -> None:
    """The check that a stage makes before it starts passes here."""
    require_sandbox()


def test_a_confinement_that_does_not_hold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check tries the doors, and does not rely on what a system says of itself."""
    idle = "main.__globals__['confine'] = lambda *paths: None\nmain()"
    monkeypatch.setattr(process, "_CHILD", process._CHILD.replace("\nmain()", f"\n{idle}"))
    with pytest.raises(PipelineError, match=r"listdir\('/'\) is not denied; it takes Linux"):
        require_sandbox()


def test_an_interpreter_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot even be started is an error of the environment, not of the code."""
    monkeypatch.setattr(process, "_CHILD", "import sys; sys.exit('no luck')")
    with pytest.raises(PipelineError, match="cannot be set up: it ended with status 1; no luck"):
        run("", ["1"])


def test_many_runs_at_once_do_not_mix() -> None:
    """Threads that run code at the same time each get their own results."""
    with ThreadPoolExecutor(8) as executor:
        outcomes = list(executor.map(lambda number: run(f"x = {number}", ["x", "-x"]), range(24)))
    assert outcomes == [[Gave(number), Gave(-number)] for number in range(24)]


def test_a_run_is_over_when_its_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when its pipes are closed, which a process forked in the meantime may hold open; and nothing is lost."""
    start = process._start
    held: list[int] = []

    def hold(code: str, calls: list[str]) -> subprocess.Popen[bytes]:
        started = start(code, calls)
        held.extend(os.open(f"/proc/{started.pid}/fd/{number}", os.O_WRONLY) for number in (1, 2))
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        return started

    monkeypatch.setattr(process, "_start", hold)
    monkeypatch.setattr(process, "DEADLINE_S", 3600)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(run, "", ["1", "'x' * 20_000"])
        try:
            assert running.result(timeout=60) == [Gave(1), Gave("x" * 20_000)]
        finally:
            for descriptor in held:
                os.close(descriptor)


def test_a_run_does_not_outlive_its_parent() -> None:
    """When the process that asked for it is killed, so is the run."""
    code = "from components.grading.sandbox.run import run; run('import time; time.sleep(1000)', ['1'])"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 30
    while not _is_confined(child := children.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert child
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


def _is_confined(pid: str) -> bool:
    """Whether a process runs under a filter of system calls."""
    return bool(pid) and "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
