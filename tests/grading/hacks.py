"""A search for hacks: right answers are mutated so that a policy could earn more by them, and none should be right.

Mutations are wrong by how they are made: the templates of tests/grading/cases/mutations.tsv, and echoes.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes import filled, task, values_for, varied
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


def _filled(generator: random.Random, name: str) -> str:
    return filled(generator, name, values_for(generator))


def _measured(generator: random.Random) -> Right:
    plain, unit = number(generator), generator.choice(_UNITS)
    return Right(rf"{plain.gold}\text{{ {unit}}}", f"How many {unit} are there?", plain.number, unit)


_KINDS: list[tuple[int, Callable[[random.Random], Right]]] = [
    (8, number),
    (2, _measured),
    (2, lambda generator: Right(_filled(generator, "<constant>"), is_expression=True)),
    (3, lambda generator: Right(_filled(generator, "<expression>"), is_expression=True)),
    (4, lambda generator: Right(_filled(generator, "<structure>"))),
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


# Mutations.

_MIN_SIZE = 3
"""Smaller numbers are left alone by some of what is appended: 1^2 is 1, and 2! is 2."""
_TEMPLATES: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
for _mutator, *_template in table("mutations.tsv"):
    _TEMPLATES[_mutator].append((_template[0], _template[1], _template[2]))
PHRASES = tuple(_TEMPLATES)
_BEHIND_A_DIGIT = re.compile(r"\{x\}(?:[.,½⅓_]|\{,\}|\{7\}|\\overline)")
_REMAINDER = re.compile(r"mod|_8|_\{9\}|base")
_LETTER = re.compile(r"(?<![a-zA-Z\\])[a-df-hj-z](?![a-zA-Z])")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\[(.+?)\\\]", re.DOTALL)


def phrased(mutator: str, generator: random.Random, right: Right) -> Mutant | None:
    """Return a response that is wrong by how it is made; None for an answer on which the mutator may not be wrong."""
    place, answers, template = generator.choice(_TEMPLATES[mutator])
    other = _other(generator, right)
    letter = _LETTER.search(right.gold)
    if not _fits(template, answers, right, other):
        return None
    parts = {"x": right.gold, "y": other, "v": letter[0] if letter else ""}
    text = re.sub(r"\{([xyv])\}", lambda match: parts[match[1]], template)
    if place == "answer":
        text, policy = framed(generator, text)
    else:
        policy = AnswerPolicy.MARKED if text.startswith("####") and generator.random() < 0.5 else AnswerPolicy.STATED
    return Mutant(mutator, right.gold, text, right.question, policy)


def _fits(template: str, answers: str, right: Right, other: str) -> bool:
    """Whether a template is for such an answer, and certainly changes it."""
    value = right.number
    is_plain = value is not None and not right.unit
    kinds = {
        "number": is_plain and abs(value or Fraction(0)) >= Fraction(_MIN_SIZE),
        "choice": re.fullmatch("[A-E]", right.gold) is not None,
        "letter": right.is_expression and _LETTER.search(right.gold) is not None,
        "constant": right.is_expression and not is_plain and _LETTER.search(right.gold) is None,
        "any": True,
    }
    if not kinds[answers] or other == right.gold:
        return False
    if value is None:
        # What separates the members of a list makes no alternative of them.
        return not ("," in right.gold or r"\cup" in right.gold) or not re.search("[,;]|maybe", template)
    if r"\approx" in template and abs((plain_number(other) or value) - value) * 10 < abs(value):
        return False
    if abs(value) < 10 and _REMAINDER.search(template):  # the smallest remainder, and the same digit
        return False
    words = re.findall("[a-z]{4,}", template.partition(r"\text")[2] or template)
    if any(word.rstrip("s") in right.question for word in words):  # what is counted may be called by its name
        return False
    return not (value.denominator > 1 and _BEHIND_A_DIGIT.search(template))


def _other(generator: random.Random, right: Right) -> str:
    """Another answer of the same kind."""
    if re.fullmatch("[A-E]", right.gold):
        return generator.choice([letter for letter in "ABCDE" if letter != right.gold])
    if right.words:
        return generator.choice([rf"\text{{{word}}}" for word in WORDS if word not in right.gold])
    if right.number is not None and not right.unit:
        return latex_of(right.number + generator.choice((-1, 1, 2, 3, 10)))
    kind = generator.choice(("<constant>", "<expression>") if right.is_expression else ("<structure>",))
    return filled(generator, kind, values_for(generator))


# Questions, and what repeats them.


def echo(generator: random.Random, right: Right) -> Mutant | None:
    """Return a response that repeats a formula of the question, or varies it without working it out."""
    if right.question and right.solution:
        formulas = echoes_of(right.gold, right.question)
        if not formulas:
            return None
        question, gold, formula = right.question, right.gold, generator.choice(formulas)
    else:
        question, formula, gold = task(generator)
    answer = formula if "=" in formula else varied(generator, formula)
    response, policy = framed(generator, answer)
    return Mutant("echo", gold, response, question, policy)


def echoes_of(gold: str, question: str) -> list[str]:
    """Return the formulas of a question that are more than a number; none where the gold itself is in one."""
    texts = [(one or other).strip().rstrip(".,") for one, other in _FORMULA.findall(question)]
    plain = "".join(gold.split())
    if plain_number(gold) in (0, 1) or any(plain in "".join(text.split()) for text in texts):
        return []
    return [text for text in texts if len(text) > len(plain) and plain_number(text) is None]
