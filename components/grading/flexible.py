"""Flexible extraction, which evaluations report besides the strict one: the answer of a response in any form.

Published results often take the last number of a response as its answer. Rewards never do: accepting a number from the
middle of an unfinished thought would teach the model to guess.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from components.grading.extract import final_answer, last_formula_or_number, outside_thoughts
from components.grading.verifier import Grade, Submission, Verifier, is_unit_tests
from components.shared.answer_policy import AnswerPolicy

_SPACE = re.compile(r"\s+")


def flexible_answer(response: str, policy: AnswerPolicy) -> str | None:
    """Return the answer where the policy looks for it, else in any other form, else the last value; None without one.

    The last value is a number or a formula; with the policy `marked`, whose answers are numbers, only a number.
    """
    return (
        final_answer(response, policy)
        or final_answer(response, AnswerPolicy.STATED)
        or last_formula_or_number(outside_thoughts(response), formulas=policy is not AnswerPolicy.MARKED)
    )


def grade_flexibly(verify: Verifier, submissions: Sequence[Submission], strict: Sequence[Grade]) -> list[Grade]:
    """Return the grade of each submission by its flexible answer; `strict` has the grades by its policy.

    A response with a strict answer keeps its grade; the others are graded again.
    """
    rewritten: dict[int, Submission] = {}
    for index, (submission, grade) in enumerate(zip(submissions, strict, strict=True)):
        if grade.extracted is None and not is_unit_tests(submission.gold):
            answer = flexible_answer(submission.response, submission.policy)
            if answer:  # after `####`, where unlike in a box no brace in it can do harm
                response = f"#### {_SPACE.sub(' ', answer)}"
                rewritten[index] = replace(submission, response=response, policy=AnswerPolicy.MARKED)
    grades = list(strict)
    for index, grade in zip(rewritten, verify(list(rewritten.values())), strict=True):
        grades[index] = grade
    return grades
