"""Units and other words behind a number, and letters that are units or variables."""

import random
import re

from tests.grading.classes.member import Generator, Member

_CHANGE_WORDS = """
thousand thousands million millions billion trillion hundred hundreds dozen dozens tens tenths hundredths thousandths
halves thirds quarters fourths fifths sixths eighths grand score scores gross pairs couples doubled tripled quadrupled
halved squared cubed inverted negated
"""
_CHANGES = _CHANGE_WORDS.split()
_PHRASES = re.split(
    r";\s+",
    """point six; point {n}; remainder {n}; remainder three; per mille; per thousand; modulo {n}; mod seven; modulo
seven; times ten; times {n}; plus one; minus two; and a half; and a quarter; to the fourth; over two; divided
by {n}; maybe six; or maybe {n}; perhaps {n}; give or take one; less than that; but negative; or so; more or
less; not counting zero; if rounded; is wrong; is not it; cubed units; in base seven; base {n}; with error;
too many; too few; less; twice; factorial; percent of {n}; out of {n}; choose two;
halves of apples; dozen eggs; million dollars; thousand people; hundred miles; pairs of shoes; score years;
k; K; M; approximately""",
)
_STYLES = (
    r"{v}\text{{ {w}}}",
    r"{v} \text{{{w}}}",
    r"{v} {w}",
    r"\text{{{v} {w}}}",
    r"{v}\ \text{{{w}}}",
    r"{v}~\mathrm{{{w}}}",
)
_COUNTED = ("apples", "marbles", "students", "tickets", "cookies", "books", "people", "children", "boxes", "candies")
_STRANGE = (
    "gloopies",
    "widgets",
    "flanges",
    "thimbles",
    "sprockets",
    "quills",
    "lanterns",
    "ferrets",
    "spatulas",
    "kiwis",
)
_ADJECTIVES = ("red", "blue", "wooden", "tiny", "fresh", "striped")
_MEASURES = re.split(
    r";\s+",
    """cm; m; km; inches; feet; ft; yards; miles; kg; grams; g; pounds; lbs; oz; ounces; liters; mL; gallons; cups;
hours; minutes; seconds; days; weeks; months; years; cents; dollars; euros; mph; km/h; m/s; miles per hour;
square units; cubic feet; sq ft; acres; cm^2; m^3; feet per second; dollars per hour; years old; miles per
gallon; hours per day; meters each; inches tall; dollars in total; pages per day; degrees Fahrenheit;
kilometers per hour; tons; pints""",
)
_QUESTIONS = (
    "{a} has {n} {adjective} {noun} and buys {m} more. How many {noun} does {a} have now?",
    "There are {n} {adjective} {noun} in {m} rooms. {a} takes one. How many {adjective} {noun} are left?",
    "A shop sells {noun} for ${m} each. How many {noun} can {a} buy with ${n}?",
    "If {a} paints {n} {noun} a day, how many of the {noun} are painted in {m} days?",
)
_NAMES = ("Ann", "Ben", "Carla", "Dev", "Esi", "Farid")


def _number(generator: random.Random) -> str:
    number = generator.randint(2, 999)
    return generator.choice((str(number), str(number), str(number), f"{number / 4}", rf"\frac{{{number}}}{{7}}"))


def _boxed(generator: random.Random, answer: str) -> str:
    return generator.choice((r"So it is \boxed{%s}.", r"\boxed{%s}", r"We get $\boxed{%s}$.", "#### %s")) % answer


def _question(generator: random.Random, noun: str, adjective: str) -> str:
    return generator.choice(_QUESTIONS).format(
        a=generator.choice(_NAMES),
        n=generator.randint(2, 90),
        m=generator.randint(2, 9),
        noun=noun,
        adjective=adjective,
    )


def value_changed_by_words(generator: random.Random) -> Member:
    """The gold with words behind it that make it another value, or no value at all."""
    gold = _number(generator)
    phrase = generator.choice(generator.choice((_CHANGES, _PHRASES)))
    word = " ".join(phrase.format(n=generator.randint(2, 99)).split())
    noun = generator.choice(_COUNTED)
    question = generator.choice(("", _question(generator, noun, generator.choice(_ADJECTIVES))))
    answer = generator.choice(_STYLES).format(v=gold, w=word)
    return Member(gold, _boxed(generator, answer), "wrong", question)


def known_units(generator: random.Random) -> Member:
    """A unit that the gold leaves out."""
    gold = _number(generator)
    unit = generator.choice(generator.choice((_MEASURES, _COUNTED)))
    style = generator.choice(_STYLES if gold[0] != "\\" else _STYLES[:3])
    return Member(gold, _boxed(generator, style.format(v=gold, w=" ".join(unit.split()))), "right")


def counted(generator: random.Random) -> Member:
    """Something that no list could hold."""
    gold, noun, adjective = str(generator.randint(2, 999)), generator.choice(_STRANGE), generator.choice(_ADJECTIVES)
    question = _question(generator, noun, adjective)
    phrase = (
        noun if "{adj" in question or adjective not in question else generator.choice((noun, f"{adjective} {noun}"))
    )
    answer = generator.choice(_STYLES).format(v=gold, w=phrase)
    return Member(gold, _boxed(generator, answer), "right", question)


_ASKED = ("pairs of socks", "dozens", "quarters", "times", "squares", "more apples", "hundreds", "thousands", "couples")


def asked_for(generator: random.Random) -> Member:
    """Words that would change the value, had the question not asked how many there are of them."""
    gold, words = str(generator.randint(2, 999)), generator.choice(_ASKED)
    question = f"{generator.choice(_NAMES)} counts {generator.randint(2, 99)} things. How many {words} are there?"
    answer = generator.choice(_STYLES).format(v=gold, w=words)
    return Member(gold, _boxed(generator, answer), "right", question)


_MEASURED = ("water", "flour", "lumber", "sand", "paint", "rope", "copper", "lemonade", "growing space")
_QUANTITIES = ("gallons", "cups", "pounds", "feet", "square feet", "bags", "boxes", "jars", "dollars", "liters")


def measured_in_the_question(generator: random.Random) -> Member:
    """How much of something, or how much more than something else, that the question names."""
    gold, number = str(generator.randint(2, 999)), generator.randint(2, 99)
    thing, quantity = generator.choice(_MEASURED), generator.choice(_QUANTITIES)
    question, words = generator.choice(
        (
            (f"{thing.title()} costs ${number}. How much {thing} can she buy?", f"{quantity} of {thing}"),
            (f"There is {thing} in {number} rooms. Find the total.", f"{quantity} of {thing} in total"),
            (f"He sells {thing} for ${number}. How much profit does he make?", "dollars profit"),
            (f"A is {number} inches tall. How much taller is B?", "inches taller"),
            (f"It takes {number} minutes. How much longer does {thing} take?", "minutes longer"),
            (f"He has ${number} and buys {thing}. How much more does he need?", "more"),
            (f"He needs {number}. How many more are missing?", f"{quantity} more"),
            ("", f"more {quantity}"),
            (f"A truck has {number} wheels. How many wheels are there?", "total wheels"),
        )
    )
    answer = generator.choice(_STYLES).format(v=gold, w=words)
    return Member(gold, _boxed(generator, answer), "right", question)


def measure_changed_by_the_question(generator: random.Random) -> Member:
    """A number that words of the question make another one."""
    gold, thing = str(generator.randint(2, 999)), generator.choice(_MEASURED)
    question = f"How much {thing} is in two dozen pairs of jars, half of which are doubled and minus million?"
    phrase = generator.choice(
        (
            *(f"dozen of {thing}", f"pairs of {thing}", f"half {thing}", f"million {thing}", f"hundred of {thing}"),
            *(f"jars doubled {thing}", f"gallons minus {thing}", "gallons of", f"of {thing}", f"{thing} of half"),
            *("gallons of million", "gallons dozen", "cups of two dozen", f"m {thing}", f"k {thing}"),
        )
    )
    answer = generator.choice(_STYLES).format(v=gold, w=phrase)
    return Member(gold, _boxed(generator, answer), "wrong", question)


_LETTERS = ("m", "s", "g", "h", "l", "in", "ft")
_SINGLE = ("m", "s", "g", "h", "l")


def variable_read_as_unit(generator: random.Random) -> Member:
    """The coefficient of a variable that has the name of a unit."""
    number, letter, power = generator.randint(2, 99), generator.choice(_SINGLE), generator.choice(("", "^2", "^3"))
    question = generator.choice(
        (
            "A cube has side ${s}$. What is its {w}?",
            "Express the {w} in terms of ${s}$.",
            "Let ${s} > 0$. Find the {w}.",
        )
    ).format(s=letter, w=generator.choice(("area", "sum", "volume", "perimeter", "value")))
    space = generator.choice(("", " ", r"\,"))
    gold = rf"{number}{space}{letter}{power}"
    asked = generator.choice((question, question, "")) if not space else question
    prefix = generator.choice(("", "", "x = "))
    return Member(prefix + gold, _boxed(generator, str(number)), "wrong", asked)


def variable_in_the_answer(generator: random.Random) -> Member:
    """A variable of the question behind the gold."""
    number, letter = _number(generator), generator.choice(_SINGLE)
    question = generator.choice(("If $2{s} + 1 = 7$, what is ${s}$?", "Let ${s}$ be a root. Find $p({s})$.")).format(
        s=letter
    )
    power = generator.choice(("", "^2", "^3"))
    return Member(number, _boxed(generator, f"{number}{generator.choice(('', ' '))}{letter}{power}"), "wrong", question)


def variable_as_expected(generator: random.Random) -> Member:
    """The same product of a variable, in another order or notation."""
    number, letter, power = generator.randint(2, 99), generator.choice(_SINGLE), generator.choice(("", "^2", "^3"))
    gold = f"{number}{letter}{power}"
    answer = generator.choice(
        (f"{number} {letter}{power}", rf"{letter}{power}\cdot {number}", rf"{number}\cdot {letter}{power}", gold)
        + ((rf"{number}\,{letter}^{{{power[1]}}}",) if power else (f"({number}){letter}",))
    )
    question = generator.choice(("", f"A side is ${letter}$. What is the area?"))
    return Member(gold, _boxed(generator, answer), "right", question)


def letter_unit(generator: random.Random) -> Member:
    """A unit of one letter, where nothing is called so."""
    number, letter = _number(generator), generator.choice(_LETTERS)
    question = generator.choice(
        ("", f"A rope of {generator.randint(2, 99)} m is cut at $x$. Where?", "How much is it?")
    )
    return Member(number, _boxed(generator, f"{number}{generator.choice(('', ' '))}{letter}"), "right", question)


CLASSES: dict[str, Generator] = {
    "words-that-change-the-value": value_changed_by_words,
    "known-units": known_units,
    "counted": counted,
    "asked-for": asked_for,
    "measured-in-the-question": measured_in_the_question,
    "measure-changed-by-the-question": measure_changed_by_the_question,
    "variable-read-as-unit": variable_read_as_unit,
    "variable-in-the-answer": variable_in_the_answer,
    "variable-as-expected": variable_as_expected,
    "letter-unit": letter_unit,
}
