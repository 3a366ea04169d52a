from components.policy.sequences import TokenSequence
from components.rollout.completion import Completion, grade_completion
from components.shared.grading.verdict import Verdict


def _completion(text: str, *, finished: bool) -> Completion:
    return Completion(TokenSequence((1,), (2,)), (-0.5,), text, finished)


def test_a_finished_completion_is_graded_by_its_final_answer() -> None:
    """Right and wrong are decided by the grader on the text."""
    assert grade_completion("12", _completion("5+7=12\n#### 12", finished=True)).verdict is Verdict.RIGHT
    assert grade_completion("12", _completion("5+7=12\n#### 13", finished=True)).verdict is Verdict.WRONG


def test_a_completion_that_was_cut_off_has_not_answered() -> None:
    """`#### 1` cut from `#### 19` must not pass for 1."""
    grade = grade_completion("1", _completion("#### 1", finished=False))
    assert (grade.verdict, grade.extracted) == (Verdict.WRONG, None)
    assert "cut off" in grade.reason
