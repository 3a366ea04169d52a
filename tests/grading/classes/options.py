"""Choices between options, and intervals in words."""

import random

from tests.grading.classes.member import Generator, Member

_LETTERS = "ABCDEFGH"
_LABELS = (
    "Option",
    "option",
    "Choice",
    "choice",
    "Answer",
    "the answer is",
    "Answer:",
    "The correct answer is",
    "Option:",
)
_STYLES = ("%s", "(%s)", r"\textbf{%s}", r"\textbf{(%s)}", r"\text{(%s)}", r"\mathrm{%s}", "%s.", r"\textbf{(%s) }")
_MEANINGS = ("5", "12 apples", r"\frac{1}{2}", "the third one", "x > 2", "a triangle", r"$\sqrt{2}$", "27%")


def option(generator: random.Random) -> Member:
    """The letter of the expected option, with a label or its meaning."""
    gold = generator.choice(_LETTERS)
    answer = generator.choice(
        (
            rf"\text{{{generator.choice(_LABELS)} {generator.choice((gold, f'({gold})'))}}}",
            f"{generator.choice(_LABELS)} {generator.choice((gold, f'({gold})', f'{gold}.'))}",
            generator.choice(_STYLES) % gold,
            f"{generator.choice(('%s.', '(%s)', '%s)', '%s:')) % gold} {generator.choice(_MEANINGS)}",
            rf"\textbf{{({gold})}} {generator.choice(_MEANINGS)}",
            f"({gold.lower()})",
        )
    )
    return Member(gold, rf"\boxed{{{answer}}}", "right")


def option_of_the_question(generator: random.Random) -> Member:
    """The letter of the expected option with its text, as the question has both."""
    letters, meanings = _LETTERS[: generator.randint(3, 5)], generator.sample(_MEANINGS, 5)
    style = generator.choice(("(%s) %s", "%s) %s", "%s. %s", "%s: %s", r"\textbf{(%s)} %s", r"(%s)~%s", r"(%s)\ %s"))
    options = [style % pair for pair in zip(letters, meanings, strict=False)]
    question = "Which is it?" + generator.choice(("\n", " ", "\n\n")).join(["", *options])
    chosen = generator.randrange(len(options))
    return Member(letters[chosen], rf"The answer is \boxed{{{options[chosen]}}}.", "right", question)


def another_option(generator: random.Random) -> Member:
    """Another letter, or several, or none."""
    gold, other = generator.sample(_LETTERS, 2)
    label = generator.choice(_LABELS)
    answer = generator.choice(
        (
            *(f"{label} {other}", f"({other})", f"{other}. {generator.choice(_MEANINGS)}", f"{gold} or {other}"),
            *(f"not {gold}", f"{label} not {gold}", f"({gold}) and ({other})", f"{gold}, {other}", f"{gold}{other}"),
            *(rf"\text{{{label} {gold} or {other}}}", f"({gold}) maybe", f"{gold} is wrong", f"{gold}. {other}"),
            *(f"{gold}. No, {other}", f"{label} {gold} or ({other})", f"({gold})({other})", f"2{gold}", f"-{gold}"),
        )
    )
    return Member(gold, rf"\boxed{{{answer}}}", "wrong")


_BOUNDS = ("-7", "0", "2", "3.5", r"\pi", "10", "144", "-1/2", "98.6")
_SUBJECTS = ("", "", "x is ", "all real numbers ", "x ", "all values of x ", "all real numbers that are ")
_ONE_SIDED = {
    (r"[%s,\infty)", r"x \ge %s"): ("greater than or equal to", "at least", "no less than"),
    (r"(-\infty,%s]", r"x \le %s"): ("less than or equal to", "at most", "no more than"),
    (r"(%s,\infty)", "x > %s"): ("greater than", "larger than", "more than"),
    (r"(-\infty,%s)", "x < %s"): ("less than", "smaller than"),
}
_ENDS = {("[", "]"): (", inclusive", " inclusive"), ("(", ")"): (", exclusive", " exclusive")}


def _worded(generator: random.Random, words: str) -> str:
    words = generator.choice(_SUBJECTS) + words
    return generator.choice((r"\boxed{\text{%s}}", r"\boxed{%s}")) % (
        words if " x" in f" {words}" else words.capitalize()
    )


def interval_in_words(generator: random.Random) -> Member:
    """An interval or an inequality in words that are clear."""
    if generator.random() < 0.5:
        forms, relations = generator.choice(list(_ONE_SIDED.items()))
        bound = generator.choice(_BOUNDS)
        return Member(
            generator.choice(forms) % bound, _worded(generator, f"{generator.choice(relations)} {bound}"), "right"
        )
    (opening, closing), ends = generator.choice(list(_ENDS.items()))
    low, high = (str(each) for each in sorted(generator.sample(range(-30, 99), 2)))
    words = f"{generator.choice((f'between {low} and {high}', f'from {low} to {high}'))}{generator.choice(ends)}"
    return Member(f"{opening}{low},{high}{closing}", _worded(generator, words), "right")


def another_interval_in_words(generator: random.Random) -> Member:
    """An interval with other ends, one that leaves open what its ends are, or only an end of it."""
    (opening, closing), ends = generator.choice(list(_ENDS.items()))
    low, high = sorted(generator.sample(range(-30, 99), 2))
    other = next(each for each in _ENDS if each != (opening, closing))
    between = generator.choice(("between %s and %s", "from %s to %s"))
    words = generator.choice(
        (
            *(between % (low, high) + generator.choice(_ENDS[other]), between % (low, high)),
            *(between % (low, high + 1) + generator.choice(ends), between % (high, low) + generator.choice(ends)),
            *(f"at least {low}", f"at most {high}", f"greater than {low}", f"not {between % (low, high)}{ends[0]}"),
        )
    )
    return Member(f"{opening}{low},{high}{closing}", _worded(generator, words), "wrong")


def value_with_a_bound(generator: random.Random) -> Member:
    """A bound where a value is expected."""
    gold = str(generator.randint(2, 999))
    words = generator.choice(
        ("at least %s", "more than %s", "less than %s", "at most %s", "from 1 to %s inclusive", "above %s")
    )
    return Member(gold, _worded(generator, words % gold), "wrong")


CLASSES: dict[str, Generator] = {
    "option": option,
    "option-of-the-question": option_of_the_question,
    "another-option": another_option,
    "interval-in-words": interval_in_words,
    "another-interval-in-words": another_interval_in_words,
    "value-with-a-bound": value_with_a_bound,
}
