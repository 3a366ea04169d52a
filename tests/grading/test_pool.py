import asyncio
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
from contextlib import closing, suppress
from pathlib import Path

import pytest

from components.grading.pool import Pool, _State
from components.grading.verifier import Grade, Submission, Verdict
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from tests.grading.stunts import GRADE

ROOT = Path.cwd()


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool of two workers that do what the gold says."""
    pool = Pool(2, 1.0, GRADE)
    yield pool
    pool.close()


def stunt(gold: str, response: str = "") -> Submission:
    """What the grader of these tests is told to do."""
    return Submission(gold, response, AnswerPolicy.STATED)


def fine(number: int) -> Submission:
    """A submission without any trouble."""
    return stunt("nothing", str(number))


def right(response: str) -> Grade:
    """The grade of a response that was graded in peace."""
    return Grade(Verdict.RIGHT, response, "stated")


def unscorable(reason: str) -> Grade:
    """The grade of a response that was not."""
    return Grade(Verdict.UNSCORABLE, None, reason)


def processes(parent: int) -> set[int]:
    """The child processes of a process, zombies among them."""
    found: set[int] = set()
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while its process is looked at
            found.update(map(int, (task / "children").read_text(encoding="ascii").split()))
    return found


def wait_for(condition: Callable[[], object], within_s: float = 120.0) -> None:
    """Return once the condition holds."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


def gone(process: int) -> bool:
    """Whether nothing is left of a process but maybe its entry in the table."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def num_files() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def script(text: str, *arguments: str, cwd: Path, start_new_session: bool = False) -> "subprocess.Popen[str]":
    """Run a program of a user's, in a folder of its own."""
    path = cwd / "program.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def test_grades_come_in_the_order_of_the_submissions(pool: Pool) -> None:
    """Ten thousand of them, with slower ones in between, each get their own."""
    submissions = [fine(number) for number in range(10_000)]
    submissions[17] = submissions[4000] = stunt("sleep", "0.2")
    assert pool(submissions) == [right(each.response) for each in submissions]


def test_nothing_to_grade(pool: Pool) -> None:
    """No submissions have no grades."""
    assert pool([]) == []


@pytest.mark.parametrize("gold", ["loop", "loop in C"])
def test_what_does_not_end_is_unscorable_at_the_deadline(pool: Pool, gold: str) -> None:
    """The answer after it is graded as if nothing had been."""
    assert pool([fine(1), stunt(gold), fine(2)]) == [right("1"), unscorable("took longer than 1 s"), right("2")]


def test_the_deadline_can_be_set() -> None:
    """A shorter deadline ends what would have ended within a second, and the reason names it."""
    pool = Pool(1, 0.25, GRADE)
    assert pool([stunt("compute", "0.6"), stunt("compute", "0.1")]) == [
        unscorable("took longer than 0.25 s"),
        right("0.1"),
    ]
    pool.close()


@pytest.mark.slow
def test_a_busy_machine_does_not_change_a_verdict(pool: Pool) -> None:
    """What computes for less than the deadline is graded, however long that takes."""
    burn = [sys.executable, "-c", "while True: pass"]
    # Each in a session of its own, as the workers are: the scheduler shares the cores among sessions.
    burners = [subprocess.Popen(burn, start_new_session=True) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        started = time.monotonic()
        assert pool([stunt("compute", "0.8")]) == [right("0.8")]
        assert time.monotonic() - started > 1.5
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_nothing_waits_behind_what_does_not_end() -> None:
    """With a single worker stuck in each of two answers, all others are graded before the deadline ends those."""
    with ThreadPoolExecutor() as threads, closing(Pool(1, 3600.0, GRADE)) as pool:
        stuck = threads.submit(pool, [stunt("loop in C"), *map(fine, range(100)), stunt("loop in C"), fine(100)])
        wait_for(lambda: pool([fine(1)]) == [right("1")])
        assert pool([*map(fine, range(1000))]) == [right(str(number)) for number in range(1000)]
        assert not stuck.done()
        call = pool._calls[0]
        wait_for(lambda: len(call.grades) == 101)
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            stuck.result()


def all_are_slow(pool: Pool, number: int) -> bool:
    """Whether that many answers have taken longer than a moment, and others were started in their place."""
    with pool._work:
        return list(pool._crew.values()).count(_State.SLOW) == number


def test_the_number_of_processes_is_bounded(tmp_path: Path) -> None:
    """However many answers are slow at once, there are four processes for each worker at most, and one at the least."""
    before = processes(os.getpid())
    go = tmp_path / "go"
    with ThreadPoolExecutor() as threads, closing(Pool(1, 3600.0, GRADE)) as pool:
        call = threads.submit(pool, [stunt("wait for", str(go))] * 8)
        wait_for(lambda: all_are_slow(pool, 4))
        assert len(processes(os.getpid()) - before) == 4
        go.touch()
        assert call.result() == [right(str(go))] * 8


def test_quick_answers_keep_as_many_busy_as_wanted(pool: Pool) -> None:
    """No more processes are started than are to be at work at once, and for one answer just one."""
    before = processes(os.getpid())
    pool([fine(0)])
    assert len(processes(os.getpid()) - before) == 1
    for _ in range(20):
        pool([*map(fine, range(100))])
    assert len(processes(os.getpid()) - before) == 2


def test_spares_do_not_add_to_those_at_work() -> None:
    """Once the slow answers are done, no more are at work at once than before, though the spares are still there."""
    with closing(Pool(2, 1.0, GRADE)) as pool:
        pool([stunt("sleep", "0.6")] * 6)
        started = time.monotonic()
        pool([stunt("sleep", "0.01")] * 80)
        assert time.monotonic() - started > 0.39


def test_a_large_call_does_not_hold_up_a_small_one(tmp_path: Path) -> None:
    """Calls from several threads take turns: a small one is over before the large one, which came first, can be."""
    at_first, later = tmp_path / "at first", tmp_path / "later"
    with ThreadPoolExecutor() as threads, closing(Pool(1, 3600.0, GRADE)) as pool:
        large = threads.submit(pool, [stunt("wait for", str(path)) for path in [at_first] * 4 + [later] * 20])
        wait_for(lambda: all_are_slow(pool, 4))
        small = threads.submit(pool, [fine(1)])
        wait_for(lambda: len(pool._calls) == 2)
        at_first.touch()
        try:
            assert small.result(timeout=120) == [right("1")]
            assert not large.done()
        finally:
            later.touch()


@pytest.mark.parametrize("gold", ["ask for much memory", "use much memory and hide it"])
def test_much_memory_is_unscorable(pool: Pool, gold: str) -> None:
    """Whether the library owns up to it or not; the others are graded."""
    assert pool([fine(1), stunt(gold), fine(2)]) == [right("1"), unscorable("out of memory"), right("2")]


def test_a_swollen_worker_is_replaced() -> None:
    """What one answer left behind in memory is not held against the next."""
    pool = Pool(1, 1.0, GRADE)
    (first,) = pool([stunt("process")])
    assert pool([stunt("process")]) == [first]
    assert pool([stunt("use some memory")]) == [right("")]
    assert pool([stunt("process")]) != [first]
    pool.close()


@pytest.mark.parametrize(
    ("gold", "reason"),
    [("fault", "the grader crashed (signal 11)"), ("exit", "the grader crashed (exit code 3)")],
)
def test_a_crash_is_unscorable(pool: Pool, gold: str, reason: str) -> None:
    """It costs the answer that caused it, and no other."""
    assert pool([fine(1), stunt(gold), fine(2)]) == [right("1"), unscorable(reason), right("2")]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_worker_that_somebody_ends_or_stops_costs_nothing(pool: Pool, tmp_path: Path, sent: signal.Signals) -> None:
    """Its answer is graded by another."""
    told = tmp_path / "process"
    with ThreadPoolExecutor() as threads:
        call = threads.submit(pool, [fine(1), stunt("sleep the first time", str(told)), fine(2)])
        wait_for(told.exists)
        os.kill(int(told.read_text(encoding="ascii")), sent)
        assert call.result() == [right("1"), right(str(told)), right("2")]


def test_idle_workers_that_are_killed_are_replaced() -> None:
    """However many there were: the submission that would have been theirs is not to blame."""
    with closing(Pool(5, 1.0, GRADE)) as pool:
        before = processes(os.getpid())
        pool([stunt("sleep", "0.3")] * 5)
        workers = processes(os.getpid()) - before
        assert len(workers) == 5
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        wait_for(lambda: all(map(gone, workers)))
        assert pool([fine(1)]) == [right("1")]


def test_what_cannot_be_graded_without_its_worker_being_killed_is_unscorable(pool: Pool, tmp_path: Path) -> None:
    """It is tried three times, as whoever kills may mean the answer."""
    told = tmp_path / "process"
    killed: set[str] = set()
    with ThreadPoolExecutor() as threads:
        call = threads.submit(pool, [stunt("tell and sleep", str(told))])
        while not call.done():
            if told.exists() and (process := told.read_text(encoding="ascii")) and process not in killed:
                killed.add(process)
                os.kill(int(process), signal.SIGKILL)
            time.sleep(0.01)
    assert call.result() == [unscorable("its worker was killed 3 times")]
    assert len(killed) == 3


@pytest.mark.slow
def test_killing_workers_again_and_again_changes_nothing(pool: Pool) -> None:
    """Fifty workers killed at any moment: the same grades, and neither a process nor a file is left over."""
    files = num_files()
    before = processes(os.getpid())
    stop = threading.Event()
    submissions = [stunt("compute", "0.002"), *map(fine, range(20))] * 100
    chance, killed = random.Random(1), 0
    with ThreadPoolExecutor() as threads:

        def grade_until_stopped() -> list[list[Grade]]:
            return [pool(submissions) for _ in iter(stop.is_set, True)]

        calls = threads.submit(grade_until_stopped)
        while killed < 50:
            time.sleep(chance.uniform(0.02, 0.25))
            if workers := sorted(processes(os.getpid()) - before):
                os.kill(chance.choice(workers), signal.SIGKILL)
                killed += 1
        stop.set()
        assert all(grades == [right(each.response) for each in submissions] for grades in calls.result())
    assert len(processes(os.getpid()) - before) <= 2
    pool.close()
    assert processes(os.getpid()) <= before
    assert num_files() <= files


@pytest.mark.parametrize("text", ["9" * 2_000_000, "\0a\0\n", "\ud800 \udfff", "\u2028\r\n\x85", "ü日本"])
def test_any_text_arrives_as_it_is(pool: Pool, text: str) -> None:
    """Two megabytes, NULs, half characters and all kinds of line ends come back unchanged."""
    assert pool([stunt("nothing", text)] * 3) == [right(text)] * 3


@pytest.mark.slow
def test_getting_ready_for_algebra_is_no_answer(tmp_path: Path) -> None:
    """A program that is held up finds that its worker imports, that it is ready, and its grade, all at once."""
    program = """
        from components.shared.answer_policy import AnswerPolicy
        from components.grading.pool import Pool
        from components.grading.verifier import Submission
        pool = Pool(1, 1.0, "tests.grading.stunts:perform")
        pool([Submission("nothing", "", AnswerPolicy.STATED)])
        print("started", flush=True)
        print(pool([Submission("use algebra", "", AnswerPolicy.STATED)])[0].verdict)
    """
    with script(program, cwd=tmp_path) as running:
        assert running.stdout is not None
        running.stdout.readline()
        time.sleep(0.05)
        running.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        running.send_signal(signal.SIGCONT)
        assert running.communicate() == ("right\n", "")


def test_what_a_library_prints_is_not_taken_for_a_grade(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does it appear among the output of the program."""
    assert pool([stunt("print"), fine(1)]) == [right(""), right("1")]
    assert capfd.readouterr() == ("", "")


def test_a_worker_sees_no_secrets(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment it gets what it takes to import the grader."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    (grade,) = pool([stunt("variables")])
    names = {"LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONPATH"}  # Python itself sets the first
    assert set((grade.extracted or "").split()) <= names


def test_a_thread_may_make_a_pool_and_end(pool: Pool) -> None:
    """Workers live on when the thread that started them does not, and other threads use them at the same time."""
    thread = threading.Thread(target=pool, args=[[fine(0)]])
    thread.start()
    thread.join()
    time.sleep(0.1)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(pool, [fine(number)] * 50) for number in range(40)]
        assert [call.result() for call in calls] == [[right(str(number))] * 50 for number in range(40)]


def test_asyncio(pool: Pool, tmp_path: Path) -> None:
    """The loop goes on while answers are graded, one of which waits for what the loop does."""
    go = tmp_path / "go"

    async def both() -> list[Grade]:
        graded = asyncio.create_task(asyncio.to_thread(pool, [stunt("wait for", str(go)), fine(1)]))
        await asyncio.sleep(0.01)
        go.touch()
        return await graded

    assert asyncio.run(both()) == [right(str(go)), right("1")]


def test_closing_ends_calls_and_processes(tmp_path: Path) -> None:
    """A call in flight raises rather than waits for its end; a closed pool takes no more."""
    pool = Pool(2, 3600.0, GRADE)
    before = processes(os.getpid())
    told = tmp_path / "process"
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(pool, [stunt("tell and sleep", str(told))] * 5) for _ in range(2)]
        wait_for(told.exists)
        pool.close()
        for call in calls:
            with pytest.raises(RuntimeError, match="closed"):
                call.result()
    assert processes(os.getpid()) <= before
    with pytest.raises(RuntimeError, match="is closed"):
        pool([fine(1)])
    pool.close()


def test_a_worker_that_cannot_start_is_an_error() -> None:
    """What keeps the grader from being imported is told, not retried for ever."""
    pool = Pool(2, 1.0, "tests.grading.nowhere:grade")
    with pytest.raises(PipelineError, match=r"no answer can be graded: .*exit code 1"):
        pool([fine(1), fine(2)])
    pool.close()


def test_a_program_needs_no_care(tmp_path: Path) -> None:
    """No main guard, whatever the folder and the modules in it, and no need to close."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')", encoding="utf-8")
    (tmp_path / "components.py").write_text("raise RuntimeError('nor this one')", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    program = """
        import os
        from components.shared.answer_policy import AnswerPolicy
        from components.grading.verifier import Submission
        from components.grading.verifier import Verifier
        os.chdir(os.pardir)
        (grade,) = Verifier()([Submission("5", "#### 5", AnswerPolicy.MARKED)])
        print(grade.verdict)
    """
    out, errors = script(program, cwd=tmp_path / "sub").communicate(timeout=60)
    assert (out, errors) == ("right\n", "")


STUCK = """
    import sys, threading, time
    from components.shared.answer_policy import AnswerPolicy
    from components.grading.pool import Pool
    from components.grading.verifier import Submission
    given_up = time.monotonic() + 60
    pool = Pool(2, 1.0, "tests.grading.stunts:perform")
    thread = threading.Thread(target=pool, args=[[Submission("nothing", "", AnswerPolicy.STATED)]])
    thread.start(); thread.join()
    print("graded", flush=True)
    try:
        while time.monotonic() < given_up:  # should nobody end it
            pool([Submission(gold, "", AnswerPolicy.STATED) for gold in sys.argv[1:]])
    finally:
        pool.close()
"""


@pytest.mark.parametrize("golds", [["nothing"], ["loop in C", "loop"], ["sleep", "sleep"]])
def test_no_worker_outlives_a_killed_program(tmp_path: Path, golds: list[str]) -> None:
    """Neither an idle one nor one that is in an endless computation."""
    program = script(STUCK, *golds, cwd=tmp_path)
    assert program.stdout is not None
    program.stdout.readline()
    time.sleep(0.5)
    workers = processes(program.pid)
    assert workers
    program.kill()
    program.wait()
    wait_for(lambda: all(gone(worker) for worker in workers))
    assert program.stderr is not None
    assert program.stderr.read() == ""
    program.stdout.close()
    program.stderr.close()


def test_an_interrupt_is_for_the_program_alone(tmp_path: Path) -> None:
    """Ctrl-C, which goes to the whole group, ends the program and its workers with the one traceback of the program."""
    program = script(STUCK, "loop in C", "sleep", cwd=tmp_path, start_new_session=True)
    assert program.stdout is not None
    program.stdout.readline()
    time.sleep(0.5)
    workers = processes(program.pid)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
    assert workers
    assert all(gone(worker) for worker in workers)


def test_a_fork_is_told_to_make_its_own(tmp_path: Path) -> None:
    """It neither hangs nor takes the workers of its parent away."""
    program = """
        import os
        from components.shared.answer_policy import AnswerPolicy
        from components.grading.verifier import Submission
        from components.grading.verifier import Verifier
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
    out, _ = script(program, cwd=tmp_path).communicate(timeout=60)
    assert out == "a forked process cannot use the workers of its parent: make a new Verifier there\nright\n"


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """Each process that torchrun starts grades with workers of its own."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from components.shared.answer_policy import AnswerPolicy
        from components.grading.verifier import Submission
        from components.grading.verifier import Verifier
        rank = os.environ["RANK"]
        with Verifier() as verify:
            grades = verify([Submission(rank, f"#### {number}", AnswerPolicy.MARKED) for number in range(3)])
        Path(sys.argv[1], rank).write_text(" ".join(grade.verdict for grade in grades))
        """),
        encoding="utf-8",
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*launch, str(program), str(tmp_path)], check=True, env=environment, timeout=120)
    assert (tmp_path / "0").read_text(encoding="utf-8") == "right wrong wrong"
    assert (tmp_path / "1").read_text(encoding="utf-8") == "wrong right wrong"
