"""A part of the question is no answer to it."""

import json
import re
import time
from pathlib import Path

import pytest

from components.grading.verifier import Reason, Submission, Verdict, Verifier, grade
from components.shared.answer_policy import AnswerPolicy

MATH500 = Path("../shared/data/math500.jsonl")
BOXED, STATED = AnswerPolicy.BOXED, AnswerPolicy.STATED
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)


@pytest.mark.parametrize(
    "piece",
    ["(", "-", "\\frac", "\\sqrt", "2^", "x(", "{", "\\sin ", "!", "x!", "1+(", "|", "[1,", "$", "x_", "1,", "$1$ "],
)
def test_reading_a_question_takes_linear_time(piece: str) -> None:
    """And no more stack for deeper nesting."""
    started = time.process_time()
    grade("3", r"\boxed{\frac{6}{2}}", BOXED, piece * 5000)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("question", ["", "What is 5 * 8 + 2?", "How many apples are there?"])
@pytest.mark.parametrize("response", [r"\boxed{40 + 2}", "The answer is $40+2$.", r"Answer \( (40+2) \)"])
def test_a_sum_of_numbers_is_no_number_whatever_was_asked(question: str, response: str) -> None:
    """The grader does not do the last step."""
    graded = grade("42", response, STATED, question)
    assert (graded.verdict, graded.reason) == (Verdict.WRONG, Reason.SETUP)


@pytest.mark.slow
@pytest.mark.skipif(not MATH500.is_file(), reason="MATH-500 is not there")
def test_no_formula_of_math500_answers_its_own_question(verify: Verifier) -> None:
    """Unless it is written as the expected answer is; and no reference answer is refused for its question."""
    rows = [json.loads(line) for line in MATH500.read_text(encoding="utf-8").splitlines()]
    honest, echoes = [], []
    for row in rows:
        honest.append(Submission(row["answer"], rf"\boxed{{{row['answer']}}}", BOXED, row["problem"]))
        honest.append(Submission(row["answer"], row["solution"], BOXED, row["problem"]))
        formulas = {next(filter(None, match.groups())).strip(" .,") for match in _FORMULA.finditer(row["problem"])}
        formulas |= {part.strip() for formula in formulas for part in re.split(r"=|\\le|\\ge|<|>", formula)}
        # A single number or name, or the expected answer itself among others, is no echo.
        others = [each for each in formulas if each and _written(each) != _written(row["answer"])]
        echoes += [Submission(row["answer"], rf"\boxed{{{each}}}", BOXED, row["problem"]) for each in others]
    assert [each for each, graded in zip(honest, verify(honest), strict=True) if graded.verdict != "right"] == []
    accepted = [each for each, graded in zip(echoes, verify(echoes), strict=True) if graded.verdict == "right"]
    assert [each.response for each in accepted if r"\text{ and }" not in each.response] == []


def _written(formula: str) -> str:
    return re.sub(r"\s|\\[,!]", "", formula.replace("dfrac", "frac"))
