import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.environments.environment import Observation
from components.environments.pool import Answer, Environments, environment_error
from components.shared.tools import ToolsConfig, environment_materials
from tests import tiny
from tests.grading.processes import children, is_gone, wait_until

ROOT = Path(__file__).parents[2]
QUESTION = tiny.PROBLEMS[0].question


def _config(name: str, **changes: object) -> ToolsConfig:
    return ToolsConfig.model_validate({"environment": f"tests.environments.own:{name}", "num_workers": 2, **changes})


_BEFORE: set[int] = set()
"""The child processes from before a test, such as the graders of tests that ran earlier."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test leaves a process behind."""
    _BEFORE.clear()
    _BEFORE.update(children())
    yield
    assert children() <= _BEFORE


def _answered(text: str, turn: int) -> Answer:
    return Answer(Observation(f"{turn} {text} {QUESTION}", rewards={"turns": float(turn)}))


def test_each_trajectory_has_an_environment_of_its_own(tmp_path: Path) -> None:
    """Each turn reaches it once, in their order, many trajectories at once, and has the rewards of the turn."""
    arguments: dict[str, object] = {"reward": 2.0, "file": str(tmp_path / "notes")}
    with Environments(_config("Noted", arguments=arguments)) as environments:
        episodes = [environments.begin(tiny.problem(number)) for number in range(50)]
        for turn in (1, 2, 3):
            futures = [episode.step(f"turn {turn}") for episode in episodes]
            for number, future in enumerate(futures):
                expected = f"{turn} turn {turn} {tiny.problem(number).question}"
                assert future.result() == Answer(Observation(expected, rewards={"turns": 2.0 * turn}))
        assert episodes[0].step("end").result().observation.done
    assert len((tmp_path / "notes").read_text(encoding="utf-8").splitlines()) == 151


_FAILURES = {
    "exit": "its process ended with exit code 3",
    "crash": "its process ended by signal 11",
    "kill": "its worker process was killed (for example by the OOM killer), or sent an invalid reply, 10 times",
    "close": "its ",  # it ends by itself, or its socket does ten times
    "write": "its worker process was killed (for example by the OOM killer), or sent an invalid reply, 10 times",
    "heartbeats": "its worker process was killed (for example",
    "address": "raised LookupError: <object object at 0x...> (own.py, line ",
    "raise": "raised LookupError: no such (own.py, line ",
    "quit": "raised SystemExit: done (own.py, line ",
    "memory": "raised MemoryError (own.py, line ",
    "nothing": "step returned None, where an Observation is expected",
    "text": "the text of an observation is b'text', where text is expected",
    "lie": "done is 'yes', where True or False is expected",
    "nan": "the reward x is nan, where a finite number is expected",
    "names": "the name of a reward is 1, where a short text is expected",
}
"""How a turn with this text fails."""


def test_a_bad_environment_fails_its_own_trajectory_alone() -> None:
    """The future does not raise; other trajectories of its process go on as if nothing had been."""
    with Environments(_config("Hostile", num_workers=1)) as environments:
        for text, failure in _FAILURES.items():
            bad, good = (environments.begin(tiny.PROBLEMS[0]) for _ in range(2))
            assert good.step("a").result() == _answered("a", 1)
            assert bad.step("a").result() == _answered("a", 1)
            futures = [bad.step(text), good.step("b")]
            answer = futures[0].result()
            assert answer.observation == Observation(done=True)
            assert str(answer.failure).startswith(failure), text
            assert futures[1].result() == _answered("b", 2)
            assert good.step("c").result() == _answered("c", 3)
            good.close()


def test_an_environment_that_hangs_fails_after_its_time() -> None:
    """Those that wait for its process are answered by another one, at once."""
    with Environments(_config("Hostile", timeout_s=2.0)) as environments:
        episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(6)]
        for future in [episode.step("a") for episode in episodes]:
            future.result()
        hanging = episodes[0].step("spin")
        others = [episode.step("b") for episode in episodes[1:]]
        assert [future.result() for future in others] == [_answered("b", 2)] * 5
        assert not hanging.done()
        assert hanging.result() == Answer(Observation(done=True), "gave no answer within 2 s")
        assert episodes[1].step("c").result() == _answered("c", 3)


def test_a_long_answer_is_cut_in_the_process_of_its_environment() -> None:
    """Only its beginning reaches the trainer; what is printed reaches nobody, what is no text is replaced."""
    with Environments(_config("Hostile", num_workers=1)) as environments:
        episode = environments.begin(tiny.PROBLEMS[0])
        assert episode.step("flood").result() == Answer(Observation("é" * 65_536))
        assert episode.step("print").result() == Answer(Observation(str(2**21)))
        assert episode.step("surrogate").result() == Answer(Observation("a?b"))


def test_a_process_that_forks_confuses_no_trajectory() -> None:
    """What was forked answers no other trajectory, whose turns it would not know."""
    with Environments(_config("Hostile", num_workers=1)) as environments:
        forking, *others = (environments.begin(tiny.PROBLEMS[0]) for _ in range(10))
        assert forking.step("fork").result() == Answer(Observation("True"))
        for turn in range(1, 11):
            futures = [other.step("a") for other in others]
            assert [future.result() for future in futures] == [_answered("a", turn)] * 9


def _fork_server() -> int:
    """The process that workers are forked from."""
    (server,) = (child for child in children() - _BEFORE if children(child))
    return server


def _workers() -> set[int]:
    """The processes that have environments; each is the child of its supervisor."""
    return {worker for supervisor in children(_fork_server()) for worker in children(supervisor)}


@pytest.mark.slow
@pytest.mark.parametrize("turn", ["start", "session", "daemon"])
@pytest.mark.parametrize("end", ["close", "crash", "hang", "kill", "kill the supervisor", "kill the fork server"])
def test_what_an_environment_has_started_ends_with_its_process(turn: str, end: str) -> None:
    """In whatever session it runs, and nothing of another process of environments."""
    with Environments(_config("Hostile", timeout_s=4.0)) as environments:
        episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(2)]
        futures = [episode.step(turn) for episode in episodes]
        process, other = [int(future.result().observation.text) for future in futures]
        assert not is_gone(process)
        (supervisor,) = (each for each in children(_fork_server()) if process in _descendants(each))
        shared = other in _descendants(supervisor)
        if end.startswith("kill the"):
            os.kill(supervisor if end == "kill the supervisor" else _fork_server(), signal.SIGKILL)
        elif end != "close":
            episodes[0].step(end).result()
        if end != "close":
            wait_until(lambda: is_gone(process))
        if end == "kill the fork server":
            wait_until(lambda: is_gone(other))
        elif end in ("crash", "hang", "kill the supervisor"):
            assert is_gone(other) == shared
    assert is_gone(process)
    assert is_gone(other)


def _descendants(process: int) -> set[int]:
    return {each for child in children(process) for each in (child, *_descendants(child))}


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "state"), [("worker", "busy"), ("fork server", "idle"), ("fork server", "busy")])
def test_a_killed_process_costs_no_trajectory(killed: str, state: str) -> None:
    """Its trajectories are replayed elsewhere, whether their steps are being answered or wait."""
    with Environments(_config("Slow", num_workers=4)) as environments:
        episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(24)]
        for future in [episode.step("a") for episode in episodes]:
            future.result()
        episodes += [environments.begin(tiny.PROBLEMS[0], past=["a"]) for _ in range(8)]
        futures = [episode.step("slow b") for episode in episodes] if state == "busy" else []
        for _ in range(2 if state == "busy" else 1):
            time.sleep(0.2)  # what was killed before is gone by then
            wait_until(lambda: any(children(child) for child in children() - _BEFORE))
            for process in [_fork_server()] if killed == "fork server" else _workers():
                os.kill(process, signal.SIGKILL)
        futures = futures or [episode.step("slow b") for episode in episodes]
        assert [future.result() for future in futures] == [_answered("slow b", 2)] * len(episodes)


@pytest.mark.slow
@pytest.mark.parametrize("turn", ["memory", "map", "abort"])
def test_a_step_that_lacks_memory_beside_others_is_tried_again_alone(turn: str) -> None:
    """Whether it fails does not depend on what else its process has."""
    with Environments(_config("Crowded", num_workers=2)) as environments:
        episodes = [environments.begin(tiny.PROBLEMS[0]) for _ in range(8)]
        for number in (1, 2, 3):
            futures = [episode.step("a" if number % 2 else turn) for episode in episodes]
            expected = _answered("a" if number % 2 else turn, number)
            assert [future.result() for future in futures] == [expected] * 8


def test_each_turn_that_is_replayed_has_its_time() -> None:
    """A long trajectory takes longer than a step may."""
    with Environments(_config("Slow", timeout_s=1.4)) as environments:
        episode = environments.begin(tiny.PROBLEMS[0], past=["slow"] * 5)
        assert episode.step("a").result() == _answered("a", 6)


def test_environments_are_closed_with_their_trajectories(tmp_path: Path) -> None:
    """At once, whether or not other steps follow, and where one has failed, in its reset as well."""
    notes = tmp_path / "notes"
    with Environments(_config("Closing", arguments={"file": str(notes)})) as environments:
        notes.write_text("", encoding="utf-8")  # one was made as a trial
        episodes = [environments.begin(tiny.problem(number)) for number in range(10)]
        for future in [episode.step("a") for episode in episodes]:
            future.result()
        assert episodes[0].step("fail").result().failure
        assert len(notes.read_text(encoding="utf-8").splitlines()) == 1
        for episode in episodes:
            episode.close()
        wait_until(lambda: len(notes.read_text(encoding="utf-8").splitlines()) == 10)
        assert environments.begin(tiny.problem(11, question="fail")).step("a").result().failure
        wait_until(lambda: len(notes.read_text(encoding="utf-8").splitlines()) == 11)
    # The process of one that cannot be closed is ended after a while, at no cost of other trajectories.
    with Environments(_config("Closing", num_workers=1, timeout_s=1.0, arguments={"file": str(notes)})) as environments:
        hanging, *others = (environments.begin(tiny.PROBLEMS[0]) for _ in range(3))
        for future in [hanging.step("hang"), *(other.step("a") for other in others)]:
            future.result()
        hanging.close()
        assert [other.step("b").result() for other in others] == [_answered("b", 2)] * 2


def test_an_environment_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a command that is installed, whose own folder is first in the path."""
    (tmp_path / "in_this_folder.py").write_text("from tests.environments.own import Counting as Here", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(ROOT), *(folder for folder in sys.path if folder)])
    monkeypatch.chdir(tmp_path)
    config = ToolsConfig(environment="in_this_folder:Here", num_workers=1)
    with Environments(config) as environments:
        assert environments.begin(tiny.PROBLEMS[0]).step("a").result() == _answered("a", 1)
    assert list(environment_materials(config)) == ["in_this_folder:Here"]


def test_steps_without_an_answer_fail_when_the_pool_is_closed() -> None:
    """And so do those that come after."""
    environments = Environments(_config("Hostile"))
    episode = environments.begin(tiny.PROBLEMS[0])
    waiting = episode.step("hang")
    environments.close()
    environments.close()
    for future in (waiting, environments.begin(tiny.PROBLEMS[0]).step("a")):
        assert future.result() == Answer(Observation(done=True), "the environments are closed")
    episode.close()


@pytest.mark.parametrize(
    ("name", "arguments", "message", "is_here_alone"),
    [
        ("none:Maze", {}, "environment: .* module tests.environments.none cannot be imported", False),
        ("own:Maze", {}, "environment: .* tests.environments.own has no class `Maze`", False),
        ("own:NoStep", {}, "environment: .* has no method `step`; an environment has", False),
        ("own:NeedsSize", {}, "arguments: missing a required argument: 'size'; accepted: size", False),
        ("own:Counting", {"rewrd": 1}, "arguments.rewrd: no such argument; accepted: reward", False),
        ("own:NeedsSize", {"size": 0}, r"arguments: .* made with them: raised ValueError: size is 0 \(own.py", False),
        ("own:StepWithoutText", {}, "environment: .* its method `step` has to take one argument, `text`", False),
        ("own:NeedsSize", {"size": 10}, "memory_gib: 4 GiB do not suffice for one environment; set", False),
        ("own:NeedsSize", {"size": 200}, ".*: making one: its process ended with exit code 4; set a", False),
        ("own:NeedsSize", {"size": -1}, ".*: making one: gave no answer within 2 s; set a larger timeout_s if", False),
        ("own_exit:Any", {}, "environment: .*: the process that imports it ended with exit code", False),
        ("own:NeedsFile", {}, ".* raised FileNotFoundError", True),
        ("own_missing:Any", {}, r".* cannot be imported \(ModuleNotFoundError", True),
    ],
)
def test_a_failed_trial_is_named(name: str, arguments: dict[str, object], message: str, is_here_alone: bool) -> None:
    """By its key; but for a missing file or package, which the machine or the image of the training may have."""
    config = ToolsConfig(environment=f"tests.environments.{name}", arguments=arguments, timeout_s=2.0)
    assert re.match(rf"train_sft\.model\.tools\.{message}", str(environment_error(config, used_here=True)))
    assert (environment_error(config, used_here=False) is None) == is_here_alone
