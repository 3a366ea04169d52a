"""The pool of environments: answers in their own processes, and what a bad environment costs others (nothing)."""

import hashlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from components.environments.environment import Observation
from components.environments.pool import Answer, Environments, environment_error
from components.shared.errors import PipelineError
from components.shared.tools import ToolsConfig
from tests import tiny
from tests.grading.processes import children, is_gone, wait_until, workers

ROOT = Path(__file__).parents[2]
QUESTION = tiny.PROBLEMS[0].question


def _config(name: str, **changes: object) -> ToolsConfig:
    return ToolsConfig.model_validate({"environment": f"tests.environments.own:{name}", "num_workers": 2, **changes})


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test leaves a process behind."""
    before = children()
    yield
    assert children() <= before


def _answered(text: str, turn: int) -> Answer:
    return Answer(Observation(f"{turn} {text} {QUESTION}", rewards={"turns": float(turn)}))


def test_each_trajectory_has_an_environment_of_its_own() -> None:
    """Its turns are answered in their order, many trajectories at once, with the rewards of each turn."""
    with Environments(_config("Counting", arguments={"reward": 2.0})) as environments:
        episodes = [environments.begin(tiny.problem(number)) for number in range(50)]
        for turn in (1, 2, 3):
            futures = [episode.step(f"turn {turn}") for episode in episodes]
            for number, future in enumerate(futures):
                expected = f"{turn} turn {turn} {tiny.problem(number).question}"
                assert future.result() == Answer(Observation(expected, rewards={"turns": 2.0 * turn}))
        assert episodes[0].step("end").result().observation.done


def test_a_trajectory_is_continued_after_its_past_turns() -> None:
    """As a run that is resumed does; the past is played again, once."""
    with Environments(_config("Counting")) as environments:
        episode = environments.begin(tiny.PROBLEMS[0], past=["a", "b"])
        assert episode.step("c").result() == _answered("c", 3)
        assert episode.step("d").result() == _answered("d", 4)


def test_turns_are_not_played_again_where_the_process_lives(tmp_path: Path) -> None:
    """An environment is asked each turn once."""
    notes = tmp_path / "notes"
    with Environments(_config("Noted", arguments={"file": str(notes)})) as environments:
        episodes = [environments.begin(tiny.problem(number)) for number in range(10)]
        for turn in "abc":
            for future in [episode.step(turn) for episode in episodes]:
                future.result()
    assert len(notes.read_text(encoding="utf-8").splitlines()) == 30


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("exit", "its process ended with exit code 3"),
        ("crash", "its process ended by signal 11"),
        ("kill", "its process was killed, as by the kernel for want of memory, or broken 3 times"),
        ("close", "its process"),
        ("write", "its process was killed, as by the kernel for want of memory, or broken 3 times"),
        ("raise", "raised LookupError: no such (own.py, line "),
        ("quit", "raised SystemExit: done (own.py, line "),
        ("interrupt", "raised KeyboardInterrupt (own.py, line "),
        ("unprintable", "raised Unprintable (own.py, line "),
        ("memory", "raised MemoryError (own.py, line "),
        ("nothing", "step returned None, where an Observation is expected"),
        ("text", "the text of an observation is b'text', where text is expected"),
        ("lie", "done is 'yes', where True or False is expected"),
        ("nan", "the reward x is nan, where a finite number is expected"),
        ("huge", "the reward x is 1000"),
        ("names", "the name of a reward is 1, where a short text is expected"),
    ],
)
def test_a_bad_environment_fails_its_own_trajectory_alone(text: str, failure: str) -> None:
    """The future does not raise; other trajectories of its process go on as if nothing had been."""
    with Environments(_config("Hostile", num_workers=1)) as environments:
        bad, good = (environments.begin(tiny.PROBLEMS[0]) for _ in range(2))
        assert good.step("a").result() == _answered("a", 1)
        assert bad.step("a").result() == _answered("a", 1)
        futures = [bad.step(text), good.step("b")]
        answer = futures[0].result()
        assert answer.observation == Observation(done=True)
        assert str(answer.failure).startswith(failure)
        assert futures[1].result() == _answered("b", 2)
        assert good.step("c").result() == _answered("c", 3)


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_an_environment_that_hangs_fails_after_its_time(text: str) -> None:
    """Those that wait for its process are answered by another one, at once."""
    with Environments(_config("Hostile", timeout_s=2.0)) as environments:
        episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(6)]
        for future in [episode.step("a") for episode in episodes]:
            future.result()
        hanging = episodes[0].step(text)
        others = [episode.step("b") for episode in episodes[1:]]
        assert [future.result() for future in others] == [_answered("b", 2)] * 5
        assert not hanging.done()
        assert hanging.result() == Answer(Observation(done=True), "gave no answer within 2 s")
        assert episodes[1].step("c").result() == _answered("c", 3)


def test_a_long_answer_is_cut_in_the_process_of_its_environment() -> None:
    """Only its beginning reaches the trainer; what is printed reaches nobody."""
    with Environments(_config("Hostile")) as environments:
        episode = environments.begin(tiny.PROBLEMS[0])
        assert episode.step("flood").result() == Answer(Observation("é" * 65_536))
        assert episode.step("print").result() == Answer(Observation("printed"))


def test_text_that_could_not_be_tokenised_is_replaced() -> None:
    """Half of a pair of surrogates has no bytes."""
    with Environments(_config("Hostile")) as environments:
        assert environments.begin(tiny.PROBLEMS[0]).step("surrogate").result() == Answer(Observation("a?b"))


def test_a_process_that_forks_confuses_no_trajectory() -> None:
    """What was forked answers no other trajectory, whose turns it would not know."""
    with Environments(_config("Hostile", num_workers=1)) as environments:
        forking, *others = (environments.begin(tiny.PROBLEMS[0]) for _ in range(10))
        assert forking.step("fork").result() == Answer(Observation("forked"))
        for turn in range(1, 11):
            futures = [other.step("a") for other in others]
            assert [future.result() for future in futures] == [_answered("a", turn)] * 9


def test_what_an_environment_has_started_ends_with_its_process() -> None:
    """Where the pool is closed."""
    with Environments(_config("Hostile")) as environments:
        process = int(environments.begin(tiny.PROBLEMS[0]).step("start").result().observation.text)
        assert not is_gone(process)
    wait_until(lambda: is_gone(process))


@pytest.mark.parametrize("killed", ["worker", "origin"])
def test_a_killed_process_costs_no_trajectory(killed: str) -> None:
    """Its trajectories are played again elsewhere."""
    with Environments(_config("Counting")) as environments:
        before = children()
        episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(8)]
        for future in [episode.step("a") for episode in episodes]:
            future.result()
        (origin,) = (child for child in before if workers() & children(child))
        for process in [origin] if killed == "origin" else children(origin):
            os.kill(process, signal.SIGKILL)
        assert [future.result() for future in [episode.step("b") for episode in episodes]] == [_answered("b", 2)] * 8


def test_steps_without_an_answer_fail_where_the_pool_is_closed() -> None:
    """And so do those that come after."""
    environments = Environments(_config("Hostile"))
    episode = environments.begin(tiny.PROBLEMS[0])
    waiting = episode.step("hang")
    environments.close()
    environments.close()
    for future in (waiting, environments.begin(tiny.PROBLEMS[0]).step("a")):
        assert future.result() == Answer(Observation(done=True), "the environments are closed")
    episode.close()


def test_processes_end_with_a_parent_that_is_killed() -> None:
    """Whatever they are doing."""
    script = """
import sys, time
from components.environments.pool import Environments
from components.shared.tools import ToolsConfig
from tests import tiny
if __name__ == "__main__":
    environments = Environments(ToolsConfig(environment="tests.environments.own:Hostile", num_workers=2))
    episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(2)]
    numbers = [episode.step("pid").result().observation.text.split()[-1] for episode in episodes]
    waiting = [episode.step("spin") for episode in episodes]
    print(*numbers, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        numbers = [int(number) for number in process.stdout.readline().split()]
        assert len(numbers) == 2
        (origin,) = children(process.pid)
        process.kill()
    for number in (origin, *numbers):
        wait_until(lambda number=number: is_gone(number))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("tests.environments.none:Maze", {}, "environment: .* module tests.environments.none cannot be imported"),
        ("tests.environments.own:Maze", {}, "environment: .* tests.environments.own has no class `Maze`"),
        ("tests.environments.own:NOT_CALLABLE", {}, "environment: .* has no class `NOT_CALLABLE`"),
        ("tests.environments.own:NoStep", {}, "environment: .* has no method `step`; an environment has"),
        ("tests.environments.own:NeedsSize", {}, "arguments: missing a required argument: 'size'; accepted: size"),
        (
            "tests.environments.own:Counting",
            {"rewrd": 1},
            "arguments.rewrd: no such argument; accepted: reward",
        ),
        ("tests.environments.own_exit:Any", {}, "environment: its import ended the process of environments"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(name: str, arguments: dict[str, object], message: str) -> None:
    """By its key, before anything is sampled."""
    config = ToolsConfig(environment=name, arguments=arguments)
    with pytest.raises(PipelineError, match=rf"train_sft\.model\.tools\.{message}"):
        Environments(config)
    assert str(environment_error(config, used_here=False)).startswith("train_sft.model.tools.")


def test_a_missing_package_is_an_error_only_where_the_environment_is_used() -> None:
    """The image that trains may have it."""
    config = ToolsConfig(environment="tests.environments.own_missing:Any")
    assert environment_error(config, used_here=False) is None
    assert "cannot be imported (ModuleNotFoundError" in str(environment_error(config, used_here=True))
    assert environment_error(_config("Counting"), used_here=True) is None


_BAD = ("exit", "crash", "kill", "raise", "flood", "memory", "nothing", "lie", "nan", "close", "fork", "write")
_HANGS = ("hang", "spin")
_NUM_TURNS = 3


def _plan(number: int) -> list[str]:
    """What the turns of a trajectory do: in about a third of the trajectories one of them is bad."""
    digest = hashlib.sha256(f"{number}".encode()).digest()
    turns = [f"turn {turn}" for turn in range(_NUM_TURNS)]
    if digest[0] < 80:
        bad = _HANGS if digest[3] < 4 else _BAD  # those that hang take the longest
        turns[digest[1] % _NUM_TURNS] = bad[digest[2] % len(bad)]
    return turns


def _run_many(num_trajectories: int, *, timeout_s: float, num_at_once: int) -> Counter[str]:
    """Run trajectories, and return how they end; none may be lost, and a good turn has its own answer."""
    endings: Counter[str] = Counter()
    with Environments(_config("Hostile", timeout_s=timeout_s, num_workers=8, memory_gib=1.0)) as environments:
        for start in range(0, num_trajectories, num_at_once):
            numbers = range(start, min(start + num_at_once, num_trajectories))
            running = {number: environments.begin(tiny.PROBLEMS[0]) for number in numbers}
            for turn in range(_NUM_TURNS):
                futures: dict[int, Future[Answer]] = {
                    number: episode.step(_plan(number)[turn]) for number, episode in running.items()
                }
                for number, future in futures.items():
                    answer = future.result(timeout=300)
                    text = _plan(number)[turn]
                    if answer.failure:
                        assert text in (*_BAD, *_HANGS), (text, answer)
                        endings[text] += 1
                        running.pop(number).close()
                    elif not {*_plan(number)} & {*_BAD}:
                        assert answer == _answered(text, turn + 1)
            endings["end"] += len(running)
            for episode in running.values():
                episode.close()
    return endings


def _expected(num_trajectories: int) -> Counter[str]:
    bad = [
        next((turn for turn in _plan(number) if turn in (*_BAD, *_HANGS)), "end") for number in range(num_trajectories)
    ]
    return Counter("end" if each in ("flood", "fork") else each for each in bad)


def test_no_trajectory_is_lost_among_hostile_environments() -> None:
    """Those that hang, crash, flood or lie fail, and nobody else; no process is left."""
    assert _run_many(300, timeout_s=8.0, num_at_once=150) == _expected(300)


@pytest.mark.long(minutes=6)
def test_none_of_ten_thousand_trajectories_is_lost_among_hostile_environments() -> None:
    """The same in numbers of a real run."""
    assert _run_many(10_000, timeout_s=8.0, num_at_once=1000) == _expected(10_000)
