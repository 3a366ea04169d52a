"""Flexible extraction beside the strict one."""

from collections.abc import Sequence

import pytest

from components.grading.flexible import flexible_answer, grade_flexibly
from components.grading.verifier import Grade, Submission, grade
from components.shared.answer_policy import AnswerPolicy

BOXED, MARKED, DECLARED, STATED, LAST_SENTENCE = AnswerPolicy

CASES = [
    (MARKED, "#### 5\nThat is 6 less than 11.", "5"),
    (MARKED, r"So it is \boxed{5}, not 6.", "5"),
    (MARKED, "The answer is 5. There were 6 of them.", "5"),
    (MARKED, "He has 3*4 = 12 eggs and sells 5-3", "3"),
    (MARKED, "He pays $5 and then $1,250.50. That was too much.", "$1,250.50"),
    (MARKED, "That is $-2$ degrees", "-2"),
    (MARKED, "a third, 1/3, or 33.3% of it", "33.3%"),
    (MARKED, "x2 has no number, v1.2 neither", None),
    (MARKED, "<think>12 or 13</think> I do not know.", None),
    (MARKED, "so I get 12 of them<|im_end|>13", "12"),
    (BOXED, r"Then $x = \frac{1}{2}$ follows", r"x = \frac{1}{2}"),
    (BOXED, r"With $n = 3$ we count 12 ways", "12"),
    (BOXED, "He pays $5 for each and $20 for all", "$20"),
    (BOXED, "#### 7\nand $8$", "7"),
    (STATED, "", None),
    (DECLARED, "no value at all", None),
]


@pytest.mark.parametrize(("policy", "response", "answer"), CASES)
def test_without_the_form_asked_for_another_form_or_else_the_last_value_is_the_answer(
    policy: AnswerPolicy, response: str, answer: str | None
) -> None:
    """Formulas are values except where `####`, and so a number, is asked for."""
    assert flexible_answer(response, policy) == answer


def test_only_responses_without_a_strict_answer_are_graded_again() -> None:
    """Once, whatever braces their answer has; code is never graded by a number in it."""
    calls: list[Submission] = []

    def verify(submissions: Sequence[Submission]) -> list[Grade]:
        calls.extend(submissions)
        return [grade(each.gold, each.response, each.policy) for each in submissions]

    cases = [
        ("5", "#### 5", "right"),
        (r"\frac{1}{2}", "so \\(\\frac{1}\n{2}\\) it", "right"),
        ("5", "so } is 5", "right"),
        ("5", "no value at all", "wrong"),
        ("assert f(1) == 2", "def f(x): return 2", "wrong"),
    ]
    strict = [grade("5", "#### 5", MARKED), *[grade("5", "no value at all", MARKED)] * 4]
    submissions = [Submission(gold, response, DECLARED, "What is it?") for gold, response, _ in cases]
    flexible = grade_flexibly(verify, submissions, strict)  # type: ignore[arg-type]
    assert [each.verdict for each in flexible] == [verdict for _, _, verdict in cases]
    assert [(each.gold, each.question) for each in calls] == [(gold, "What is it?") for gold, _, _ in cases[1:3]]
