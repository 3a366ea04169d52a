"""Right answers: made at random, and taken from tables and data sets."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes.templates import filled, values_for
from tests.grading.tables import table


@dataclass(frozen=True)
class Right:
    """A right answer to a question."""

    gold: str
    question: str = ""
    number: Fraction | None = None
    """Its value, where it is a plain number."""
    unit: str = ""
    """What follows the number in the gold, as text."""
    words: bool = False
    """Whether it is no mathematics."""
    is_expression: bool = False
    """Whether it is certainly a single expression that is no plain number."""
    solution: str = ""
    """A response that gives the answer; empty without one."""


@dataclass(frozen=True)
class Mutant:
    """A response, of which is known whether it gives the expected answer."""

    mutator: str
    gold: str
    response: str
    question: str = ""
    policy: AnswerPolicy = AnswerPolicy.STATED


def integer(generator: random.Random) -> int:
    """Make a whole number other than 0, 1, 2 and their negatives, which leave some numbers unchanged."""
    return generator.randint(*generator.choice(((3, 12), (3, 99), (100, 9999), (-99, -3))))


def number(generator: random.Random) -> Right:
    """Make a number: whole, decimal or a fraction."""
    kind = generator.randrange(5)
    whole = integer(generator)
    if kind <= 2:
        return Right(str(whole), number=Fraction(whole))
    if kind == 3:
        text = f"{whole}.{generator.randint(1, 99):02}".rstrip("0")
        return Right(text, number=Fraction(text))
    value = Fraction(whole, generator.randint(2, 30))
    return Right(latex_of(value), number=value)


def latex_of(value: Fraction) -> str:
    """Return a whole number or a fraction in LaTeX."""
    if value.denominator == 1:
        return str(value)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def plain_number(latex: str) -> Fraction | None:
    """Return the value of a whole number, decimal or fraction; None for anything else."""
    if re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", latex):
        return Fraction(latex)
    match = re.fullmatch(r"(-?)\\frac\{([0-9]+)\}\{([1-9][0-9]*)\}", latex)
    return Fraction(int(match[1] + match[2]), int(match[3])) if match else None


WORDS = (
    "even", "odd", "Friday", "Monday", "Evelyn", "Navin", "east", "north", "ellipse", "parabola", "yes", "no", "true",
    "false", "increasing", "blue", "a rhombus", "isosceles", "Alice", "prime",
)  # fmt: skip
_UNITS = (
    "cm", "km", "m", "inches", "feet", "dollars", "hours", "minutes", "days", "kg", "apples", "square feet",
    "miles per hour", "liters", "cents", "students",
)  # fmt: skip


def _template(generator: random.Random, name: str) -> str:
    return filled(generator, name, values_for(generator))


def _measured(generator: random.Random) -> Right:
    plain, unit = number(generator), generator.choice(_UNITS)
    return Right(rf"{plain.gold}\text{{ {unit}}}", f"How many {unit} are there?", plain.number, unit)


_KINDS: list[tuple[int, Callable[[random.Random], Right]]] = [
    (8, number),
    (2, _measured),
    (2, lambda generator: Right(_template(generator, "<constant>"), is_expression=True)),
    (3, lambda generator: Right(_template(generator, "<expression>"), is_expression=True)),
    (4, lambda generator: Right(_template(generator, "<structure>"))),
    (1, lambda generator: Right(generator.choice("ABCDE"), "Which of (A), (B), (C), (D), (E) holds?", words=True)),
    (1, lambda generator: Right(rf"\text{{{generator.choice(WORDS)}}}", words=True)),
]


def any_right(generator: random.Random) -> Right:
    """Make any right answer."""
    ((_, make),) = generator.choices(_KINDS, [weight for weight, _ in _KINDS])
    return make(generator)


# Where an answer stands.

_FRAMES = [
    (r"\boxed{{{x}}}", None),
    (r"So the answer is $\boxed{{{x}}}$.", None),
    ("Adding up gives the result.\n\n\\[\\boxed{{{x}}}\\]", None),
    ("#### {x}", AnswerPolicy.MARKED),
    ("We compute.\n#### {x}", None),
    ("The answer is ${x}$.", None),
    ("The final answer is ${x}$. I hope it is correct.", None),
    ("**Answer:** ${x}$", None),
    (r"Hence $x = \boxed{{{x}}}$", None),
]


def framed(generator: random.Random, answer: str) -> tuple[str, AnswerPolicy]:
    """Put an answer where a response states it."""
    frame, policy = generator.choice(_FRAMES[:3] if "=" in answer else _FRAMES)
    return frame.format(x=answer), policy or AnswerPolicy.STATED


# Answers of tables and data sets.

_NO_EXPRESSION = re.compile(r"[,=<>:|_%$]|\\(?:text|mbox|begin|cup|in|le|ge|pm|circ)(?![a-z])|(?<![\\a-z])[a-z]{3}")

_SHARED = Path("../shared/data")


@cache
def known_rights() -> list[Right]:
    """Return the golds of the tables of this folder, and those of data sets that lie beside the project."""
    golds = dict.fromkeys(gold for gold, _, verdict, _ in table("answers.tsv") if verdict == "right")
    rights = [_right(gold) for gold in golds]
    for path, answer in (("math500.jsonl", "answer"), ("gsm8k_test.jsonl", "answer")):
        file = _SHARED / path
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for row in map(json.loads, lines):
            gold = row[answer].rpartition("####")[2].strip().replace(",", "") if "question" in row else row[answer]
            question = row.get("problem") or row["question"]
            rights.append(_right(gold, question, row.get("solution") or row["answer"]))
    return rights


def _right(gold: str, question: str = "", solution: str = "") -> Right:
    value = plain_number(gold)
    return Right(
        gold, question, value, "", False, value is None and len(gold) > 1 and not _NO_EXPRESSION.search(gold), solution
    )
