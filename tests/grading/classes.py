r"""Classes of responses that a rule of the grader is about: generators that make as many new members as are wanted.

Most members are made from rows of tables: answers of templates.tsv, responses of surroundings.tsv. In a template <part>
is any text of that name, and <a+b> is worked out from the numbers and letters of the member.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import comb, factorial, gcd, lcm
from typing import Any, NamedTuple

from components.shared.answer_policy import AnswerPolicy
from tests.grading.tables import table


class Member(NamedTuple):
    """A response, and the verdict that it should have."""

    gold: str
    response: str
    verdict: str
    """`right` or `wrong`."""
    question: str = ""
    policy: AnswerPolicy = AnswerPolicy.STATED


Generator = Callable[[random.Random], Member]
"""Makes a member of its class, another one at each call."""

# Numbers in words.

_SMALL = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_ONES = _SMALL.split()
_TENS = ("", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(generator: random.Random, number: int) -> str:
    """Return a whole number below a billion in words."""
    for scale, name in ((10**6, "million"), (10**3, "thousand"), (100, "hundred")):
        if number >= scale:
            many, rest = divmod(number, scale)
            count = generator.choice(("a", "one")) if many == 1 else in_words(generator, many)
            joint = " and " if rest and rest < 100 and generator.random() < 0.5 else " "
            return f"{count} {name}" + (joint + re.sub("^a ", "one ", in_words(generator, rest)) if rest else "")
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (generator.choice("- ") + _ONES[ones] if ones else "")


# Rows of tables.


class _Row(NamedTuple):
    verdict: str
    gold: str
    text: str
    """An answer, or a response where policies are given."""
    question: str = ""
    policies: str = ""


_PARTS: dict[str, list[str]] = defaultdict(list)
_ROWS: dict[str, list[_Row]] = defaultdict(list)
_TABLES = [(name, _Row(*row)) for name, *row in table("templates.tsv")]
_TABLES += [
    (name, _Row(verdict, gold, text, policies=policies))
    for name, verdict, policies, gold, text in table("surroundings.tsv")
]
for _name, _row in _TABLES:
    if _row.verdict:
        _ROWS[_name].append(_row)
    else:
        _PARTS[_name].append(_row.text)

_FUNCTIONS = ("sin", "cos", "tan", "ln", "log", "sec", "cot")
_ARITHMETIC = {"abs": abs, "round": round, "comb": comb, "factorial": factorial, "gcd": gcd, "lcm": lcm}
Values = dict[str, Any]


def values_for(rng: random.Random, text: str = "") -> Values:
    """Return the numbers and letters of a member, whose template is a text."""
    a, b = rng.sample(range(2, 500), 2)
    c, d = rng.sample(range(2, 99), 2)
    s, t = rng.sample(range(2, 10), 2)
    low, high = sorted(rng.sample(range(-30, 40), 2))
    n, o, r = a + b, rng.randint(1001, 1999), rng.choice((2, 3, 5, 7))
    big, teen, tens = rng.randint(10**3, 10**8), rng.randint(10, 19), 10 * rng.randint(2, 9)
    x, y = rng.sample("xyzt", 2)
    fn, gn = rng.sample(_FUNCTIONS, 2) if rng.random() < 0.7 else ("ln", "ln")
    m, p = rng.choice(((c, d), (f"{s}{x}", f"{t}{x}"), (rf"{s}\theta", rf"{t}\theta")))
    first, second = rng.sample("ABCDEFGH", 2)
    forms = (n, n, n, f"{n}.{s}", rf"\frac{{{n}}}{{{n + 1}}}")
    roots = (rf"{s}\sqrt{{{r}}}", rf"\frac{{{c}+\sqrt{{{r}}}}}{{{s}}}")
    return {
        **dict(zip("abcdstlhnorxy", (a, b, c, d, s, t, low, high, n, o, r, x, y), strict=True)),
        **{"n2": 2 * n + 1, "fn": fn, "gn": gn, "m": m, "p": p, "L": first, "M": second, "Fraction": Fraction},
        "v": n if "####" in text else rng.choice((rf"$\boxed{{{n}}}$", rf"\boxed{{{n}}}")),
        "g": rng.choice((*forms, rf"{a}\sqrt{{{r}}}")),
        "q": rng.choice(forms),
        "num": rng.choice((*forms, f"-{n}")),
        "w": rng.choice((n, f"-{n}.{s}", *roots, rf"{c}\pi", f"{s}{x}^2+{d}", f"{c}-{s}{x}")),
        "words": re.sub("^a ", "one ", in_words(rng, n)),
        "owords": re.sub("^a ", "one ", in_words(rng, o)),
        **{"big": big, "bigwords": in_words(rng, big), "Bigwords": in_words(rng, big).capitalize()},
        **{"teen": teen, "tens": tens},
        **{f"{name}w": in_words(rng, value) for name, value in (("s", s), ("t", t), ("teen", teen), ("tens", tens))},
    }


def filled(rng: random.Random, template: str, values: Values) -> str:
    """Return a template with its parts filled in; those with a capital letter are then the same for the values."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name in values:
            return str(values[name])
        if name in _PARTS:
            text = filled(rng, rng.choice(_PARTS[name]), values)
            if name[0].isupper():
                values[name] = text
            return text
        try:
            return str(eval(name, {"__builtins__": _ARITHMETIC}, values))
        except (NameError, SyntaxError):  # a tag, or the token of a model
            return match[0]

    return re.sub(r"<([^<>\s]+)>", part, template)


def drawn(rng: random.Random, name: str) -> tuple[_Row, Values]:
    """Return any row of a class, filled in, and the numbers and letters in it."""
    row = rng.choice(_ROWS[name])
    values = values_for(rng, row.text)
    gold, text, question = (filled(rng, each, values) for each in (row.gold, row.text, row.question))
    return row._replace(gold=gold, text=text, question=question), values


def framed(rng: random.Random, answer: str) -> str:
    """Return a response that ends in an answer."""
    return answer if answer.startswith("#### ") else filled(rng, "<frame>", {"it": answer})


def _member(name: str, rng: random.Random) -> Member:
    row, _ = drawn(rng, name)
    if row.policies:
        return Member(row.gold, row.text, row.verdict, policy=AnswerPolicy(rng.choice(row.policies.split())))
    gold, answer = row.gold, row.text
    if row.verdict.endswith("*") and rng.random() < 0.5:
        gold, answer = answer, gold
    return Member(gold, framed(rng, answer), row.verdict.rstrip("*"), row.question)


def _spoiled(name: str, rng: random.Random) -> Member:
    """A right answer of another class, where another value is expected."""
    row, values = drawn(rng, name)
    return Member(filled(rng, "<spoiled>", values | {"it": row.gold}), framed(rng, row.text), "wrong")


def task(rng: random.Random) -> tuple[str, str, str]:
    """Return a question for the value of an expression, the expression, and the value."""
    row, _ = drawn(rng, "task")
    verb = {"Verb": row.question} if row.question else {}
    return filled(rng, "<asks>", {"it": row.text} | verb), row.text, row.gold


def varied(rng: random.Random, expression: str) -> str:
    """Return an expression in another notation, with nothing of it worked out."""
    spaced = rng.choice((expression, expression.replace(" ", ""), expression.replace(" ", r"\,")))
    return filled(rng, "<varied>", {"it": spaced.replace(r"\frac", rng.choice((r"\frac", r"\dfrac")))})


def _task(verdict: str, rng: random.Random) -> Member:
    """The value of the expression of the question, or (wrong) the expression itself."""
    question, expression, gold = task(rng)
    return Member(gold, framed(rng, gold if verdict == "right" else varied(rng, expression)), verdict, question)


def _refused(name: str, rng: random.Random) -> Member:
    """Numbers of a question that are put together and not worked out, or not converted to what is asked for."""
    row, _ = drawn(rng, name)
    return Member(row.gold, framed(rng, row.text), "wrong", row.question)


def _worked_out(rng: random.Random) -> Member:
    """The answer of a word problem, also behind the expression that it is worked out from."""
    row, _ = drawn(rng, "story")
    answer = rng.choice((filled(rng, "<result>", {"it": row.gold}), f"{row.text} = {row.gold}"))
    return Member(row.gold, framed(rng, answer), "right", row.question)


def _unevaluated(rng: random.Random) -> Member:
    """A sum or a product of numbers for its value, whether or not the question is known."""
    row, _ = drawn(rng, "open")
    answer = filled(rng, "<opened>", {"it": row.text})
    return Member(row.gold, framed(rng, answer), "wrong", rng.choice(("", "How many apples are there?")))


def _converted(rng: random.Random) -> Member:
    """A number of the question as it was asked for."""
    row, _ = drawn(rng, "conversion")
    return Member(row.gold, framed(rng, row.gold), "right", row.question)


CLASSES: dict[str, Generator] = {
    **{name: partial(_member, name) for name, (row, *_) in _ROWS.items() if row.verdict.startswith(("right", "wrong"))},
    "near-misses": partial(_spoiled, "identities"),
    "formatting-of-another-answer": partial(_spoiled, "formatting"),
    "echo": partial(_task, "wrong"),
    "evaluated": partial(_task, "right"),
    "setup": partial(_refused, "story"),
    "worked-out": _worked_out,
    "unevaluated": _unevaluated,
    "unconverted": partial(_refused, "conversion"),
    "converted": _converted,
}
