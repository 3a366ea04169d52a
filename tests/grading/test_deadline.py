"""The deadline is one of processor time, and no honest answer reaches it."""

import pytest

from components.grading.verdicts import Reason
from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.tables import rows, table


def out_of_time(verify: Verifier, submissions: list[Submission]) -> list[Submission]:
    """Those that are not graded within the deadline."""
    graded = zip(submissions, verify(submissions), strict=True)
    return [submission for submission, each in graded if each.reason is Reason.TIME]


def test_answers_of_the_tables_are_graded_in_time(verify: Verifier) -> None:
    """Each pair of answers, whichever is expected, and each response."""
    pairs = [pair for one, other, *_ in table("answers.tsv") for pair in ((one, other), (other, one))]
    submissions = [Submission(gold, rf"\boxed{{{answer}}}", AnswerPolicy.STATED) for gold, answer in pairs]
    for name in ("responses.tsv", "gsm8k.tsv"):
        submissions += [Submission(gold, response, AnswerPolicy.STATED) for gold, response, *_ in table(name)]
    assert out_of_time(verify, submissions) == []


def test_outputs_of_models_are_graded_in_time(verify: Verifier) -> None:
    """Real answers to GSM8K and MATH-500, right and wrong."""
    outputs = rows("grading/dev_outputs.jsonl")
    assert out_of_time(verify, [Submission(row["gold"], row["response"], AnswerPolicy.STATED) for row in outputs]) == []


def test_solutions_of_math_are_graded_in_time(verify: Verifier) -> None:
    """With their questions, which answers are compared with, too."""
    solutions = rows("data/math500.jsonl")
    submissions = [Submission(row["answer"], row["solution"], AnswerPolicy.STATED, row["problem"]) for row in solutions]
    assert out_of_time(verify, submissions) == []


@pytest.mark.parametrize("depth", [3, 6, 8])
def test_brackets_in_brackets_are_graded_in_time(verify: Verifier, depth: int) -> None:
    """Of numbers, of variables, of fractions and roots, in an answer that is right."""
    brackets = [("(", ")"), ("(1+", ")"), ("(x+", ")"), ("((x+1)", ")"), (r"\sqrt{1+", "}"), ("2(x-", ")^2")]
    answers = [opening * depth + "x" + closing * depth for opening, closing in brackets]
    submissions = [
        Submission(f"{answer}+1", rf"\boxed{{1+{answer}}}", AnswerPolicy.BOXED)
        for answer in answers
        if answer.count("(") <= 8
    ]
    assert {each.verdict for each in verify(submissions)} == {Verdict.RIGHT}


def test_waiting_does_not_count() -> None:
    """A submission that sleeps for longer than the deadline, as on a busy machine, is graded."""
    with Verifier(num_workers=1, deadline_s=0.2, function="tests.grading.fake_grader:grade") as pool:
        assert pool([Submission("sleep", "0.6", AnswerPolicy.STATED)])[0].verdict is Verdict.RIGHT
