from collections.abc import Iterator

import pytest

from components.grading.verifier import Verdict, Verifier
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, grade_completions
from components.shared.answer_policy import AnswerPolicy


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """The grader."""
    with Verifier(num_workers=1) as verifier:
        yield verifier


def _completion(text: str, *, finished: bool = True) -> Completion:
    return Completion(TokenSequence((1,), (2,)), (-0.5,), text, finished)


def test_each_completion_is_graded_against_its_own_answer(verify: Verifier) -> None:
    """Grades stand in the order of the completions, those that were cut off among them."""
    texts = ["5+7=12\n#### 12", "#### 12", "#### 9", "5+7=12\n#### 13"]
    completions = [_completion(text, finished=text != "#### 12") for text in texts]
    grades = grade_completions(verify, ["12", "12", "9", "12"], completions, AnswerPolicy.DECLARED)
    assert [grade.verdict for grade in grades] == ["right", "wrong", "right", "wrong"]
    assert [grade.extracted for grade in grades] == ["12", None, "9", "13"]


def test_a_completion_that_was_cut_off_has_not_answered(verify: Verifier) -> None:
    """`#### 1` cut from `#### 19` must not pass for 1."""
    (grade,) = grade_completions(verify, ["1"], [_completion("#### 1", finished=False)], AnswerPolicy.DECLARED)
    assert (grade.verdict, grade.extracted) == (Verdict.WRONG, None)
    assert "cut off" in grade.reason


@pytest.mark.parametrize(("policy", "verdict"), [(AnswerPolicy.MARKED, "right"), (AnswerPolicy.BOXED, "wrong")])
def test_the_policy_says_where_an_answer_counts(verify: Verifier, policy: AnswerPolicy, verdict: str) -> None:
    """An answer elsewhere is none."""
    (grade,) = grade_completions(verify, ["12"], [_completion("#### 12")], policy)
    assert grade.verdict == verdict


def test_an_answer_too_few_is_refused(verify: Verifier) -> None:
    """Completions and answers have to come in pairs."""
    with pytest.raises(ValueError, match="zip"):
        grade_completions(verify, ["12"], [_completion("#### 12")] * 2, AnswerPolicy.DECLARED)
