"""Flexible extraction, which evaluations report beside the strict one: the answer of a response in any form.

Published numbers often take the last number of a response for its answer. Rewards never do: a number from the middle of
an unfinished thought would teach the model to guess.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from components.grading.extract import final_answer, last_formula_or_number, outside_thoughts
from components.grading.verifier import Grade, Submission, Verifier, is_unit_tests
from components.shared.answer_policy import AnswerPolicy

_SPACE = re.compile(r"\s+")


def flexible_answer(response: str, policy: AnswerPolicy) -> str | None:
    """Return the answer where the policy looks for it, or else in any other form, or else the last value; None without.

    The last value is a number where the policy asks for `####`, whose answers are numbers; otherwise it may also be a
    formula. A truncated response has one too.
    """
    return (
        final_answer(response, policy)
        or final_answer(response, AnswerPolicy.STATED)
        or last_formula_or_number(outside_thoughts(response), formulas=policy is not AnswerPolicy.MARKED)
    )


def grade_flexibly(verify: Verifier, submissions: Sequence[Submission], strict: Sequence[Grade]) -> list[Grade]:
    """Return the grade of each submission by its flexible answer; `strict` are its grades by its policy.

    A response whose strict answer was extracted keeps that grade, so only the others are graded here.
    """
    grades = list(strict)
    answers = {
        index: answer
        for index, (each, grade) in enumerate(zip(submissions, strict, strict=True))
        if grade.extracted is None
        and not is_unit_tests(each.gold)
        and (answer := flexible_answer(each.response, each.policy))
    }
    # The answer alone, in the one form that no brace within it can break.
    rewritten = [
        replace(submissions[index], response=f"#### {_SPACE.sub(' ', answer)}", policy=AnswerPolicy.MARKED)
        for index, answer in answers.items()
    ]
    for index, grade in zip(answers, verify(rewritten), strict=True):
        grades[index] = grade
    return grades
