"""Mutations that are wrong by how they are made: the templates of tests/grading/cases/mutations.tsv, and echoes."""

import random
import re
from collections import defaultdict
from fractions import Fraction

from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes.templates import filled, task, values_for, varied
from tests.grading.hacks.rights import WORDS, Mutant, Right, framed, latex_of, plain_number
from tests.grading.tables import table

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
