"""The worker processes: every submission gets its grade, regardless of what happens to the process that grades it."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.grading.verifier import Grade, Reason, Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from tests.grading.fake_grader import FUNCTION
from tests.grading.processes import children, is_gone, wait_until, workers

ROOT = Path.cwd()


def pool_of(num_workers: int, deadline_s: float = 1.0, function: str = FUNCTION) -> Verifier:
    """A verifier whose workers do what the gold says."""
    return Verifier(num_workers=num_workers, deadline_s=deadline_s, function=function)


@pytest.fixture
def pool() -> Iterator[Verifier]:
    """Two workers."""
    with pool_of(2) as pool:
        yield pool


def act(gold: str, response: object = "") -> Submission:
    """A submission that makes the fake grader act."""
    return Submission(gold, str(response), AnswerPolicy.STATED)


def fine(number: int) -> Submission:
    """A submission without any trouble."""
    return act("nothing", number)


def right(response: object) -> Grade:
    """The grade of a response that was graded undisturbed."""
    return Grade(Verdict.RIGHT, str(response), Reason.SAME_TEXT, detail="stated")


def unscorable(reason: Reason, detail: str) -> Grade:
    """The grade of a response that was not."""
    return Grade(Verdict.UNSCORABLE, None, reason, detail=detail)


def script(text: str, cwd: Path) -> "subprocess.Popen[str]":
    """Run a user's program in a separate folder, and in a process group of its own."""
    path = cwd / "program.py"
    imports = "from components.grading.verifier import Submission, Verifier\n"
    imports += "from components.shared.answer_policy import AnswerPolicy\n"
    imports += "def act(gold):\n    return Submission(gold, '', AnswerPolicy.STATED)\n"
    imports += f"FUNCTION = {FUNCTION!r}\n"
    path.write_text(imports + textwrap.dedent(text), encoding="utf-8")
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    command = [sys.executable, str(path)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def test_grades_come_in_the_order_of_the_submissions(pool: Verifier) -> None:
    """A thousand of them, with slower ones in between; none for none."""
    submissions = [fine(number) for number in range(1000)]
    submissions[17] = submissions[400] = act("sleep", 0.2)
    assert pool(submissions) == [right(each.response) for each in submissions]
    assert pool([]) == []


@pytest.mark.parametrize(
    ("gold", "reason", "detail"),
    [
        pytest.param("loop", Reason.TIME, "took longer than 1 s", marks=pytest.mark.slow),
        pytest.param("loop in C", Reason.TIME, "took longer than 1 s", marks=pytest.mark.slow),
        ("ask for much memory", Reason.MEMORY, "out of memory"),
        ("fault", Reason.CRASH, "its process ended by signal 11"),
        ("exit", Reason.CRASH, "its process ended with exit code 3"),
    ],
)
def test_a_submission_that_ends_its_worker_is_unscorable(
    pool: Verifier, gold: str, reason: Reason, detail: str
) -> None:
    """The others are graded as if nothing had been."""
    assert pool([fine(1), act(gold), fine(2)]) == [right(1), unscorable(reason, detail), right(2)]


def test_memory_that_a_library_used_and_hid_is_noticed() -> None:
    """Filling it takes long on some machines, and is to be ended by its size."""
    with pool_of(1, deadline_s=60) as pool:
        assert pool([act("use much memory and hide it")]) == [unscorable(Reason.MEMORY, "out of memory")]


def test_the_deadline_can_be_set() -> None:
    """A shorter deadline ends a computation that would have ended within a second, and the reason names it.

    Waiting, as on a busy machine, does not count.
    """
    with pool_of(1, 0.25) as pool:
        assert pool([act("compute", 0.6), act("compute", 0.1), act("sleep", 0.6)]) == [
            unscorable(Reason.TIME, "took longer than 0.25 s"),
            right(0.1),
            right(0.6),
        ]


def test_a_worker_that_has_grown_large_is_replaced() -> None:
    """The memory that one submission left behind is not counted against the next."""
    with pool_of(1) as pool:
        (first,) = pool([act("process")])
        assert pool([act("process")]) == [first]
        assert pool([act("use some memory")]) == [right("")]
        assert pool([act("process")]) != [first]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_submission_whose_worker_is_killed_is_graded_by_another(
    pool: Verifier, tmp_path: Path, sent: signal.Signals
) -> None:
    """It is not to blame for what comes from outside."""
    path = tmp_path / "process"
    with ThreadPoolExecutor() as threads:
        call = threads.submit(pool, [fine(1), act("sleep the first time", path), fine(2)])
        wait_until(path.exists)
        os.kill(int(path.read_text(encoding="ascii")), sent)
        assert call.result() == [right(1), right(path), right(2)]


@pytest.mark.long(minutes=0.3)
def test_killing_workers_again_and_again_changes_nothing(pool: Verifier) -> None:
    """Fifty processes killed at any moment, some of them the one that workers are forked from.

    The grades are the same, and neither a process nor a file is left over.
    """
    files, before, others = set(Path("/proc/self/fd").iterdir()), children(), workers()
    stop = threading.Event()
    submissions = [act("compute", 0.002), *map(fine, range(20))] * 100
    generator, num_killed = random.Random(1), 0
    with ThreadPoolExecutor() as threads:
        calls = threads.submit(lambda: [pool(submissions) for _ in iter(stop.is_set, True)])
        while num_killed < 50 and not calls.done():
            time.sleep(generator.uniform(0.1, 0.5))
            if processes := workers() - others:
                victims = children() - before if num_killed % 10 == 9 else processes
                with contextlib.suppress(ProcessLookupError):
                    os.kill(generator.choice(sorted(victims)), signal.SIGKILL)
                    num_killed += 1
        stop.set()
        assert all(grades == [right(each.response) for each in submissions] for grades in calls.result())
    pool.close()
    assert children() <= before
    assert set(Path("/proc/self/fd").iterdir()) <= files


@pytest.mark.parametrize("text", ["9" * 2_000_000, "\0a\0\n", "\ud800 \udfff", "\u2028\r\n\x85", "ü日本"])
def test_any_text_arrives_unchanged(pool: Verifier, text: str) -> None:
    """Two megabytes, NULs, half characters and all kinds of line ends."""
    assert pool([act("nothing", text)] * 3) == [right(text)] * 3


def test_output_of_a_library_is_not_mistaken_for_a_grade(pool: Verifier, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does it appear among the output of the program."""
    assert pool([act("print"), fine(1)]) == [right(""), right(1)]
    assert capfd.readouterr() == ("", "")


def test_a_worker_sees_no_secrets(pool: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment has only what it needs to import the grader."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    (grade,) = pool([act("variables")])
    # Python itself sets the first.
    names = {"LC_CTYPE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH"}
    assert set((grade.extracted or "").split()) <= names


def test_several_threads_may_call_at_once(pool: Verifier) -> None:
    """Workers live on when the thread that started them ends."""
    thread = threading.Thread(target=pool, args=[[fine(0)]])
    thread.start()
    thread.join()
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(pool, [fine(number)] * 50) for number in range(12)]
        assert [call.result() for call in calls] == [[right(number)] * 50 for number in range(12)]


def test_closing_ends_calls_and_processes(tmp_path: Path) -> None:
    """A call in flight raises rather than waits for its end; a closed pool takes no more."""
    pool = pool_of(2, 3600.0)
    before = children()
    path = tmp_path / "process"
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(pool, [act("write process and sleep", path)] * 5) for _ in range(2)]
        wait_until(path.exists)
        pool.close()
        for call in calls:
            with pytest.raises(RuntimeError, match="closed"):
                call.result()
    assert children() <= before
    with pytest.raises(RuntimeError, match="is closed"):
        pool([fine(1)])
    pool.close()


def test_a_worker_that_cannot_start_is_an_error() -> None:
    """An import error of the grader is reported, not retried for ever."""
    with (
        pool_of(2, function="tests.grading.nowhere:grade") as pool,
        pytest.raises(PipelineError, match=r"no answer can be graded: the process that grades ended with exit code 1"),
    ):
        pool([fine(1), fine(2)])


def test_a_start_that_is_killed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by the kernel for lack of memory; a grader that is killed each time is an error."""
    (tmp_path / "killed.py").write_text(
        "import os, pathlib, signal\n"
        "left = pathlib.Path(__file__).with_name('left')\n"
        "left.write_text(left.read_text()[1:])\n"
        "if left.read_text():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "from tests.grading.fake_grader import grade\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    for starts in (10, 11):
        (tmp_path / "left").write_text("x" * starts, encoding="utf-8")
        with pool_of(1, function="killed:grade") as pool:
            if starts == 10:
                assert pool([fine(1)]) == [right(1)]
            else:
                with pytest.raises(PipelineError, match=r"the process that grades ended 10 times before it was ready"):
                    pool([fine(1)])


def test_a_program_needs_no_precautions(tmp_path: Path) -> None:
    """No main guard, no need to close, and any folder with any modules in it."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')", encoding="utf-8")
    (tmp_path / "components.py").write_text("raise RuntimeError('nor this one')", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    program = """
        import os
        os.chdir(os.pardir)
        print(Verifier()([Submission("5", "#### 5", AnswerPolicy.MARKED)])[0].verdict)
    """
    assert script(program, tmp_path / "sub").communicate(timeout=300) == ("right\n", "")


def test_no_worker_outlives_a_killed_program_that_forked_another(tmp_path: Path) -> None:
    """The other one holds the sockets of the program open, such as a process that loads data does."""
    text = """
        import os, time
        pool = Verifier(num_workers=1, function=FUNCTION)
        pool([act("nothing")])
        if not (other := os.fork()):
            time.sleep(3600)
        print(other, flush=True)
        time.sleep(3600)
    """
    with script(text, tmp_path) as program:
        assert program.stdout is not None
        other = int(program.stdout.readline())
        try:
            processes = children(program.pid) - {other} | workers(program.pid)
            assert len(processes) == 2
            program.kill()
            wait_until(lambda: all(map(is_gone, processes)))
        finally:
            os.kill(other, signal.SIGKILL)


def test_signals_that_a_program_ignores_change_nothing(tmp_path: Path) -> None:
    """What starts a program may have it ignore the ends of its children, or its use of processor time."""
    text = """
        import signal
        for number in (signal.SIGCHLD, signal.SIGPROF):
            signal.signal(number, signal.SIG_IGN)
        with Verifier(num_workers=1, deadline_s=0.25, function=FUNCTION) as pool:
            for (grade,) in [pool([act(gold)]) for gold in ("exit", "loop", "nothing")]:
                print(grade.reason.name, grade.detail)
    """
    out, errors = script(text, tmp_path).communicate(timeout=300)
    assert out == "CRASH its process ended with exit code 3\nTIME took longer than 0.25 s\nSAME_TEXT stated\n"
    assert errors == ""


@pytest.mark.timeout(120)
def test_an_interrupt_at_any_instruction_of_a_call_harms_no_other_call() -> None:
    """Wherever Ctrl-C strikes in the calling thread, later calls get their grades, and the verifier can be closed."""
    with pool_of(1) as pool:
        for number in itertools.count():
            if not interrupted(lambda: pool([act("sleep", 0.01)]), number):
                break
            assert pool([fine(number)]) == [right(number)]
    assert number > 10


def interrupted(action: Callable[[], object], number: int) -> bool:
    """Interrupt an action after a number of calls and returns, where Python looks for signals; False: it has fewer."""

    def interrupt(_: object, event: str, __: object) -> None:
        nonlocal number
        number -= event in {"call", "c_return"}
        if number < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.slow
def test_an_interrupt_is_for_the_program_alone(tmp_path: Path) -> None:
    """Ctrl-C, which goes to the whole group, ends the program and its workers with only the program's traceback."""
    text = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
        with Verifier(num_workers=2, function=FUNCTION) as pool:
            print(pool([act("nothing")]), flush=True)
            pool([act("loop in C"), act("sleep")] * 1000)  # should nobody end it
    """
    program = script(text, tmp_path)
    assert program.stdout is not None
    program.stdout.readline()
    wait_until(lambda: len(workers(program.pid)) == 2)
    processes = children(program.pid) | workers(program.pid)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=300)
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
    assert all(map(is_gone, processes))


def test_a_forked_process_has_to_make_its_own_verifier(tmp_path: Path) -> None:
    """It neither hangs nor takes the workers of its parent away."""
    program = """
        import os
        submissions = [Submission("5", "#### 5", AnswerPolicy.MARKED)]
        with Verifier() as verify:
            verify(submissions)
            if not (child := os.fork()):
                try:
                    verify(submissions)
                except RuntimeError as error:
                    print(error, flush=True)
                verify.close()
                os._exit(0)
            os.waitpid(child, 0)
            print(verify(submissions)[0].verdict)
    """
    out, _ = script(program, tmp_path).communicate(timeout=300)
    assert out == "a forked process cannot use the workers of its parent: make a new Verifier there\nright\n"
