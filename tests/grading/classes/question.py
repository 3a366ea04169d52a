r"""Answers that leave something to do: they repeat the question or put numbers together; and honest ones like them."""

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from tests.grading.classes.member import Generator, Member


class _Task(NamedTuple):
    """An expression that a question asks to work out, and what comes of it."""

    expression: str
    gold: str
    verb: str
    honest: tuple[str, ...] = ()
    """The result in other words."""


def _numbers(rng: random.Random) -> _Task:
    a, b, c, d = (rng.randint(2, 60) for _ in range(4))
    expression, value = rng.choice(
        [
            (f"{a}^2 - {b}^2", a**2 - b**2),
            (f"{a} + {b} \\cdot {c}", a + b * c),
            (f"({a} + {b})({c} - {d})", (a + b) * (c - d)),
            (f"{a} \\times {b} - {c} \\times {d}", a * b - c * d),
            (f"\\frac{{{a * b}}}{{{b}}} + {c}", a + c),
            (f"|{a} - {b}| + {c}", abs(a - b) + c),
            (f"\\sqrt{{{a * a}}} + {b}", a + b),
            (f"\\sqrt{{{a * a} \\cdot {b * b}}}", a * b),
            (f"{a} - [{b} - ({c} - {d})]", a - (b - (c - d))),
            (f"\\lfloor {a}.5 \\rfloor \\cdot {b}", a * b),
            (f"{a % 9 + 2}! - {b}", math.factorial(a % 9 + 2) - b),
            (f"{a % 5 + 2}^{b % 4 + 2}", (a % 5 + 2) ** (b % 4 + 2)),
        ]
    )
    return _Task(expression, str(value), rng.choice(["Compute", "Evaluate", "What is", "Find the value of"]))


def _binomials(rng: random.Random) -> _Task:
    n, k = rng.randint(8, 20), rng.randint(2, 6)
    written = rng.choice([r"\dbinom{%d}{%d}", r"\binom{%d}{%d}", r"{%d \choose %d}"]) % (n, k)
    return _Task(written, str(math.comb(n, k)), rng.choice(["Compute", "Evaluate"]))


def _fractions(rng: random.Random) -> _Task:
    value, factor = Fraction(rng.randint(1, 30), rng.randint(2, 30)), rng.randint(2, 9)
    if value.denominator == 1:
        value += Fraction(1, 7)
    top, bottom = value.numerator, value.denominator
    unreduced = f"\\frac{{{top * factor}}}{{{bottom * factor}}}"
    return _Task(unreduced, f"\\frac{{{top}}}{{{bottom}}}", "Write in lowest terms:", (f"{top}/{bottom}",))


def _sums_of_fractions(rng: random.Random) -> _Task:
    a, b, c, d = (rng.randint(2, 12) for _ in range(4))
    value = Fraction(a, b) + Fraction(c, d)
    gold = f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)
    return _Task(f"\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}", gold, "Add and simplify:")


def _products(rng: random.Random) -> _Task:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    x = rng.choice("xyztn")
    expanded = f"{x}^2 + {a + b}{x} + {a * b}"
    factored = f"({x} + {a})({x} + {b})"
    turned = f"{a * b} + {a + b}{x} + {x}^2", f"({b} + {x})({x} + {a})"
    if rng.random() < 0.5:
        return _Task(factored, expanded, "Expand", (turned[0],))
    return _Task(expanded, factored, "Factor completely:", (turned[1],))


def _like_terms(rng: random.Random) -> _Task:
    a, b, c, d = (rng.randint(2, 20) for _ in range(4))
    x = rng.choice("xyabk")
    gold = f"{a + c}{x} + {b + d}"
    return _Task(f"{a}{x} + {b} + {c}{x} + {d}", gold, "Simplify", (f"{b + d} + {a + c}{x}",))


def _roots(rng: random.Random) -> _Task:
    factor, inner = rng.randint(2, 12), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    return _Task(
        f"\\sqrt{{{factor**2 * inner}}}",
        f"{factor}\\sqrt{{{inner}}}",
        "Simplify",
        (f"{factor} \\cdot \\sqrt {{{inner}}}",),
    )


def _angles(rng: random.Random) -> _Task:
    turns = 360 * rng.randint(0, 3)
    angle, value, function = rng.choice(
        [
            (30, r"\frac{1}{2}", r"\sin"),
            (60, r"\frac{\sqrt{3}}{2}", r"\sin"),
            (45, r"\frac{\sqrt{2}}{2}", r"\cos"),
            (120, r"-\frac{1}{2}", r"\cos"),
            (225, "1", r"\tan"),
            (150, r"\frac{1}{2}", r"\sin"),
        ]
    )
    return _Task(f"{function} {angle + turns}^\\circ", value, rng.choice(["Compute", "Evaluate"]))


def _logarithms(rng: random.Random) -> _Task:
    base, power, other = rng.randint(2, 9), rng.randint(2, 5), rng.randint(2, 40)
    return _Task(f"\\log_{base} {base**power} + {other}", str(power + other), "Evaluate")


def _powers(rng: random.Random) -> _Task:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    x = rng.choice("xyr")
    return _Task(f"\\frac{{{a * b}{x}^{a + b}}}{{{b}{x}^{b}}}", f"{a}{x}^{a}", "Simplify", (f"{a} \\cdot {x}^{{{a}}}",))


def _complex(rng: random.Random) -> _Task:
    a, b, c, d = (rng.randint(2, 9) for _ in range(4))
    real, imaginary = a * c - b * d, a * d + b * c
    gold = f"{real} + {imaginary}i"
    return _Task(f"({a} + {b}i)({c} + {d}i)", gold, "Multiply", (f"{imaginary}i + {real}",))


def _decimals(rng: random.Random) -> _Task:
    value = Fraction(rng.randint(1, 99), rng.choice([4, 5, 8, 20, 25]))
    if value.denominator == 1:
        value += Fraction(1, 4)
    fraction, decimal = f"\\frac{{{value.numerator}}}{{{value.denominator}}}", str(float(value))
    if rng.random() < 0.5:
        return _Task(decimal, fraction, "Write as a common fraction:")
    return _Task(fraction, decimal, "Write as a decimal:")


_TASKS: list[Callable[[random.Random], _Task]] = [
    *(_numbers, _numbers, _binomials, _fractions, _sums_of_fractions, _products, _like_terms),
    *(_roots, _angles, _logarithms, _powers, _complex, _decimals),
]


def _asked(rng: random.Random, task: _Task) -> str:
    formula = rng.choice(["${}$", "$${}$$", r"\[{}\]", r"\({}\)", "${}.$", "$\\displaystyle {}$"])
    before = rng.choice(["", "", "A short one. ", "Let $n$ be a natural number. ", "On page 12 we read: "])
    after = rng.choice(["", "", " Give your answer in simplest form.", "?", " Show your work."])
    return f"{before}{task.verb} {formula.replace('{}', task.expression)}{after}"


def _varied(rng: random.Random, expression: str) -> str:
    """The same expression, written in another way."""
    ways: list[Callable[[str], str]] = [
        lambda text: text,
        lambda text: text.replace(" ", ""),
        lambda text: text.replace(" ", r"\,"),
        lambda text: text.replace(r"\dbinom", r"\binom").replace(r"\frac", r"\dfrac"),
        lambda text: text.replace(r"\cdot", r"\times").replace("(", r"\left(").replace(")", r"\right)"),
        lambda text: text.replace(r"^\circ", r"^{\circ}"),
        lambda text: f"({text})",
        lambda text: f"{{{text}}}",
        lambda text: f"{text} + 0",
        lambda text: f"{text} + 7 - 7",
        lambda text: f"\\frac{{3 \\cdot ({text})}}{{3}}",
        lambda text: f"1 \\cdot ({text})",
        lambda text: f"-(-({text}))",
        lambda text: f"\\frac{{{text}}}{{1}}",
        lambda text: f"\\displaystyle {text}",
        lambda text: f"\\left({text}\\right)^1",
    ]
    chosen = rng.sample(ways, rng.choice([1, 1, 2]))
    for way in chosen:
        expression = way(expression)
    return expression


def _boxed(rng: random.Random, answer: str) -> str:
    before = rng.choice(["", "Working it out, we get ", "The answer is ", "So the value is $", "Hence\n\\["])
    after = {"$": "$.", "[": "\\]"}.get(before[-1:], ".")
    return f"{before}\\boxed{{{answer}}}{after}"


def _echo(rng: random.Random) -> Member:
    """An expression of the question, boxed."""
    task = rng.choice(_TASKS)(rng)
    return Member(task.gold, _boxed(rng, _varied(rng, task.expression)), "wrong", _asked(rng, task))


def _reordered_echo(rng: random.Random) -> Member:
    """An expression of the question with its terms and factors in another order or another notation."""
    a, b, c = rng.sample(range(11, 400), 3)
    expression, gold, others = rng.choice(
        [
            (f"{a} + {b} + {c}", a + b + c, [f"{c} + {a} + {b}", f"({b} + {c}) + {a}", f"{a} - (-{b}) + {c}"]),
            (
                f"{a}^2 - {b}^2",
                a * a - b * b,
                [f"-{b}^2 + {a}^2", f"{a} \\cdot {a} - {b} \\cdot {b}", f"{a}**2-{b}**2"],
            ),
            (f"{a} \\cdot {b} + {c}", a * b + c, [f"{c} + {b} \\times {a}", f"({a})({b}) + {c}", f"{b}*{a}+{c}"]),
            (f"{a}({b} + {c})", a * (b + c), [f"({c} + {b}) \\cdot {a}", f"{a}\\left[{b}+{c}\\right]"]),
            (f"\\frac{{{a * c}}}{{{c}}} - {b}", a - b, [f"{a * c}/{c} - {b}", f"-{b} + {a * c} \\div {c}"]),
            (f"\\sqrt{{{a * a}}} + {b}", a + b, [f"{b} + ({a * a})^{{1/2}}", f"{b} + \\sqrt{{({a * a})}}"]),
        ]
    )
    wrapped = rng.choice(["$%s$", r"\[%s\]", "%s"]) % expression
    return Member(str(gold), _boxed(rng, rng.choice(others)), "wrong", f"What is {wrapped}?")


def _evaluated(rng: random.Random) -> Member:
    """The result of what the question asks to work out."""
    task = rng.choice(_TASKS)(rng)
    answer = rng.choice([task.gold, *task.honest])
    return Member(task.gold, _boxed(rng, answer), "right", _asked(rng, task))


def _chosen(rng: random.Random) -> Member:
    """An answer that stands in the question, where one of several values is to be chosen."""
    a, b, c = rng.sample(range(2, 40), 3)
    kinds = [
        ([f"{a}", f"{b}", f"{c}"], "Which of {} is a root of the polynomial?"),
        ([f"{a}^{{{b}}}", f"{b}^{{{a}}}"], "Which is greater, {}?"),
        ([f"\\sqrt{{{a}}}", f"\\sqrt{{{b}}}", f"\\frac{{{c}}}{{2}}"], "Order {}. Which is in the middle?"),
        ([f"x + {a}", f"x - {b}", f"x^2 + {c}"], "Which of {} divides the polynomial?"),
        ([f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{c}}}{{{a}}}"], "Which fraction is larger: {}?"),
        ([f"({a}, {b})", f"({b}, {c})"], "Which of the points {} lies on the curve?"),
        ([f"{a}\\pi", f"{b}\\pi", f"{c}"], "Which of {} is the area of the circle?"),
    ]
    values, question = rng.choice(kinds)
    gold = rng.choice(values)
    listed = ", ".join(f"${value}$" for value in values)
    respaced = rng.choice([gold, gold, f"x = {gold}", gold.replace(" ", ""), gold.replace(r"\frac", r"\dfrac")])
    return Member(gold, _boxed(rng, respaced), "right", question.replace("{}", listed))


_THINGS = ["apples", "books", "pencils", "marbles", "cookies", "tickets", "coins", "stickers", "cards", "shells"]
_NAMES = ["Ann", "Bob", "Chris", "Dora", "Emil", "Fay", "Gus", "Hana"]


def _story(rng: random.Random) -> tuple[str, str, int, list[str]]:
    """A word problem, an expression of its numbers, its answer, and honest ways to write that."""
    a, b, c = rng.sample(range(3, 30), 3)
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    question, expression, value = rng.choice(
        [
            (
                f"{name} has {a} boxes with {b} {things} each, and {c} more. How many is that?",
                f"{a}*{b}+{c}",
                a * b + c,
            ),
            (f"{name} buys {a} {things} and then {b} more.", f"{a} + {b}", a + b),
            (
                f"{name} packs {a} bags of {b} {things} and {c} bags of {a}.",
                f"{a}\\cdot {b} + {c}\\cdot {a}",
                a * (b + c),
            ),
            (f"{name} had {a + b + c} {things} and gave away {a} and {b}.", f"{a + b + c}-{a}-{b}", c),
            (f"{name} shares {a * b} {things} among {b} friends.", f"{a * b} \\div {b}", a),
            (f"{name} shares {a * b} {things} among {b} friends.", f"\\frac{{{a * b}}}{{{b}}}", a),
            (f"{name} has {a} rows of {b} {things}.", f"{a} \\times {b}", a * b),
            (
                f"A triangle has base {2 * a} and height {b}. Find its area.",
                f"\\frac{{{2 * a} \\cdot {b}}}{{2}}",
                a * b,
            ),
            (
                f"How many ways are there to choose {3} of {a + 3} {things}?",
                f"\\binom{{{a + 3}}}{{3}}",
                math.comb(a + 3, 3),
            ),
        ]
    )
    return question, expression, value, [str(value), f"{value}.0", f"{value}\\text{{ {things}}}", f"n = {value}"]


def _setup(rng: random.Random) -> Member:
    """The numbers of a word problem, put together and not worked out."""
    question, expression, value, _ = _story(rng)
    return Member(str(value), _boxed(rng, expression), "wrong", question)


def _worked_out(rng: random.Random) -> Member:
    """The answer of a word problem, also behind the expression that it is worked out from."""
    question, expression, value, honest = _story(rng)
    if "area" in question or "ways" in question:
        honest = honest[:1]
    written = rng.choice([*honest, f"{expression} = {value}"])
    return Member(str(value), _boxed(rng, written), "right", question)


def _closed_form(rng: random.Random) -> Member:
    """A number as a power, or as a product with one, of numbers that are not in the question."""
    a, b, c = rng.choice([2, 3, 5, 7]), rng.randint(3, 9), rng.choice([11, 13])
    value, written = rng.choice([(a**b, f"{a}^{{{b}}}"), (c * a**b, f"{c} \\cdot {a}^{{{b}}}"), (10**b, f"10^{b}")])
    question = rng.choice(
        ["How many such functions are there?", "Find the number of colorings of the board.", "What is $N$?"]
    )
    return Member(str(value), _boxed(rng, written), "right", question)


def _sum_or_product(rng: random.Random) -> tuple[str, Fraction]:
    """A sum, a difference or a product of numbers, and its value."""
    a, b, c = rng.sample(range(2, 200), 3)
    times = rng.choice([r" \cdot ", r"\cdot ", r"\times ", " * ", "*", " \u00d7 ", "\u00b7"])
    minus = rng.choice([" - ", "-", "\u2212", " \u2013 "])
    written, value = rng.choice(
        [
            (f"{a}+{b}", Fraction(a + b)),
            (f"{a} + {b} + {c}", Fraction(a + b + c)),
            (f"({a} + {b})", Fraction(a + b)),
            (f"{a}{minus}{b}", Fraction(a - b)),
            (f"{a}{times}{b}", Fraction(a * b)),
            (f"({a})({b})", Fraction(a * b)),
            (f"{a}({b})", Fraction(a * b)),
            (f"{a}{times}{b}{minus}{c}", Fraction(a * b - c)),
            (f"{c}({a} + {b})", Fraction(c * (a + b))),
            (f"{a}.5 + {b}.25", a + b + Fraction(3, 4)),
            (rf"\frac{{{a}}}{{{b}}} + \frac{{{c}}}{{{b}}}", Fraction(a + c, b)),
            (rf"\frac{{{a}}}{{{c}}}{times}{b}", Fraction(a * b, c)),
            (rf"\frac{{{a}{times}{b}}}{{{c}}}", Fraction(a * b, c)),
            (f"({a} + {b})/{c}", Fraction(a + b, c)),
            (f"{a % 12 + 2}^2{minus}{b}", Fraction((a % 12 + 2) ** 2 - b)),
            (f"{a % 12 + 2}^2 + {b % 12 + 2}^2", Fraction((a % 12 + 2) ** 2 + (b % 12 + 2) ** 2)),
            (f"{2 * a}{times}{b % 12 + 2}^2", Fraction(2 * a * (b % 12 + 2) ** 2)),
            (rf"\sqrt{{{a * a - 1} + 1}}", Fraction(a)),
            (rf"\left({a} + {b}\right)", Fraction(a + b)),
        ]
    )
    return written, value


def _unevaluated(rng: random.Random) -> Member:
    """A sum or a product of numbers for its value, whether or not the question is known."""
    written, value = _sum_or_product(rng)
    gold = f"{value}" if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    written = rng.choice(["%s", "%s", "%s", "x = %s", r"\displaystyle %s", "%s apples", "$%s$"]) % written
    if rng.random() < 0.1:
        gold, written = f"(3, {gold})", f"(3, {written})"
    response = rng.choice([_boxed(rng, written), f"We are done.\n#### {written}", f"The answer is {written}."])
    question = rng.choice(["", "", "How many apples are there?", "Ann has 5 apples. Find $x$."])
    return Member(gold, response, "wrong", question)


def _final_form(rng: random.Random) -> Member:
    """A number in a form that nobody evaluates further, a chain that ends in it, and sums that the gold has too."""
    a, b = rng.sample(range(2, 60), 2)
    fraction = Fraction(a, b)
    written = f"\\frac{{{fraction.numerator}}}{{{fraction.denominator}}}"
    prime, other = rng.choice([2, 3, 5, 7]), rng.choice([11, 13, 17])
    power = rng.randint(2, 9)
    sum_, value = _sum_or_product(rng)
    gold, answer = rng.choice(
        [
            (f"{a}", f"+{a}"),
            (f"-{a}", f"-{a}.0"),
            (written, f"{fraction.numerator}/{fraction.denominator}"),
            (f"{Fraction(a * b + 1, b)}", f"{a}\\frac{{1}}{{{b}}}"),
            (f"{-Fraction(a * b + 1, b)}", f"-{a} 1/{b}"),
            (f"{a}00000", f"{a} \\times 10^5"),
            (f"{a / 10}", f"{a} \\cdot 10^{{-1}}"),
            (f"{prime**power}", f"{prime}^{{{power}}}"),
            (f"{prime**power - 1}", f"{prime}^{{{power}}} - 1"),
            (f"{1 - Fraction(prime, other) ** 2}", f"1 - \\left(\\frac{{{prime}}}{{{other}}}\\right)^2"),
            (f"{math.factorial(a % 7 + 2)}", f"{a % 7 + 2}!"),
            (f"{math.comb(a, 2)}", f"\\binom{{{a}}}{{2}}"),
            (f"{prime**power * other}", f"{prime}^{{{power}}} \\cdot {other}"),
            (f"{prime**2 * 19 * other}", f"{other} \\cdot 19 \\cdot {prime}^2"),
            (f"{a}\\%", f"{a}\\%"),
            (f"{a}:{b}", f"{a} : {b}"),
            (f"{a}", f"{a}\\text{{ cm}}"),
            (f"1+\\sqrt{{{prime}}}", f"\\sqrt{{{prime}}} + 1"),
            (f"{math.sqrt(prime) + a:.5f}", f"{a} + \\sqrt{{{prime}}}"),
            (f"2\\pi + {a}", f"{a} + 2\\pi"),
            (f"{math.pi * a + b:.5f}", f"{a}\\pi + {b}"),
            (f"{a}+{b}i", f"{b}i + {a}"),
            (f"{value}", f"{sum_} = {value}") if value.denominator == 1 else (f"{a}", f"{a}"),
            (f"{value}", f"x = {sum_} = {value}") if value.denominator == 1 else (f"{a}", f"{a}"),
            (f"{a}+{b}", f"{b} + {a}"),
            (f"{2**power} \\cdot {a}", f"{a} \\times {2**power}"),
            (f"2^{{{power}}} \\cdot 3", f"3 \\cdot 2^{{{power}}}"),
            (f"{a}, {b}", f"{b}, {a}"),
        ]
    )
    question = rng.choice(["", "", "How many are there?"])
    return Member(gold, rng.choice([_boxed(rng, answer), f"#### {answer}"]), "right", question)


def _conversion(rng: random.Random) -> tuple[str, str, str]:
    """What is to be written in another unit or another notation: as it is, as it should be, and the question."""
    n = rng.randint(2, 90)
    kind = rng.randrange(5)
    if kind == 0:
        small, large, factor = rng.choice(
            [("cm", "m", 100), ("m", "km", 1000), ("g", "kg", 1000), ("min", "hours", 60)]
        )
        old, new = f"{n}\\text{{ {large}}}", f"{n * factor}\\text{{ {small}}}"
        return old, new, f"Convert {n} {large} to {small}."
    if kind == 1:
        return f"{n}\\%", f"{n / 100}", f"Write {n}\\% as a decimal."
    if kind == 2:
        return f"{n}^\\circ", f"\\frac{{{n}\\pi}}{{180}}", f"Convert ${n}^\\circ$ to radians."
    if kind == 3:
        return (
            f"{n * 10**4}",
            f"{n / 10 if n > 9 else n} \\times 10^{{{5 if n > 9 else 4}}}",
            f"Write {n * 10**4} in scientific notation.",
        )
    power = rng.randint(2, 6)
    return f"{2**power * n}", f"2^{{{power}}} \\cdot {n}", f"Write ${2**power * n}$ as a product with a power of 2."


def _unconverted(rng: random.Random) -> Member:
    """A number of the question, in the unit or notation that it has there."""
    old, new, question = _conversion(rng)
    return Member(new, _boxed(rng, old), "wrong", question)


def _converted(rng: random.Random) -> Member:
    """The same number as it was asked for."""
    _, new, question = _conversion(rng)
    return Member(new, _boxed(rng, rng.choice([new, new.replace(" ", "")])), "right", question)


CLASSES: dict[str, Generator] = {
    "echo": _echo,
    "reordered-echo": _reordered_echo,
    "unconverted": _unconverted,
    "converted": _converted,
    "evaluated": _evaluated,
    "chosen-from-the-question": _chosen,
    "setup": _setup,
    "worked-out": _worked_out,
    "closed-form": _closed_form,
    "unevaluated": _unevaluated,
    "final-form": _final_form,
}
