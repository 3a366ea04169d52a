"""A search for hacks: right answers are mutated by the thousand into texts that have to be wrong.

Mutations are wrong by how they are made: the templates of tests/grading/cases/mutations.tsv, and echoes.
"""

import json
import random
import re
from collections import Counter, defaultdict
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import pytest

from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes import CLASSES, Member, filled, framed, values_for, varied
from tests.grading.tables import SHARED, table

_NUM_MUTANTS = 1400  # of each mutator
_MAX_TRIES = 60
_KNOWN = 0.35  # share of the right answers that are taken from tables and data sets, not made
_WORDS = ("even", "odd", "Friday", "Monday", "Evelyn", "east", "ellipse", "parabola", "yes", "no", "true", "prime")
_PLAIN_NUMBER = re.compile(r"(-?)(?:([0-9]+(?:\.[0-9]+)?)|\\frac\{([0-9]+)\}\{([1-9][0-9]*)\})")
_NO_EXPRESSION = re.compile(r"[,=<>:|_%$]|\\(?:text|mbox|begin|cup|in|le|ge|pm|circ)(?![a-z])|(?<![\\a-z])[a-z]{3}")
_LETTER = re.compile(r"(?<![a-zA-Z\\])[a-df-hj-z](?![a-zA-Z])")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\[(.+?)\\\]", re.DOTALL)
_MIN_SIZE = 3  # smaller numbers are left alone by some of what is appended: 1^2 is 1, and 2! is 2
_BEHIND_A_DIGIT = re.compile(r"\{x\}(?:[.,½⅓_]|\{,\}|\{7\}|\\overline)")
_REMAINDER = re.compile(r"mod|_8|_\{9\}|base")

_TEMPLATES: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
for _mutator, _place, _answers, _template in table("mutations.tsv"):
    _TEMPLATES[_mutator].append((_place, _answers, _template))


class Right(NamedTuple):
    """A right answer to a question, and its value if it is a plain number."""

    gold: str
    question: str = ""
    number: Fraction | None = None

    @property
    def is_expression(self) -> bool:
        """Whether it is certainly a single expression that is no plain number."""
        return self.number is None and len(self.gold) > 1 and not _NO_EXPRESSION.search(self.gold)


def _right(gold: str, question: str = "") -> Right:
    match = _PLAIN_NUMBER.fullmatch(gold)
    return Right(gold, question, Fraction(match[1] + (match[2] or f"{match[3]}/{match[4]}")) if match else None)


def _in_latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return str(value) if value.denominator == 1 else rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _made(rng: random.Random) -> Right:
    """Any right answer."""
    whole = rng.randint(*rng.choice(((3, 12), (3, 99), (100, 9999), (-99, -3))))
    texts = {
        "number": str(whole),
        "decimal": f"{whole}.{rng.randint(1, 99):02}".rstrip("0"),
        "fraction": _in_latex(Fraction(whole, rng.randint(2, 30))),
        "choice": rng.choice("ABCDE"),
        "word": rf"\text{{{rng.choice(_WORDS)}}}",
    }
    (kind,) = rng.choices([*texts, "constant", "expression", "structure"], [5, 2, 2, 1, 1, 2, 3, 4])
    return _right(texts.get(kind) or filled(rng, f"<{kind}>", values_for(rng)))


@cache
def _known() -> list[Right]:
    """The golds of the tables of this folder, and those of data sets that lie beside the project."""
    rights = [_right(gold) for gold in dict.fromkeys(row[0] for row in table("answers.tsv") if row[2] == "right")]
    for name in ("math500.jsonl", "gsm8k_test.jsonl"):
        path = SHARED / "data" / name
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()):
            gold = row["answer"].rpartition("####")[2].strip().replace(",", "") if "question" in row else row["answer"]
            rights.append(_right(gold, row.get("problem") or row["question"]))
    return rights


def _mutant(mutator: str, rng: random.Random, right: Right) -> Member | None:
    """A response that is wrong by how it is made; None for an answer on which the mutator may not be wrong."""
    if mutator == "echo":
        return _echo(rng, right)
    place, answers, template = rng.choice(_TEMPLATES[mutator])
    other = _other(rng, right)
    if not _fits(template, answers, right, other):
        return None
    letter = _LETTER.search(right.gold)
    parts = {"x": right.gold, "y": other, "v": letter[0] if letter else ""}
    text = re.sub(r"\{([xyv])\}", lambda match: parts[match[1]], template)
    text = framed(rng, text) if place == "answer" else text
    is_marked = text.startswith("####") and rng.random() < 0.5
    return Member(right.gold, text, "wrong", right.question, AnswerPolicy.MARKED if is_marked else AnswerPolicy.STATED)


def _fits(template: str, answers: str, right: Right, other: str) -> bool:
    """Whether a template is for such an answer, and certainly changes it."""
    value, has_letter = right.number, _LETTER.search(right.gold) is not None
    kinds = {
        "number": value is not None and abs(value) >= _MIN_SIZE,
        "choice": re.fullmatch("[A-E]", right.gold) is not None,
        "letter": right.is_expression and has_letter,
        "constant": right.is_expression and not has_letter,
        "any": True,
    }
    if not kinds[answers] or other == right.gold:
        return False
    if value is None:
        # What separates the members of a list makes no alternative of them.
        return not ("," in right.gold or r"\cup" in right.gold) or not re.search("[,;]|maybe", template)
    if r"\approx" in template and abs((_right(other).number or value) - value) * 10 < abs(value):
        return False
    if abs(value) < 10 and _REMAINDER.search(template):  # the smallest remainder, and the same digit
        return False
    words = re.findall("[a-z]{4,}", template.partition(r"\text")[2] or template)
    if any(word.rstrip("s") in right.question for word in words):  # what is counted may be called by its name
        return False
    return not (value.denominator > 1 and _BEHIND_A_DIGIT.search(template))


def _other(rng: random.Random, right: Right) -> str:
    """Another answer of the same kind."""
    if re.fullmatch("[A-E]", right.gold):
        return rng.choice([letter for letter in "ABCDE" if letter != right.gold])
    if right.gold.startswith(r"\text"):
        return rng.choice([rf"\text{{{word}}}" for word in _WORDS if word not in right.gold])
    if right.number is not None:
        return _in_latex(right.number + rng.choice((-1, 1, 2, 3, 10)))
    kind = rng.choice(("<constant>", "<expression>") if right.is_expression else ("<structure>",))
    return filled(rng, kind, values_for(rng))


def _echo(rng: random.Random, right: Right) -> Member | None:
    """A response that repeats a formula of the question, or varies it without working it out."""
    if not right.question:
        return CLASSES["echo"](rng)
    texts = [(one or other).strip().rstrip(".,") for one, other in _FORMULA.findall(right.question)]
    plain = "".join(right.gold.split())
    if right.number in (0, 1) or any(plain in "".join(text.split()) for text in texts):
        return None  # the gold is itself in the question
    formulas = [text for text in texts if len(text) > len(plain) and _right(text).number is None]
    if not formulas:
        return None
    formula = rng.choice(formulas)
    answer = formula if "=" in formula else varied(rng, formula)
    return Member(right.gold, framed(rng, answer), "wrong", right.question)


def mutants(mutator: str) -> list[Member]:
    """Return different mutants of one mutator."""
    rng = random.Random(f"{mutator} 0")
    made: dict[Member, None] = {}
    for _ in range(_NUM_MUTANTS * _MAX_TRIES):
        right = rng.choice(_known()) if rng.random() < _KNOWN else _made(rng)
        if mutant := _mutant(mutator, rng, right):
            made[mutant] = None
        if len(made) == _NUM_MUTANTS:
            break
    return list(made)


@pytest.mark.long(minutes=4)
def test_fewer_than_one_mutant_in_a_thousand_is_right(verify: Verifier) -> None:
    """In all, and at most one in a hundred by each mutator."""
    cases = [(mutator, mutant) for mutator in (*_TEMPLATES, "echo") for mutant in mutants(mutator)]
    assert len(cases) >= 20_000
    grades = verify([Submission(each.gold, each.response, each.policy, each.question) for _, each in cases])
    accepted = [case for case, each in zip(cases, grades, strict=True) if each.verdict is Verdict.RIGHT]
    print(*accepted, sep="\n")
    assert len(accepted) * 1000 < len(cases)
    made, found = (Counter(mutator for mutator, _ in some) for some in (cases, accepted))
    assert [mutator for mutator in found if found[mutator] * 100 > made[mutator]] == []
