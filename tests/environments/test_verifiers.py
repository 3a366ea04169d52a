import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.environments.environment import Observation
from components.environments.pool import Environments
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from tests import tiny

_IS_INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_package = pytest.mark.skipif(not _IS_INSTALLED, reason="needs the optional package verifiers")
_TASKS, _GAME = "verifiers-tasks", "verifiers-game"


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments are found by the names of their modules, as those of packages."""
    folder = Path(__file__).parent
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{folder}")


def _environments(taskset: str, **arguments: Any) -> Environments:
    name, values = "components.environments.verifiers:Verifiers", {"taskset": taskset, **arguments}
    return Environments(ToolsConfig(environment=name, arguments=values, call_format="message", num_workers=1))


def _asked(question: str) -> Problem:
    return tiny.problem(0, question=question)


@needs_package
def test_a_task_of_one_turn_gives_its_weighted_rewards() -> None:
    """At its end; arguments are those of the taskset."""
    with _environments(_TASKS, arguments={"num_numbers": 9}) as environments:
        for guess, reward in (("It is 8", 2.0), ("It is 3", 0.0)):
            answer = environments.begin(_asked("Guess number 8.")).step(guess).result()
            assert (answer.observation, answer.failure) == (Observation(done=True, rewards={"found": reward}), None)


@needs_package
def test_the_turns_of_a_game_are_answered_by_its_user() -> None:
    """Trajectories in one process do not disturb each other, and a failure of the game is that of its trajectory."""
    with _environments(_GAME) as environments:
        first, second, third = (environments.begin(_asked(f"Guess {number}.")) for number in (1, 2, 3))
        assert first.step("5").result().observation == Observation("No, not 5.")
        assert second.step("2").result().observation == Observation(done=True, rewards={"game": 1.0})
        assert first.step("4").result().observation == Observation("No, not 4.")
        third.step("7").result()
        third.close()
        assert first.step("1").result().observation == Observation(done=True, rewards={"game": 1 / 3})
        failed = environments.begin(_asked("Guess 4.")).step("crash").result()
        assert failed.failure is not None
        assert "it crashed" in failed.failure


@needs_package
@pytest.mark.parametrize(
    ("taskset", "arguments", "message"),
    [
        ("no-such-tasks", {}, r"tools\.arguments: .*taskset 'no-such-tasks' not found"),
        (_TASKS, {"arguments": {"number": 9}}, r"tools\.arguments: .*ValidationError"),
        ("verifiers-two-players", {}, "has several agents, tools or stop hooks; supported here: one agent that chats"),
    ],
)
def test_what_cannot_be_loaded_is_named(taskset: str, arguments: dict[str, Any], message: str) -> None:
    """Before anything is trained."""
    with pytest.raises(PipelineError, match=message):
        _environments(taskset, **arguments)


@needs_package
def test_a_question_that_is_no_prompt_of_a_task_fails() -> None:
    """With the argument that may be too small."""
    with _environments(_TASKS, num_tasks=2) as environments:
        failure = environments.begin(_asked("Guess number 2.")).step("2").result().failure
        assert failure is not None
        assert "no task has the question of problem" in failure


@needs_package
def test_the_questions_of_a_dataset_are_the_prompts() -> None:
    """A system message is part of the conversation that the question is."""
    command = [sys.executable, "-m", "components.environments.verifiers", _GAME, "2"]
    rows = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    system = {"role": "system", "content": "Be brief."}
    assert [row["question"] for row in rows] == [[system, {"role": "user", "content": f"Guess {n}."}] for n in range(2)]


@pytest.mark.skipif(_IS_INSTALLED, reason="needs an environment without the optional package verifiers")
def test_without_the_package_the_error_names_it() -> None:
    """And where to install it."""
    with pytest.raises(PipelineError, match=r"environment: .*No module named 'verifiers'.*; install this package"):
        _environments(_TASKS)
