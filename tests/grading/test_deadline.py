"""The deadline is one of processor time, and leaves honest answers five times what they take."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from components.grading import algebra
from components.grading.grade import Grade, Verdict, grade
from components.grading.verifier import Submission, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.tables import table

SHARED = Path("../shared")
DEADLINE_S = 1.0
"""The Verifier's."""


def timed(submission: Submission) -> tuple[float, Grade]:
    """The processor time that a submission takes, the lesser of two where the first takes long, and its grade."""
    times = []
    for _ in range(2):
        started = time.process_time()
        graded = grade(submission.gold, submission.response, submission.policy, submission.question)
        times.append(time.process_time() - started)
        if times[0] < DEADLINE_S / 20:
            break
    return min(times), graded


def slow(submissions: list[Submission]) -> list[tuple[float, Submission]]:
    """Those that take more than a fifth of the deadline, once the libraries have built their tables."""
    algebra.same_value(r"\sin{x}\cos{x}", r"\frac{\sin{2x}}{2}")
    times = [(timed(each)[0], each) for each in submissions]
    return [each for each in times if each[0] > DEADLINE_S / 5]


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file that lies beside the project."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is not part of the project")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_of_the_tables_take_a_fifth_of_the_deadline() -> None:
    """Each pair of answers, whichever is expected, and each response."""
    pairs = [pair for one, other, *_ in table("answers.tsv") for pair in ((one, other), (other, one))]
    submissions = [Submission(gold, rf"\boxed{{{answer}}}", AnswerPolicy.STATED) for gold, answer in pairs]
    for name in ("responses.tsv", "gsm8k.tsv"):
        submissions += [Submission(gold, response, AnswerPolicy.STATED) for gold, response, *_ in table(name)]
    assert slow(submissions) == []


def test_outputs_of_models_take_a_fifth_of_the_deadline() -> None:
    """Real answers to GSM8K and MATH-500, right and wrong."""
    outputs = rows("grading/dev_outputs.jsonl")
    assert slow([Submission(row["gold"], row["response"], AnswerPolicy.STATED) for row in outputs]) == []


def test_solutions_of_math_take_a_fifth_of_the_deadline() -> None:
    """With their questions, which answers are compared with, too."""
    solutions = rows("data/math500.jsonl")
    submissions = [Submission(row["answer"], row["solution"], AnswerPolicy.STATED, row["problem"]) for row in solutions]
    assert slow(submissions) == []


@pytest.mark.parametrize("depth", [3, 6, 8])
def test_brackets_in_brackets_take_a_fifth_of_the_deadline(depth: int) -> None:
    """Of numbers, of variables, of fractions and roots, in an answer that is right."""
    for opening, closing in (
        ("(", ")"),
        ("(1+", ")"),
        ("(x+", ")"),
        ("((x+1)", ")"),
        (r"\sqrt{1+", "}"),
        ("2(x-", ")^2"),
    ):
        answer = opening * depth + "x" + closing * depth
        if answer.count("(") <= 8:
            seconds, graded = timed(Submission(f"{answer}+1", rf"\boxed{{1+{answer}}}", AnswerPolicy.BOXED))
            assert seconds < DEADLINE_S / 5
            assert graded.verdict is Verdict.RIGHT


def test_waiting_does_not_count() -> None:
    """A submission that sleeps for longer than the deadline, as on a busy machine, is graded."""
    with Verifier(num_workers=1, deadline_s=0.2, function="tests.grading.fake_grader:grade") as pool:
        assert pool([Submission("sleep", "0.6", AnswerPolicy.STATED)])[0].verdict is Verdict.RIGHT
