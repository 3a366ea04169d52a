"""Whether the grader can tell a right answer of each problem from a wrong one."""

import re
from collections.abc import Sequence

from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_SENTENCE = re.compile(r"[^\W\d_]{2,}\W+[^\W\d_]{2,}.*\d|\d.*[^\W\d_]{2,}\W+[^\W\d_]{2,}\W+[^\W\d_]{2,}")
"""Words around a number: more than a unit of measure."""

_NUM_SHOWN = 3


def ungradable(problems: Sequence[Problem], policy: AnswerPolicy) -> str:
    """Return how many answers cannot be graded, with three of them, for people; empty where all can."""
    graded = zip(problems, grades(problems, policy), strict=True)
    found = [f'"{problem.answer}" ({grade})' for problem, grade in graded if grade != Verdict.RIGHT]
    shown = ", ".join(found[:_NUM_SHOWN]) + (", ..." if len(found) > _NUM_SHOWN else "")
    remedy = f"accepted: the value alone, and solutions that end in it as train_sft.model.answer ({policy}) reads them"
    return f"{len(found):,} of {len(problems):,} answers cannot be graded: {shown}; {remedy}" if found else ""


def grades(problems: Sequence[Problem], policy: AnswerPolicy) -> list[str]:
    """Return the verdict on each problem's own solution, or on its boxed answer if it has none.

    An answer that only its own repetition would match cannot be graded: it is "unscorable" where it cannot be read, and
    "wrong" where it is a sentence and the number in it, given alone, is not right.
    """
    solutions = [
        Submission(problem.answer, problem.solution, policy, problem.question)
        if problem.solution.strip()
        else Submission(problem.answer, rf"\boxed{{{problem.answer}}}", AnswerPolicy.BOXED, problem.question)
        for problem in problems
    ]
    numbers = [
        Submission(problem.answer, rf"\boxed{{{_number_in(problem.answer)}}}", AnswerPolicy.BOXED, problem.question)
        for problem in problems
    ]
    with Verifier() as verify:
        on_solutions, on_numbers = verify(solutions), verify(numbers)
    verdicts = []
    for problem, on_solution, on_number in zip(problems, on_solutions, on_numbers, strict=True):
        is_sentence = _SENTENCE.search(problem.answer) is not None and on_number.verdict is Verdict.WRONG
        matches_only_itself = is_sentence or on_number.verdict is Verdict.UNSCORABLE
        verdicts.append(str(on_number.verdict if matches_only_itself else on_solution.verdict))
    return verdicts


def _number_in(answer: str) -> str:
    """Return the only number in an answer, or else one that hardly any problem asks for."""
    numbers = _NUMBER.findall(answer)
    return numbers[0] if len(numbers) == 1 else "-31415.9"
