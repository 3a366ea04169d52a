"""Can the grader distinguish right from wrong answers to each problem?"""

import re
from collections.abc import Sequence
from dataclasses import replace

from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_SENTENCE = re.compile(r"[^\W\d_]{2,}\W+[^\W\d_]{2,}.*\d|\d.*[^\W\d_]{2,}\W+[^\W\d_]{2,}\W+[^\W\d_]{2,}")
"""A number with two words before it, or three after it: more than a unit of measure."""
_LATEX = re.compile(r"\\(begin|end)\{\w+\}|\\[a-zA-Z]+")
"""Names of commands and environments, which are no words."""
_NUM_SHOWN = 3


def ungradable(problems: Sequence[Problem], policy: AnswerPolicy, *, imitated: bool) -> str:
    """Return a message with the number of answers that cannot be graded, and three of them; empty if all can."""
    graded = zip(problems, grades(problems, policy, imitated=imitated), strict=True)
    found = [f'"{problem.answer}" ({grade}; {problem.id})' for problem, grade in graded if grade != Verdict.RIGHT]
    if not found:
        return ""
    shown = ", ".join(found[:_NUM_SHOWN]) + (", ..." if len(found) > _NUM_SHOWN else "")
    remedy = "accepted: the value alone"
    if imitated:
        remedy += ", and solutions that end in it after #### or in a box; train_sft.num_steps: 0 imitates no solution"
    return f"{len(found):,} of {len(problems):,} answers cannot be graded: {shown}; {remedy}"


def grades(problems: Sequence[Problem], policy: AnswerPolicy, *, imitated: bool) -> list[str]:
    """Return the verdict on each problem's solution if solutions are `imitated`, otherwise on its boxed answer.

    An answer that only its exact repetition would match cannot be graded. Its verdict is "unscorable" if the grader
    cannot read it, and "wrong" if it is a sentence whose number alone is not accepted.
    """
    solutions, bare_numbers = [], []
    for problem in problems:
        boxed = Submission(problem.answer, rf"\boxed{{{problem.answer}}}", AnswerPolicy.BOXED, problem.question)
        solution = Submission(problem.answer, problem.solution_for(policy), policy, problem.question)
        solutions.append(solution if imitated and problem.solution.strip() else boxed)
        # If the grader refuses the number without the words of the answer, only the exact text would be right.
        bare_numbers.append(replace(boxed, response=rf"\boxed{{{_number_in(problem.answer)}}}"))
    with Verifier() as verify:
        solution_grades, number_grades = verify(solutions), verify(bare_numbers)
    verdicts = []
    for problem, of_solution, of_number in zip(problems, solution_grades, number_grades, strict=True):
        is_sentence = _SENTENCE.search(_LATEX.sub(" ", problem.answer)) is not None
        is_unreadable = of_number.verdict is Verdict.UNSCORABLE
        matches_only_itself = is_unreadable or (is_sentence and of_number.verdict is Verdict.WRONG)
        verdicts.append(str(of_number.verdict if matches_only_itself else of_solution.verdict))
    return verdicts


def _number_in(answer: str) -> str:
    """Return the number in an answer; if there is none, or several, one that the grader has to call wrong."""
    numbers = _NUMBER.findall(answer)
    return numbers[0] if len(numbers) == 1 else "-31415.9"
