"""Mutations that are wrong by how they are made: the templates of tests/grading/cases/mutations.tsv, and echoes."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from math import comb, factorial

from components.shared.answer_policy import AnswerPolicy
from tests.grading.hacks.meaning import agree, read
from tests.grading.hacks.rewrites import REWRITES, is_other
from tests.grading.hacks.rights import WORDS, Mutant, Right, framed, latex_of, plain_number, spelled
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
    parts = {"x": right.gold, "y": other or "", "v": letter[0] if letter else ""}
    text = re.sub(r"\{([xyv])\}", lambda match: parts[match[1]], template)
    if place == "answer":
        text, policy = framed(generator, text)
    else:
        policy = AnswerPolicy.MARKED if text.startswith("####") and generator.random() < 0.5 else AnswerPolicy.STATED
    return Mutant(mutator, right.gold, text, right.question, policy)


def _fits(template: str, answers: str, right: Right, other: str | None) -> bool:
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
    if not kinds[answers] or (other is None and "{y}" in template) or other == right.gold:
        return False
    if value is None:
        # What separates the members of a list makes no alternative of them.
        return not ("," in right.gold or r"\cup" in right.gold) or not re.search("[,;]|maybe", template)
    if r"\approx" in template and abs((plain_number(other or "") or value) - value) * 10 < abs(value):
        return False
    if abs(value) < 10 and _REMAINDER.search(template):  # the smallest remainder, and the same digit
        return False
    words = re.findall("[a-z]{4,}", template.partition(r"\text")[2] or template)
    if any(word.rstrip("s") in right.question for word in words):  # what is counted may be called by its name
        return False
    return not (value.denominator > 1 and _BEHIND_A_DIGIT.search(template))


def _other(generator: random.Random, right: Right) -> str | None:
    """Another answer of the same kind."""
    if re.fullmatch("[A-E]", right.gold):
        return generator.choice([letter for letter in "ABCDE" if letter != right.gold])
    if right.words:
        return generator.choice([rf"\text{{{word}}}" for word in WORDS if word not in right.gold])
    if right.number is not None and not right.unit:
        return latex_of(right.number + generator.choice((-1, 1, 2, 3, 10)))
    text = right.gold.partition(r"\text")[0]
    for _ in range(8):
        other = text and REWRITES[generator.choice(("change-digit", "other-answer"))](generator, text)
        if other and is_other(text, other):
            return other
    return None


# Numbers in words, and units.

_OTHER_UNITS = {
    "cm": ("m", "km", "kg", "cm^2"), "km": ("m", "cm", "hours"), "m": ("km", "mm", "m^2", "kg"), "kg": ("g", "m", "mg"),
    "inches": ("feet", "yards", "square inches"), "feet": ("inches", "miles", "square feet"),
    "dollars": ("cents", "euros", "percent"), "hours": ("minutes", "days", "miles"), "days": ("weeks", "hours"),
    "minutes": ("seconds", "hours", "degrees"), "liters": ("ml", "kg", "meters"), "cents": ("dollars", "percent"),
    "square feet": ("feet", "cubic feet", "square inches"), "students": ("percent", "dozen students"),
    "miles per hour": ("miles", "km per hour", "feet per second"), "apples": ("dozen apples", "dollars", "half apples"),
}  # fmt: skip


def other_unit(generator: random.Random, right: Right) -> Mutant | None:
    """Return the number of the gold in another unit."""
    if not right.unit or not right.number:
        return None
    unit = generator.choice(_OTHER_UNITS[right.unit])
    value = latex_of(right.number)
    answer = generator.choice((rf"{value}\text{{ {unit}}}", rf"{value} \mathrm{{{unit}}}", f"{value} {unit}"))
    if "^" in unit:
        answer = rf"{value}\text{{ {unit[:-2]}}}{unit[-2:]}"
    response, policy = framed(generator, answer)
    return Mutant("other-unit", right.gold, response, right.question, policy)


def other_number_in_words(generator: random.Random, right: Right) -> Mutant | None:
    """Return another number in words, or words that are no number though their sum or product is."""
    value = right.number
    if value is None or value.denominator > 1 or not 3 <= value < 1000 or right.unit:
        return None
    number = int(value)
    part = generator.randint(1, min(number - 1, 9))
    digits = str(number)
    wrong = [
        spelled(number + generator.choice((-1, 1, 10, 100))),
        spelled(int(digits[::-1])) if int(digits[::-1]) != number else "zero",
        f"{spelled(part)}-{spelled(number - part)}" if number - part < 20 else f"{spelled(number)}-{spelled(part)}",
        f"{spelled(number)} million", f"{spelled(number)} or {spelled(number + 1)}",
        f"minus {spelled(number)}", f"not {spelled(number)}",
        f"{spelled(number)} hundredths", f"{spelled(number)} dozen", f"twice {spelled(number)}",
        f"{spelled(number)} point five", f"{spelled(number)} and a half", f"half of {spelled(number)}",
        f"{spelled(number)} squared", f"{spelled(number)} tenths", f"{spelled(part)} plus {spelled(number)}",
    ]  # fmt: skip
    words = generator.choice(wrong)
    if any(word.rstrip("s") in right.question for word in words.split()[1:]):
        return None
    answer = generator.choice((words, rf"\text{{{words}}}"))
    response, policy = framed(generator, answer)
    return Mutant("other-number-in-words", right.gold, response, right.question, policy)


# Questions, and what repeats them.


def echo(generator: random.Random, right: Right) -> Mutant | None:
    """Return a response that repeats a formula of the question, or varies it without working it out."""
    if right.question and right.solution:
        formulas = list(echoes_of(right.gold, right.question))
        if not formulas:
            return None
        question, gold, formula = right.question, right.gold, generator.choice(formulas)
    else:
        question, formula, gold = _problem(generator)
    answer = generator.choice((
        "{f}", "({f})", "{f} + 0", r"1 \cdot ({f})", "{f}", r"\left({f}\right)", "-(-({f}))", "x = {f}", r"{f} \cdot 1",
        r"0 + {f}", r"\,{f}", r"\displaystyle {f}", r"1({f})", r"{f} - 0", r"\frac{{f}}{1}", "({f})^1", "(({f}))",
    )).replace("{f}", formula)  # fmt: skip
    if "=" in formula or (r"\cdot 1" in answer and re.search("[-+]", formula)):
        answer = formula
    response, policy = framed(generator, answer)
    return Mutant("echo", gold, response, question, policy)


def _problem(generator: random.Random) -> tuple[str, str, str]:
    """A question, its formula, and the answer."""
    a, b, c = (generator.randint(12, 99) for _ in range(3))
    p, q = generator.randint(2, 9), generator.randint(2, 9)
    formula, gold = generator.choice((
        (rf"{a} + {b}", a + b), (rf"{a} \cdot {b}", a * b), (rf"{a} \times {b} - {c}", a * b - c),
        (rf"{a}^2 - {b}^2", a * a - b * b), (rf"{p}^{q}", p**q), (rf"({a} - {b}) \cdot {c}", (a - b) * c),
        (rf"{a}({b} + {c})", a * (b + c)), (rf"\sqrt{{{a * a}}}", a), (rf"\frac{{{a * p}}}{{{p}}}", a),
        (rf"\frac{{{a}}}{{{p}}} + \frac{{{b}}}{{{q + 10}}}", latex_of(Fraction(a, p) + Fraction(b, q + 10))),
        (f"{p + 1}!", factorial(p + 1)), (rf"\binom{{{q + 6}}}{{3}}", comb(q + 6, 3)),
        (rf"{a} + {b} \cdot {c}", a + b * c),
        (rf"\log_{{{p}}} {p**q}", q), (rf"(x + {p})(x + {q})", rf"x^2 + {p + q}x + {p * q}"),
        (rf"(x - {p})^2", rf"x^2 - {2 * p}x + {p * p}"), (rf"x^2 + {p + q}x + {p * q}", rf"(x + {p})(x + {q})"),
        (rf"\sqrt{{{p * p * 7}}}", rf"{p}\sqrt{{7}}"), (rf"{p}(x + {q}) + {a}x", rf"{p + a}x + {p * q}"),
    ))  # fmt: skip
    tasks = ("Expand",) if "(x" in formula else ("Factor",) if formula[0] == "x" else ("Compute", "Evaluate", "What is")
    return f"{generator.choice(tasks)} ${formula}$.", formula, str(gold)


def echoes_of(gold: str, question: str) -> Iterator[str]:
    """Yield the formulas of a question that have the value of the gold; none where the gold itself stands there."""
    expected = read(gold)
    texts = [(one or other).strip().rstrip(".,") for one, other in _FORMULA.findall(question)]
    plain = "".join(gold.split())
    if expected is None or plain_number(gold) in (0, 1) or any(plain in "".join(text.split()) for text in texts):
        return
    for text in texts:
        value = read(text)
        if value and agree(expected, value) and len(text) > len(plain):
            yield text
