import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from components.grading.verifier import Grade, Reason, Submission, Verdict, Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, grade_completions
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.train_grpo import custom_rewards, rewards
from components.train_grpo.config import _REWARDS_BELOW_0
from components.train_grpo.custom_rewards import Failure, RewardFunction, load_reward, to_rewards
from components.train_grpo.process_supervision import Step
from components.train_grpo.rewards import answer_format, code_tests, group_reward, length, overlong, require_rewards
from components.train_grpo.scoring import ScoredCompletion, Scorer
from tests import tiny
from tests.train_grpo.groups import CHECKED, completion, grade, scored
from tests.train_grpo.settings import grpo_config

NAN = math.nan
PROBLEM = tiny.problem(3)  # its answer is 6
WORKED = "1+1=2\n2+2=5\n#### 6"
PLAIN = "{question}\n"
THINKING = "Think between <think> and </think>, then answer.\n{question}\n"
OPENED = "{question}\n<think>\n"


def test_the_built_in_rewards_with_negative_values_are_listed() -> None:
    """All but the judge, which rates from 0 to 1, for completions of every length and verdict."""
    config, below_0 = grpo_config(reward__weights={"overlong": 1.0}, reward__overlong_buffer_tokens=8), set()
    grades = [replace(grade(each), tests_passed=each is Verdict.RIGHT) for each in Verdict] * 5
    completions = [completion(1 + number) for number in range(len(grades))]
    for name in rewards.BUILT_IN.keys() - {"judge"}:
        if reward := rewards.BUILT_IN[name].function:
            function = partial(reward, PROBLEM, **rewards.BUILT_IN[name].settings(config, tiny.MODEL))
            is_group = getattr(reward, "compares_group", False)
            values = function(completions, grades) if is_group else map(function, completions, grades)
            below_0 |= {name for value in values if value < 0}
    assert below_0 == set(_REWARDS_BELOW_0)


def test_code_is_worth_the_share_of_the_tests_it_passes() -> None:
    """A truncated completion passes none; without tests, or without a verdict, there is no reward at all."""
    for verdict, tests_passed, finished, expected in (
        (Verdict.WRONG, 0.25, True, 0.25),
        (Verdict.WRONG, None, False, 0.0),
        (Verdict.RIGHT, None, True, NAN),
        (Verdict.UNSCORABLE, 0.5, True, NAN),
    ):
        result = Grade(verdict, extracted=None, reason=Reason.NO_CODE, tests_passed=tests_passed)
        assert code_tests(PROBLEM, completion(finished=finished), result) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (PLAIN, "1+1=2\n#### 2", 1.0),
        (PLAIN, r"So it is \boxed{2}", 1.0),
        (PLAIN, "#### 2", 0.0),
        (PLAIN, "1+1=2", 0.0),
        (PLAIN, "First <think>1+1=2</think>\n#### 2", 1.0),  # no thoughts were asked for
        (THINKING, "<think>1+1=2</think>\n#### 2", 1.0),
        (THINKING, "1+1=2\n#### 2", 0.0),
        (THINKING, "First <think>1+1=2</think>\n#### 2", 0.0),
        (THINKING, "<think>1+1=2</think><think>2</think>\n#### 2", 0.0),
        (THINKING, "<think>1+1=2\n#### 2</think>", 0.0),
        (THINKING, "<think> \n</think>\nAs 1+1=2:\n#### 2", 0.0),
        (OPENED, "1+1=2</think>\n#### 2", 1.0),
        (OPENED, "<think>1+1=2</think>\n#### 2", 0.0),
    ],
)
def test_format_is_reasoning_and_an_answer_where_the_prompt_asks_for_it(
    prompt: str, text: str, expected: float
) -> None:
    """Whatever the verdict; where thoughts are asked for, or begun by the prompt, one comes first. Truncated is 0."""
    model = ModelConfig(base="scratch:tiny", prompt=prompt, answer=AnswerPolicy.DECLARED)
    for finished, value in ((True, expected), (False, 0.0)):
        response = replace(completion(text=text, finished=finished), in_thought=prompt == OPENED)
        assert {answer_format(PROBLEM, response, grade(verdict), model=model) for verdict in Verdict} == {value}


def test_the_place_of_code_is_a_block() -> None:
    """Where the answer is unit tests, code that the grader could run is in the format, after a thought if asked for."""
    for extracted, prompt, text, expected in (
        ("print(1)", PLAIN, "#### 2", 1.0),
        (None, PLAIN, "#### 2", 0.0),
        ("print(1)", THINKING, "<think>f</think>code", 1.0),
        ("print(1)", THINKING, "code", 0.0),
    ):
        problem, model = tiny.problem(0, answer="assert f(1) == 2"), ModelConfig(base="scratch:tiny", prompt=prompt)
        result = Grade(Verdict.WRONG, extracted, Reason.FAILED_TESTS, tests_passed=0.0)
        assert answer_format(problem, completion(text=text), result, model=model) == expected


def test_overlong_falls_linearly_over_the_last_tokens() -> None:
    """By hand, with a limit of 16 tokens, of which the last four are the buffer."""
    config = grpo_config(reward__weights={"overlong": 1.0}, reward__overlong_buffer_tokens=4)
    values = [overlong(PROBLEM, completion(each), grade(Verdict.RIGHT), config=config) for each in (12, 13, 14, 16)]
    assert values == [0, -0.25, -0.5, -1]


def test_length_by_hand() -> None:
    """Short right answers gain, long ones lose, wrong ones never gain; an unscorable one does not count."""
    for lengths, verdicts, expected in (
        ([10, 20, 30], "rrr", [0.5, 0.0, -0.5]),
        ([10, 20, 30, 25], "wrww", [0.0, 0.0, -0.5, -0.25]),
        ([7, 7, 7], "rwr", [0.0, 0.0, 0.0]),
        ([1000, 20, 30], "urw", [NAN, 0.5, -0.5]),
    ):
        grades = [grade({each[0]: each for each in Verdict}[letter]) for letter in verdicts]
        assert length(PROBLEM, [completion(each) for each in lengths], grades) == pytest.approx(expected, nan_ok=True)


def test_unit_tests_need_a_sandbox_to_run_code_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, a single problem with tests stops the run; problems without tests need none."""

    def refuse() -> None:
        raise PipelineError("no sandbox here")

    monkeypatch.setattr("components.train_grpo.rewards.require_sandbox", refuse)
    require_rewards(grpo_config(), [PROBLEM])
    with pytest.raises(PipelineError, match="no sandbox here"):
        require_rewards(grpo_config(), [PROBLEM, tiny.problem(1, answer="assert f(1) == 2")])


MINE = """\
import functools

from components.train_grpo.rewards import step_reward

number = 0.5

def two(problem, text): return 0.5

@step_reward
async def steps(problem, steps, grade): return [0.5]

def on_text(function):
    @functools.wraps(function)
    def reward(problem, completion, grade): return function(completion.text)
    return reward

@on_text
def decorated(text): return -len(text)
"""


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "decorated", r"cannot be imported \(ModuleNotFoundError: No module named .*PYTHONPATH"),
        (
            "import json\njson.loads('{')",
            "decorated",
            r"cannot be imported \(JSONDecodeError: .*\) \(mine\.py, line 2\)$",
        ),
        (MINE, "steps", "rewards steps: it can be neither an `async def` nor threaded"),
        (MINE, "two", r"mine\.py\): too many positional .*; a reward takes a prob"),
        (MINE, "number", r"mine\.py\) has no function `number`: it is 0\.5"),
        (MINE, "decorated", None),
    ],
)
def test_a_custom_reward_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, name: str, message: str | None
) -> None:
    """The message names the key, and the module or the file; a decorated function within may take something else."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    if content:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(PipelineError, match=message) if message else nullcontext() as error:
        load_reward(f"mine:{name}")
    if error:
        assert str(error.value).startswith(f"train_grpo.reward.weights.mine:{name}: ")


def test_a_reward_that_does_not_return_is_named_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing can interrupt it: the process ends after the deadline."""
    monkeypatch.setattr(custom_rewards, "_SLOW_S", 0.01)
    monkeypatch.delenv("RANK", raising=False)
    codes: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(os, "_exit", codes.put)

    def endless(*_: object) -> float:
        return codes.get(timeout=60)

    result = custom_rewards.values_of("mine:endless", endless, PROBLEM, [scored({})], iter([]), deadline_s=0.02)
    assert result == [(PipelineError.exit_code,)]
    printed = capfd.readouterr()
    assert f"reward mine:endless has been computing for 0.01 s, for problem {PROBLEM.id}" in printed.out
    assert "error: train_grpo.reward.weights.mine:endless did not return within engine.deadline_s" in printed.err


@pytest.mark.parametrize("value", [np.isclose(1, 1), np.float32(1), torch.tensor(1), Decimal(1), True])
def test_scalars_of_any_library_are_rewards(value: Any) -> None:
    """What NumPy and PyTorch compute is a number; NaN is one where there is no verdict."""
    assert to_rewards("mine:f", [value], [grade(Verdict.RIGHT)]) == [(1.0,)]
    assert to_rewards("mine:f", [NAN], [grade(Verdict.UNSCORABLE)]) == [pytest.approx((NAN,), nan_ok=True)]


@pytest.mark.parametrize(
    ("values", "num_steps", "message"),
    [
        ([None], None, "returned None, where a finite number is expected"),
        ([NAN], None, "returned nan"),
        ([10**400], None, "returned 1000"),
        ([[1.0, math.inf, 0.0]], [3], "returned inf, where a finite number is expected"),
        ([-1e16], None, "is too large: -1e+16"),
        ([[1.0]], [3], "returned a wrong number of values: 1 for 3 steps"),
        ([1.0, 2.0], None, "returned a wrong number of values: 2 for 1 completions"),
        (1.0, None, "returned 1.0, where a list of numbers is expected"),
    ],
)
def test_what_is_no_finite_number_for_each_completion_is_a_failure(
    values: Any, num_steps: list[int] | None, message: str
) -> None:
    """The message shows what was returned."""
    (failure,) = to_rewards("mine:f", values, [grade(Verdict.RIGHT)], num_steps)
    assert isinstance(failure, Failure)
    assert failure.message.startswith(f"reward mine:f {message}")


def test_a_reward_may_change_the_working_folder(tmp_path: Path) -> None:
    """Paths of a run are relative to the one in which it was started."""

    def wanders(*_: object) -> float:
        os.chdir(tmp_path)
        return 1.0

    here = Path.cwd()
    custom_rewards.values_of("mine:f", wanders, PROBLEM, [scored({})], iter([]), deadline_s=60)
    assert Path.cwd() == here


def test_rewards_are_summed_by_weight_for_each_step() -> None:
    """By hand: a reward of the completion is added to its last step; a missing one makes only its step NaN."""
    outcome = scored({"accuracy": [1], "format": [0.5], "overlong": [-0.25]})
    assert outcome.combined({"accuracy": 2.0, "format": -1.0, "overlong": 4.0}) == (2 - 0.5 - 1,)
    for last, total in ((1, 2.5), (NAN, NAN)):
        process = scored({CHECKED: [1, 0, last], "format": [1]}, ends=[1, 2, 3])
        assert process.combined({"format": 0.5, CHECKED: 2.0}) == pytest.approx((2.0, 0.0, total), nan_ok=True)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """Return the policy whose tokens the completions are made of."""
    return tiny.checkpoint()


def _responses(checkpoint: Checkpoint, *texts: str, finished: bool = True) -> list[Completion]:
    """Return completions as the policy of `checkpoint` would sample them."""
    end, completions = checkpoint.end_ids[:1] if finished else (), []
    for text in texts:
        tokens = TokenSequence(checkpoint.prompt_ids(PROBLEM.question), (*checkpoint.encode(text), *end))
        completions.append(Completion(tokens, (0.0,) * tokens.num_sampled, text, finished))
    return completions


Score = Callable[..., list[ScoredCompletion]]


@pytest.fixture
def score(checkpoint: Checkpoint, verify: Verifier) -> Score:
    """Return what scores the completions of one problem, given as texts, under some settings."""

    def scores(*responses: Completion | str, **changes: Any) -> list[ScoredCompletion]:
        completions = [_responses(checkpoint, each)[0] if isinstance(each, str) else each for each in responses]
        scorer = Scorer(grpo_config(**changes), checkpoint, partial(grade_completions, verify))
        return scorer([PROBLEM], [completions])[0].scored_G

    return scores


def test_outcome_supervision_rewards_the_completion_as_one_step(checkpoint: Checkpoint, score: Score) -> None:
    """The step is all of its tokens; every reward with a weight is there, and no other."""
    completions = _responses(checkpoint, WORKED, "#### 6", "1+1=2\n#### 7")
    weights = dict.fromkeys(["format", "accuracy", "overlong"], 1.0)
    results = score(*completions, reward__weights=weights, reward__overlong_buffer_tokens=8)
    rewards = [{name: value for name, (value,) in each.rewards.items()} for each in results]
    assert [(each["format"], each["accuracy"]) for each in rewards] == [(1, 1), (0, 1), (1, 0)]
    assert [each["overlong"] for each in rewards] == [-max(0, each.num_tokens - 8) / 8 for each in completions]
    labels = zip(completions, (1.0, 1.0, 0.0), strict=True)
    assert [each.steps for each in results] == [(Step(each.num_tokens, label),) for each, label in labels]
    assert [each.completion for each in results] == completions
    assert [each.grade.verdict for each in results] == ["right", "right", "wrong"]


def test_process_supervision_rewards_each_line_and_the_answer(checkpoint: Checkpoint, score: Score) -> None:
    """By hand: a right line, a wrong one and a right answer; each step ends with its line's last token."""
    weights = {CHECKED: 1.0, "format": 0.5}
    (result,) = score(WORKED, reward__weights=weights, reward__supervision="process")
    assert result.rewards == {CHECKED: (1.0, 0.0, 1.0), "format": (1.0,)}
    ids = result.completion.tokens.completion_ids
    ends = [step.end for step in result.steps]
    assert [checkpoint.decode(ids[:end]) for end in ends] == ["1+1=2\n", "1+1=2\n2+2=5\n", WORKED]
    assert ends[-1] == len(ids)


def test_a_truncated_completion_is_wrong_or_has_no_reward_at_all(checkpoint: Checkpoint, score: Score) -> None:
    """`score` counts it as a wrong answer, `mask` gives none of its steps a reward; finished ones are untouched."""
    weights = {CHECKED: 1.0}
    both = [*_responses(checkpoint, WORKED, finished=False), *_responses(checkpoint, WORKED)]
    values = {}
    for truncated in ("score", "mask"):
        changes = {"reward__supervision": "process", "sampling__truncated": truncated}
        results = score(*both, reward__weights=weights, **changes)
        assert results[0].grade.verdict == "wrong"
        values[truncated] = [each.combined(weights) for each in results]
    assert (values["score"][0][-1], values["score"][1][-1]) == (0.0, 1.0)
    assert all(math.isnan(reward) for reward in values["mask"][0])
    assert values["mask"][1] == values["score"][1]


def test_a_step_reward_needs_steps() -> None:
    """Known before the first step."""
    with pytest.raises(PipelineError, match=r"supervision: .*:checked rewards each step; set it to process"):
        require_rewards(grpo_config(reward__weights={CHECKED: 1.0}), [])


def test_a_rollout_is_graded_in_one_call_each_completion_against_its_own_problem(
    checkpoint: Checkpoint, verify: Verifier
) -> None:
    """Groups may differ in size; a truncated completion is not sent to the grader."""
    calls: list[list[Submission]] = []

    def recording(submissions: Sequence[Submission]) -> list[Grade]:
        calls.append(list(submissions))
        return verify(submissions)

    problems = [PROBLEM, tiny.problem(4), tiny.problem(5)]  # 6, 8 and 10
    truncated = _responses(checkpoint, "#### 8", finished=False)
    first, second = _responses(checkpoint, "#### 6", "#### 8"), _responses(checkpoint, "#### 8", "#### 6")
    completions = [first, [second[0], *truncated, second[1]], []]
    results = Scorer(grpo_config(), checkpoint, partial(grade_completions, recording))(problems, completions)  # type: ignore[arg-type]
    values = [[each.rewards["accuracy"] for each in group.scored_G] for group in results]
    assert values == [[(1.0,), (0.0,)], [(1.0,), (0.0,), (0.0,)], []]
    assert [[each.completion for each in group.scored_G] for group in results] == completions
    assert [group.problem for group in results] == problems
    (call,) = calls
    expected = [("6", "#### 6"), ("6", "#### 8"), ("8", "#### 8"), ("8", "#### 6")]
    assert [(each.gold, each.response) for each in call] == expected


def test_the_answer_counts_where_the_prompt_of_the_policy_asks_for_it(checkpoint: Checkpoint, verify: Verifier) -> None:
    """The accuracy and the format of an answer in another place are zero."""
    boxing = replace(checkpoint, config=checkpoint.config.model_copy(update={"answer": AnswerPolicy.BOXED}))
    responses = _responses(checkpoint, "1+1=2\n#### 6", r"1+1=2, so \boxed{6}")
    config = grpo_config(reward__weights={"accuracy": 1.0, "format": 1.0})
    (result,) = Scorer(config, boxing, partial(grade_completions, verify))([PROBLEM], [responses])
    assert [list(each.rewards.values()) for each in result.scored_G] == [[(0.0,), (0.0,)], [(1.0,), (1.0,)]]


Custom = Callable[[RewardFunction], str]


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> Custom:
    """Return the name under which the params find a function."""

    def named(function: RewardFunction) -> str:
        monkeypatch.setattr(sys.modules[__name__], "custom_reward", function, raising=False)
        return f"{__name__}:custom_reward"

    return named


def _raise(error: BaseException) -> RewardFunction:
    """Return a reward that raises where the response has a 7 in it."""

    def reward(problem: Problem, response: Completion, result: Grade) -> float:
        if "7" in response.text:
            raise error
        return 0.25

    return reward


def test_a_custom_reward_may_compare_a_group(checkpoint: Checkpoint, score: Score, custom: Custom) -> None:
    """It gets the completions that are not masked, in their order, and returns a value for each."""

    @group_reward
    def rank(problem: Problem, completions: list[Completion], grades: list[Grade]) -> list[int]:
        texts = sorted(each.text for each in completions)
        return [texts.index(each.text) for each, _ in zip(completions, grades, strict=True)]

    name = custom(rank)
    truncated = _responses(checkpoint, "#### 1", finished=False)
    changes = {"reward__weights": {name: 1.0}, "sampling__truncated": "mask"}
    results = score("#### 8", *truncated, "#### 6", "#### 7", **changes)
    assert [each.rewards[name][0] for each in results] == pytest.approx([2.0, NAN, 0.0, 1.0], nan_ok=True)
    assert [type(each.rewards[name][0]) for each in results] == [float] * 4


def test_a_reward_that_raises_leaves_its_completion_without_any(
    checkpoint: Checkpoint, score: Score, custom: Custom, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others keep theirs, masked ones are not asked for; the failure says what and where, and is printed once."""
    name = custom(_raise(KeyError("nothing\nhere")))
    weights = {"accuracy": 1.0, name: 2.0}
    responses = ["#### 6", "#### 7", "#### 8", "#### 77", *_responses(checkpoint, "#### 7", finished=False)]
    results = score(*responses, reward__weights=weights, sampling__truncated="mask")
    assert [each.combined(weights)[0] for each in results] == pytest.approx([1.5, NAN, 0.5, NAN, NAN], nan_ok=True)
    assert [each.why_unscorable is None for each in results] == [True, False, True, False, True]
    assert all(math.isnan(value) for values in results[1].rewards.values() for value in values)
    failure = results[1].failure
    assert failure is not None
    assert failure.kind == f"reward {name} raised KeyError"
    assert re.fullmatch(rf"{failure.kind}: 'nothing\\nhere' \(test_rewards\.py, line \d+\)", failure.message)
    printed = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert printed == [f"train_grpo: warning: no reward for a completion of {PROBLEM.id}: {failure.message}"]


def test_a_reward_that_would_end_the_process_is_an_error(score: Score, custom: Custom) -> None:
    """With an exit code of its own choice, a run without outputs would pass for a finished one."""
    name = custom(_raise(SystemExit(0)))
    with pytest.raises(PipelineError) as caught:
        score("#### 7", reward__weights={name: 1.0})
    message = str(caught.value)
    assert message.startswith(f"train_grpo.reward.weights.{name}: reward {name} raised SystemExit")
    assert PROBLEM.id in message
    assert "\n" not in message
