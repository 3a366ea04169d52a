import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.grading.verifier import Grade, Verdict
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.train_grpo.rewards import (
    accuracy,
    answer_format,
    code_tests,
    length,
    overlong,
    repetition,
    require_rewards,
)
from tests import tiny
from tests.train_grpo.groups import completion, grade
from tests.train_grpo.settings import grpo_config

PROBLEM = tiny.PROBLEMS[0]
THINKING = "Think between <think> and </think>, then answer.\n{question}\n"
OPENED = "{question}\n<think>\n"


def _model(prompt: str = "{question}\n", answer: AnswerPolicy = AnswerPolicy.DECLARED) -> ModelConfig:
    return ModelConfig(base="scratch:tiny", prompt=prompt, answer=answer)


def _format(text: str, *, model: ModelConfig | None = None, finished: bool = True) -> float:
    """The format reward of a text, which must not depend on the verdict."""
    said = completion(text=text, finished=finished)
    (found,) = {answer_format(PROBLEM, said, grade(verdict), model=model or _model()) for verdict in Verdict}
    return found


def test_right_is_one_wrong_is_zero_and_unscorable_is_neither() -> None:
    """A crash of the verifier must not be taken for a wrong answer."""
    values = {verdict: accuracy(PROBLEM, completion(), grade(verdict)) for verdict in Verdict}
    assert (values[Verdict.RIGHT], values[Verdict.WRONG]) == (1.0, 0.0)
    assert math.isnan(values[Verdict.UNSCORABLE])


def test_code_is_worth_the_share_of_the_tests_it_passes() -> None:
    """What was cut off passes none; without tests, or without a verdict, there is no reward at all."""

    def value(verdict: Verdict, tests_passed: float | None, *, finished: bool = True) -> float:
        found = Grade(verdict, extracted=None, reason="", tests_passed=tests_passed)
        return code_tests(PROBLEM, completion(finished=finished), found)

    assert [value(Verdict.WRONG, share) for share in (0.0, 0.25, 0.75)] == [0.0, 0.25, 0.75]
    assert value(Verdict.RIGHT, 1.0) == 1.0
    assert value(Verdict.WRONG, None, finished=False) == 0.0
    assert math.isnan(value(Verdict.RIGHT, None))
    assert math.isnan(value(Verdict.UNSCORABLE, 0.5))


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("1+1=2\n#### 2", True, 1.0),
        (r"So it is \boxed{2}", True, 1.0),
        ("1+1=2\n#### 2", False, 0.0),
        ("#### 2", True, 0.0),
        ("1+1=2", True, 0.0),
        ("1+1=2\n####", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_format_asks_for_reasoning_and_an_answer_in_its_place(text: str, finished: bool, expected: float) -> None:
    """A bare answer, reasoning without one, or one that was cut off is worth nothing, whatever the verdict."""
    assert _format(text, finished=finished) == expected


@pytest.mark.parametrize(("extracted", "expected"), [("print(1)", 1.0), (None, 0.0)])
def test_the_place_of_code_is_a_block(extracted: str | None, expected: float) -> None:
    """Where the answer is unit tests, what the grader found to run is in the format, whatever policy there is."""
    problem = tiny.problem(0, answer="assert f(1) == 2")
    found = Grade(Verdict.WRONG, extracted, "", tests_passed=0.0)
    assert answer_format(problem, completion(text="#### 2"), found, model=_model()) == expected
    thinking = _model(THINKING)
    assert answer_format(problem, completion(text="<think>f</think>code"), found, model=thinking) == expected
    assert answer_format(problem, completion(text="code"), found, model=thinking) == 0.0


@pytest.mark.parametrize(
    ("text", "policy", "expected"),
    [
        (r"So it is \boxed{2}", AnswerPolicy.BOXED, 1.0),
        ("1+1=2\n#### 2", AnswerPolicy.BOXED, 0.0),
        (r"So it is \boxed{2}", AnswerPolicy.MARKED, 0.0),
        ("1+1=2\n#### 2", AnswerPolicy.MARKED, 1.0),
        ("It is 1+1. The answer is 2.", AnswerPolicy.BOXED, 0.0),
        ("It is 1+1. The answer is 2.", AnswerPolicy.DECLARED, 0.0),
    ],
)
def test_the_designated_place_is_that_of_the_prompt(text: str, policy: AnswerPolicy, expected: float) -> None:
    """An answer in another place than the prompt asks for is not in the format."""
    assert _format(text, model=_model(answer=policy)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>1+1=2</think>\n#### 2", 1.0),
        ("\n <think>\n1+1=2\n</think>#### 2", 1.0),
        ("<think>1+1=2</think>\nSo\n#### 2", 1.0),
        ("1+1=2\n#### 2", 0.0),
        ("First <think>1+1=2</think>\n#### 2", 0.0),
        ("<think>1+1=2\n#### 2", 0.0),
        ("1+1=2</think>\n#### 2", 0.0),
        ("<think>1+1=2</think><think>2</think>\n#### 2", 0.0),
        ("<think>1<think>+1=2</think>\n#### 2", 0.0),
        ("<think>1+1=2</think></think>\n#### 2", 0.0),
        ("<think>1+1=2\n#### 2</think>", 0.0),
        ("<think>1+1=2\n#### 2</think>so it is", 0.0),
        ("<think> \n</think>\nAs 1+1=2:\n#### 2", 0.0),
        ("</think><think>1+1=2</think>\n#### 2", 0.0),
    ],
)
def test_where_thoughts_are_asked_for_one_comes_first_and_the_answer_after(text: str, expected: float) -> None:
    """One thought, closed, with something in it and nothing before it."""
    assert _format(text, model=_model(THINKING)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1+1=2</think>\n#### 2", 1.0),
        ("1+1=2\n#### 2", 0.0),
        (" </think>1+1=2\n#### 2", 0.0),
        ("<think>1+1=2</think>\n#### 2", 0.0),
        ("1+1=2</think>So</think>\n#### 2", 0.0),
        ("1+1=2\n#### 2</think>", 0.0),
    ],
)
def test_a_thought_that_the_prompt_opens_is_closed_by_the_completion(text: str, expected: float) -> None:
    """The completion then starts inside of it, and does not open another one."""
    assert _format(text, model=_model(OPENED)) == expected


def test_a_reward_for_tests_is_refused_where_a_problem_has_none() -> None:
    """It says which, before anything is sampled; where all have tests there is nothing to say."""
    config = grpo_config(reward__weights={"code_tests": 1.0})
    tested = tiny.problem(1, answer="assert f(1) == 2")
    with pytest.raises(PipelineError, match=rf"weights\.code_tests: 1 of 2 .* such as {PROBLEM.id}"):
        require_rewards(config, [tested, PROBLEM])
    require_rewards(config, [tested])
    require_rewards(grpo_config(), [PROBLEM])


def test_unit_tests_need_a_sandbox_to_run_code_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, a single problem with tests stops the run, and one without is trained on."""

    def refuse() -> None:
        raise PipelineError("no sandbox here")

    monkeypatch.setattr("components.train_grpo.rewards.require_sandbox", refuse)
    require_rewards(grpo_config(), [PROBLEM])
    with pytest.raises(PipelineError, match="no sandbox here"):
        require_rewards(grpo_config(), [PROBLEM, tiny.problem(1, answer="assert f(1) == 2")])


def test_thoughts_are_no_part_of_a_format_that_does_not_ask_for_them() -> None:
    """A model that thinks without having been asked to is not held to these rules."""
    assert _format("First <think>1+1=2</think>\n#### 2") == 1.0
    assert _format("1+1=2</think>\n#### 2") == 1.0


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (12, 0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1)])
def test_overlong_falls_in_a_line_over_the_last_tokens(num_tokens: int, expected: float) -> None:
    """By hand: a limit of 16 tokens, of which the last four are the buffer."""
    assert overlong(PROBLEM, completion(num_tokens), grade(Verdict.RIGHT), buffer=4, limit=16) == expected


@settings(deadline=None)
@given(num_tokens=st.integers(1, 16), buffer=st.integers(1, 15))
def test_overlong_is_a_share_of_the_buffer_below_zero(num_tokens: int, buffer: int) -> None:
    """Never positive, -1 at the limit and only there, and 0 exactly up to the buffer."""
    found = overlong(PROBLEM, completion(num_tokens), grade(Verdict.WRONG), buffer=buffer, limit=16)
    assert -1 <= found <= 0
    assert (found == -1) == (num_tokens == 16)
    assert (found == 0) == (num_tokens <= 16 - buffer)


def _repetition(ids: tuple[int, ...], n: int) -> float:
    said = Completion(TokenSequence((1, 2), ids), (-1.0,) * len(ids), "text", finished=True)
    return repetition(PROBLEM, said, grade(Verdict.RIGHT), n=n)


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [
        ((3, 4, 5, 6), 2, 0.0),
        ((3, 4, 3, 4, 3), 2, -1 / 2),  # 34 43 34 43
        ((3, 4, 3, 4, 3), 3, -1 / 3),  # 343 434 343
        ((3, 4, 3, 4, 3), 1, -3 / 5),
        ((3,) * 11, 2, -9 / 10),
        ((3, 4), 2, 0.0),
        ((3, 3), 3, 0.0),
    ],
)
def test_repetition_by_hand(ids: tuple[int, ...], n: int, expected: float) -> None:
    """Minus the share of n-grams that were there before; a completion too short for any repeats nothing."""
    assert _repetition(ids, n) == pytest.approx(expected)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=30).map(tuple), n=st.integers(1, 6))
def test_repetition_stays_below_zero_and_never_reaches_minus_one(ids: tuple[int, ...], n: int) -> None:
    """There is always a first time; longer n-grams repeat less."""
    assert -1 < _repetition(ids, n) <= 0
    assert _repetition(ids, n + 1) >= _repetition(ids, n) - 1e-12


@pytest.mark.parametrize(
    ("lengths", "outcomes", "expected"),
    [
        ([10, 20, 30], [1, 1, 1], [0.5, 0.0, -0.5]),
        ([10, 20, 30, 25], [0, 1, 0, 0], [0.0, 0.0, -0.5, -0.25]),
        ([7, 7, 7], [1, 0, 1], [0.0, 0.0, 0.0]),
        ([1000, 20, 30], [math.nan, 1, 0], [math.nan, 0.5, -0.5]),
        ([1, 20, 20], [math.nan, 1, 0], [math.nan, 0.0, 0.0]),
        ([5, 9], [math.nan, math.nan], [math.nan, math.nan]),
    ],
)
def test_length_by_hand(lengths: list[int], outcomes: list[float], expected: list[float]) -> None:
    """Short right answers gain, long ones lose, wrong ones never gain; what has no outcome counts for nothing."""
    assert length(lengths, outcomes) == pytest.approx(expected, nan_ok=True)


@settings(deadline=None)
@given(group=st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0.0, 1.0])), min_size=2, max_size=8))
def test_length_prefers_the_shorter_of_two_right_answers(group: list[tuple[int, float]]) -> None:
    """All are within half a unit of zero, right ones fall with their length, wrong ones are never above zero."""
    lengths, outcomes = zip(*group, strict=True)
    found = length(lengths, outcomes)
    rows = sorted(zip(group, found, strict=True))
    assert all(-0.5 <= reward <= 0.5 for reward in found)
    assert all(reward <= 0 for (_, outcome), reward in rows if not outcome)
    right = [reward for (_, outcome), reward in rows if outcome]
    assert right == sorted(right, reverse=True)
