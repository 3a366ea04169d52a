"""Numbers in words and mixed numbers."""

import random
from fractions import Fraction

from tests.grading.classes.member import Generator, Member

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_ONES = f"{_SMALL} eighteen nineteen".split()
_TEN_TIMES = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = dict(enumerate(_TEN_TIMES.split(), start=2))
_PARTS = {
    2: "half",
    3: "third",
    4: "fourth",
    5: "fifth",
    6: "sixth",
    7: "seventh",
    8: "eighth",
    9: "ninth",
    10: "tenth",
}
_FRAMES = (r"\boxed{%s}", r"\boxed{\text{%s}}", "The answer is %s.", "#### %s", r"So it is $\boxed{\text{%s}}$.")


def _small(generator: random.Random, number: int) -> str:
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (generator.choice("- ") + _ONES[ones] if ones else "")


def _without_article(words: str) -> str:
    return f"one {words[2:]}" if words.startswith("a ") else words


def in_words(generator: random.Random, number: int) -> str:
    """Return a whole number below a billion in words."""
    for scale, name in ((10**6, "million"), (10**3, "thousand"), (100, "hundred")):
        if number >= scale:
            many, rest = divmod(number, scale)
            count = generator.choice(("a", "one")) if many == 1 else in_words(generator, many)
            joint = " and " if rest and rest < 100 and generator.random() < 0.5 else " "
            return f"{count} {name}" + (joint + _without_article(in_words(generator, rest)) if rest else "")
    return _small(generator, number)


def _case(generator: random.Random, words: str) -> str:
    return generator.choice((words, words, words.capitalize()))


def _any_number(generator: random.Random) -> int:
    return generator.choice((generator.randint(0, 99), generator.randint(100, 999), generator.randint(1000, 10**8)))


def cardinal(generator: random.Random) -> Member:
    """A whole number in words."""
    number = _any_number(generator)
    if number > 1000:
        number -= number % 1000 if generator.random() < 0.5 else 0
    words = in_words(generator, number)
    if number and generator.random() < 0.2:
        number, words = -number, f"{generator.choice(('minus', 'negative'))} {words}"
    return Member(str(number), generator.choice(_FRAMES) % _case(generator, words), "right")


def another_number(generator: random.Random) -> Member:
    """Another number in words."""
    number = _any_number(generator)
    other = generator.choice((number + 1, number + 10, number * 10, number * 1000, number + 100)) or 7
    other = other if other != number and other < 10**9 else number + 3
    return Member(str(number), generator.choice(_FRAMES) % in_words(generator, other), "wrong")


def malformed(generator: random.Random) -> Member:
    """Words of numbers in an order that makes no number; the gold is their sum, or another reading."""
    one, other = generator.randint(1, 9), generator.randint(1, 9)
    tens, teen = generator.randint(2, 9) * 10, generator.randint(10, 19)
    first, second = generator.choice(
        ((one, other), (one, tens), (one, teen), (tens, teen), (teen, other), (teen, tens))
    )
    joint = generator.choice("- ")
    words = f"{_small(generator, first)}{joint}{_small(generator, second)}"
    if generator.random() < 0.3:
        words = f"{_ONES[one]}{joint}{_ONES[other]}{joint}{_small(generator, tens)}"
        first, second = one + other, tens
    gold = generator.choice((first + second, first * second, int(f"{first}{second}"), first, second))
    return Member(str(gold), generator.choice(_FRAMES) % words, "wrong")


def _count(generator: random.Random, number: int) -> str:
    return generator.choice((in_words(generator, number), str(number)))


def part(generator: random.Random) -> Member:
    """A fraction or a mixed number in words."""
    below = generator.choice(list(_PARTS))
    above = generator.randint(1, below - 1)
    name = _PARTS[below] if below != 4 else generator.choice(("fourth", "quarter"))
    if above == 1:
        words = f"{generator.choice(('a', 'one'))} {name}"
    else:
        words = f"{in_words(generator, above)}{generator.choice('- ')}{name}s"
    value = Fraction(above, below)
    if generator.random() < 0.5:
        whole = generator.randint(1, 99)
        value, words = whole + value, f"{_count(generator, whole)} and {words}"
    return Member(rf"\frac{{{value.numerator}}}{{{value.denominator}}}", generator.choice(_FRAMES) % words, "right")


def multiple(generator: random.Random) -> Member:
    """So many thousands, millions or dozens."""
    size, name = generator.choice(
        ((10**3, "thousand"), (10**6, "million"), (10**9, "billion"), (12, "dozen"), (100, "hundred"))
    )
    count = generator.choice((Fraction(generator.randint(2, 99)), Fraction(generator.randint(21, 99), 2)))
    gold = count * size
    is_right = generator.random() < 0.5
    if not is_right:
        gold = generator.choice((count, gold * 10, gold + 1))
    written = str(count) if count.denominator == 1 else f"{float(count)}"
    frame = generator.choice((r"\boxed{%s}", r"\boxed{\text{%s}}", "#### %s"))
    expected = f"{gold}" if gold.denominator == 1 else rf"\frac{{{gold.numerator}}}{{{gold.denominator}}}"
    return Member(expected, frame % f"{written} {name}", "right" if is_right else "wrong")


def with_unit(generator: random.Random) -> Member:
    """A number in words with a unit."""
    number, unit = (
        generator.randint(2, 999),
        generator.choice(("apples", "hours", "dollars", "people", "miles per hour")),
    )
    words = in_words(generator, number)
    return Member(str(number), generator.choice(_FRAMES[1:]) % _case(generator, f"{words} {unit}"), "right")


def difference(generator: random.Random) -> Member:
    """A difference that looks like a mixed number is expected, and its value or that mixed number is the answer."""
    whole, below = generator.randint(1, 30), generator.randint(2, 12)
    above = generator.randint(1, below - 1)
    value, mixed = whole - Fraction(above, below), whole + Fraction(above, below)
    is_right = generator.random() < 0.5
    result = value if is_right else mixed
    space = generator.choice(("", " "))
    fraction = generator.choice((f"{above}/{below}", rf"\frac{{{above}}}{{{below}}}", rf"\dfrac{{{above}}}{{{below}}}"))
    gold = f"{whole}{space}{generator.choice(('-', chr(0x2212)))}{space}{fraction}"
    answer = rf"\boxed{{\frac{{{result.numerator}}}{{{result.denominator}}}}}"
    return Member(gold, answer, "right" if is_right else "wrong")


def mixed(generator: random.Random) -> Member:
    """A mixed number, and the product that it is not."""
    whole, below = generator.randint(1, 30), generator.randint(3, 12)
    above = generator.randint(1, below - 1)
    value, product = whole + Fraction(above, below), whole * Fraction(above, below)
    gold, verdict = generator.choice(((value, "right"), (product, "wrong")))
    space = generator.choice(("", " ", r"\,", "~"))
    fraction = generator.choice((rf"\frac{{{above}}}{{{below}}}", rf"\dfrac{{{above}}}{{{below}}}"))
    answer = generator.choice((f"{whole} {above}/{below}", f"{whole}~{above}/{below}", f"{whole}{space}{fraction}"))
    sign = generator.choice(("", "-"))
    return Member(rf"{sign}\frac{{{gold.numerator}}}{{{gold.denominator}}}", rf"\boxed{{{sign}{answer}}}", verdict)


CLASSES: dict[str, Generator] = {
    "number-in-words": cardinal,
    "another-number-in-words": another_number,
    "malformed-number-words": malformed,
    "fraction-in-words": part,
    "multiple-in-words": multiple,
    "number-in-words-with-unit": with_unit,
    "difference-not-mixed": difference,
    "mixed-number": mixed,
}
