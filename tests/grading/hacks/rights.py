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
    """A response that gives the answer; empty where there is none."""


@dataclass(frozen=True)
class Mutant:
    """A response, of which is known whether it gives the expected answer."""

    mutator: str
    gold: str
    response: str
    question: str = ""
    policy: AnswerPolicy = AnswerPolicy.STATED


def integer(generator: random.Random) -> int:
    """Make a whole number that is none of those which leave other numbers alone."""
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


def _term(generator: random.Random, letter: str, power: int) -> str:
    size = generator.randint(1, 12)
    factor = "" if power and size == 1 else str(size)
    return factor + (letter + (f"^{power}" if power > 1 else "") if power else "")


def polynomial(generator: random.Random, letter: str = "x") -> str:
    """Make a polynomial in one letter of degree 1 to 3."""
    degree = generator.randint(1, 3)
    powers = [degree, *(power for power in range(degree - 1, -1, -1) if generator.random() < 0.7)]
    signs = ["-" if generator.random() < 0.3 else "", *(generator.choice((" + ", " - ")) for _ in powers)]
    return "".join(sign + _term(generator, letter, power) for sign, power in zip(signs, powers, strict=False))


def constant(generator: random.Random) -> str:
    """Make a constant with roots, pi or the imaginary unit."""
    small = generator.randint(2, 9)
    root = generator.choice((2, 3, 5, 6, 7, 10, 11, 13))
    other = generator.choice((2, 3, 5, 7, 11))
    return generator.choice(
        (
            rf"{small}\sqrt{{{root}}}",
            rf"\sqrt{{{root}}}",
            rf"\frac{{\sqrt{{{root}}}}}{{{small}}}",
            rf"{small}\pi",
            rf"\frac{{{other}\pi}}{{{small * 2 + 11}}}",
            rf"{small} + {other}i",
            rf"{small} - {other}i",
            rf"{small} - {other}\sqrt{{{root}}}",
            rf"{root} + \sqrt{{{other}}}",
            rf"{small}^{{{other + 10}}}",
            rf"\frac{{{small} - \sqrt{{{root}}}}}{{{other}}}",
            rf"\ln {small}",
            rf"\sqrt[3]{{{root}}}",
            rf"{small}e^{{{other}}}",
            rf"\frac{{\pi}}{{{small}}} - {other}",
            rf"\frac{{{small}\sqrt{{{root}}} + {other}}}{{{small + other + 1}}}",
        )
    )


def expression(generator: random.Random) -> str:
    """Make an expression in one to three letters."""
    small, other = generator.randint(2, 9), generator.randint(2, 9)
    one, two, three = generator.sample("abcmnpqrtuvwxyz", 3)
    return generator.choice(
        (
            polynomial(generator, one),
            polynomial(generator),
            rf"\frac{{{polynomial(generator)}}}{{x + {small}}}",
            rf"{one}^{small}{two}",
            rf"{one} - {two}",
            rf"\frac{{{one}}}{{{two}}}",
            rf"({one} + {small})({one} - {other})",
            rf"{small}\sin {one}",
            rf"\cos^2 {one}",
            rf"\sin {one}\cos {two}",
            rf"e^{{{small}{one}}}",
            rf"{small}{one}{two} + {other}{three}",
            rf"\sqrt{{{one}^2 + {small}}}",
            rf"({one} + {two})^{small}",
            rf"{one}({two} - {three})",
            rf"\frac{{{one} + {two}}}{{{small}}}",
            rf"\ln({one} + {small})",
            rf"{small}^{one}",
            rf"\frac{{{small}{one}}}{{{one} - {other}}} + {other}",
        )
    )


def structure(generator: random.Random) -> str:
    """Make a list, set, tuple, interval, union, matrix or equation."""
    numbers = generator.sample(range(-20, 60), 4)
    low, *_, high = sorted(numbers)
    first, second, third, fourth = (
        [str(each) for each in numbers] if generator.random() < 0.6 else [number(generator).gold for _ in range(4)]
    )
    surd = constant(generator)
    return generator.choice(
        (
            f"({first}, {second})",
            f"({first}, {second}, {third})",
            f"({first}, {surd})",
            f"{first}, {second}",
            f"{first}, {second}, {third}",
            rf"\{{{first}, {second}, {third}\}}",
            f"[{low}, {high})",
            f"({low}, {high})",
            f"[{low}, {high}]",
            rf"({low}, \infty)",
            rf"(-\infty, {low}]",
            rf"(-\infty, {low}) \cup ({high}, \infty)",
            rf"[{low - 5}, {low}] \cup [{high}, {high + 7}]",
            rf"\begin{{pmatrix}} {first} & {second} \\ {third} & {fourth} \end{{pmatrix}}",
            rf"\begin{{pmatrix}} {first} \\ {second} \end{{pmatrix}}",
            f"x = {first}",
            f"y = {polynomial(generator)}",
            rf"\left( {first}, {second} \right)",
            f"{surd}, {first}",
        )
    )


WORDS = (
    "even", "odd", "Friday", "Monday", "Evelyn", "Navin", "east", "north", "ellipse", "parabola", "yes", "no", "true",
    "false", "increasing", "blue", "a rhombus", "isosceles", "Alice", "prime",
)  # fmt: skip
_UNITS = (
    "cm",
    "km",
    "m",
    "inches",
    "feet",
    "dollars",
    "hours",
    "minutes",
    "days",
    "kg",
    "apples",
    "square feet",
    "miles per hour",
    "liters",
    "cents",
    "students",
)


def _measured(generator: random.Random) -> Right:
    plain, unit = number(generator), generator.choice(_UNITS)
    return Right(rf"{plain.gold}\text{{ {unit}}}", f"How many {unit} are there?", plain.number, unit)


_KINDS: list[tuple[int, Callable[[random.Random], Right]]] = [
    (8, number),
    (2, _measured),
    (2, lambda generator: Right(constant(generator), is_expression=True)),
    (3, lambda generator: Right(expression(generator), is_expression=True)),
    (4, lambda generator: Right(structure(generator))),
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
