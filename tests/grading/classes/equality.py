"""Equality of expressions: differences that few points show, and identities in many forms."""

import random

from tests.grading.classes.member import Generator, Member
from tests.grading.classes.notation import response

_LETTERS = "xxxytn"


def _gold(generator: random.Random, letter: str) -> str:
    first, second = generator.randint(2, 20), generator.randint(2, 90)
    return generator.choice(
        [
            letter,
            f"{letter}^2",
            f"{first}{letter}+{second}",
            f"{letter}^2-{second}{letter}+{first}",
            rf"\frac{{{letter}}}{{{letter}+{second}}}",
            rf"\sin {letter}",
            rf"{first}\sqrt{{{letter}}}",
            f"{first}^{letter}",
            rf"e^{{{letter}}}+{first}",
        ]
    )


def hidden_differences(generator: random.Random) -> Member:
    """The expected function with a term that is zero in most places, or tiny in all of them."""
    letter = generator.choice(_LETTERS)
    gold = _gold(generator, letter)
    far = generator.choice(
        [str(generator.randint(20, 500)), f"10^{{{generator.randint(3, 40)}}}", rf"{generator.randint(7, 90)}\pi"]
    )
    tiny = generator.choice([rf"10^{{-{generator.randint(20, 900)}}}", rf"e^{{-{generator.randint(50, 900)}}}"])
    small = generator.randint(2, 9)
    term = generator.choice(
        [
            rf"\lfloor\frac{{{letter}}}{{{far}}}\rfloor",
            rf"\left\lfloor \frac{{{letter}^2}}{{{far}^2}}\right\rfloor",
            rf"\lfloor \sin^2 {letter}\rfloor",
            rf"\lceil\frac{{{letter}}}{{{far}}}-1\rceil",
            f"|{letter}-{far}|+{letter}-{far}",
            f"|{letter}+{far}|-{letter}-{far}",
            rf"\sqrt{{({letter}-{far})^2}}+{letter}-{far}",
            rf"\max(0,{letter}-{far})",
            rf"\max({letter},{far})-{far}",
            rf"\min({letter},-{far})+{far}",
            f"0^{{|{letter}-{small}|}}",
            f"0^{{({letter}-{small})^2}}",
            tiny,
            rf"{tiny}{letter}",
            rf"\frac{{{letter}}}{{10^{{{generator.randint(20, 300)}}}}}",
            "".join(f"({letter}-{place})" for place in range(2, 10)),
            "".join(f"({letter}-{place})" for place in generator.sample(range(1, 13), 8)),
            rf"\frac{{1}}{{10^{{60}}+{letter}^2}}",
            rf"\frac{{|{letter}-{far}|}}{{{letter}-{far}}}+1",
        ]
    )
    answer = generator.choice([f"{gold}+{term}", f"{gold}-({term})", f"{gold}+{small}({term})"])
    return Member(gold, response(generator, answer), "wrong")


def hidden_differences_of_constants(generator: random.Random) -> Member:
    """The expected constant and something tiny."""
    root, factor = generator.choice([2, 3, 5, 6, 7]), generator.randint(2, 40)
    size = generator.randint(20, 900)
    tiny = generator.choice(
        [f"10^{{-{size}}}", f"2^{{-{3 * size}}}", f"e^{{-{2 * size}}}", rf"\frac{{1}}{{10^{{{size}}}}}"]
    )
    gold, answer = generator.choice(
        [
            (rf"\sqrt{{{root}}}", rf"\sqrt{{{root}+{tiny}}}"),
            (rf"{factor}\sqrt{{{root}}}", rf"{factor}\sqrt{{{root}}}+{tiny}"),
            (str(factor), f"{factor}+{tiny}"),
            (str(factor), rf"\sqrt{{{factor * factor}+{tiny}}}"),
            (rf"{factor}\pi", rf"({factor}+{tiny})\pi"),
            (rf"\frac{{{factor}}}{{{factor * 7 + 1}}}", rf"\frac{{{factor}}}{{{factor * 7 + 1}}}-{tiny}"),
            (rf"\ln {factor}", rf"\ln({factor}+{tiny})"),
            (rf"\sin {factor}", rf"\sin({factor}+{tiny})"),
            (f"e^{{{factor}}}", f"e^{{{factor}+{tiny}}}"),
            (str(factor), rf"{factor}+\sin({tiny})"),
            (rf"\cos {factor}", rf"\cos {factor}\cdot\cos({tiny})+{tiny}"),
        ]
    )
    return Member(gold, response(generator, answer), "wrong")


def identities(generator: random.Random) -> Member:
    """One expression in two forms."""
    letter, other = generator.sample("xyztab", 2)
    first, second, third = generator.randint(2, 20), generator.randint(2, 40), generator.randint(2, 12)
    root = generator.choice([2, 3, 5, 7])
    gold, answer = generator.choice(
        [
            (f"({letter}+{first})^2", f"{letter}^2+{2 * first}{letter}+{first**2}"),
            (f"({letter}-{first})({letter}+{second})", f"{letter}^2+({second - first}){letter}-{first * second}"),
            (f"{first}{letter}+{first * second}", f"{first}({letter}+{second})"),
            (rf"\frac{{{letter}^2-{first**2}}}{{{letter}-{first}}}", f"{letter}+{first}"),
            (rf"\frac{{1}}{{{letter}}}+\frac{{1}}{{{other}}}", rf"\frac{{{letter}+{other}}}{{{letter}{other}}}"),
            (rf"\frac{{{first}}}{{{letter}-{second}}}", rf"-\frac{{{first}}}{{{second}-{letter}}}"),
            (f"({letter}+{other})^{third}", f"({other}+{letter})^{third}"),
            (rf"\sqrt{{{letter}^2}}", f"|{letter}|"),
            (f"|{first}{letter}|", f"{first}|{letter}|"),
            (f"|{letter}-{first}|", f"|{first}-{letter}|"),
            (rf"|{letter}{other}|", rf"|{letter}|\cdot|{other}|"),
            (rf"\sqrt{{({letter}-{first})^2}}", f"|{letter}-{first}|"),
            (rf"\lfloor {letter}+{first}\rfloor", rf"\lfloor {letter}\rfloor+{first}"),
            (
                rf"\lfloor\frac{{{letter}}}{{{first}}}\rfloor+{second}",
                rf"{second}+\left\lfloor \frac{{{letter}}}{{{first}}}\right\rfloor",
            ),
            (rf"\lceil {letter}\rceil", rf"-\lfloor -{letter}\rfloor"),
            (rf"\max({letter},{other})", rf"\max({other},{letter})"),
            (rf"\max({letter},{other})", rf"\frac{{{letter}+{other}+|{letter}-{other}|}}{{2}}"),
            (rf"\sin(2{letter})", rf"2\sin {letter}\cos {letter}"),
            (rf"\tan {letter}", rf"\frac{{\sin {letter}}}{{\cos {letter}}}"),
            (rf"\cos^2 {letter}", rf"1-\sin^2 {letter}"),
            (rf"\cos^2 {letter}", rf"\frac{{1+\cos(2{letter})}}{{2}}"),
            (rf"e^{{{first}{letter}}}", rf"(e^{letter})^{{{first}}}"),
            (f"{first}^{{{letter}+1}}", rf"{first}\cdot {first}^{letter}"),
            (rf"\ln({letter}^{{{2 * third}}})", rf"{2 * third}\ln|{letter}|"),
            (rf"{letter}^{{\frac{{1}}{{{third}}}}}", rf"\sqrt[{third}]{{{letter}}}"),
            (rf"\frac{{{first}}}{{\sqrt{{{root}}}}}", rf"\frac{{{first}\sqrt{{{root}}}}}{{{root}}}"),
            (rf"({first}+\sqrt{{{root}}})^2", rf"{first**2 + root}+{2 * first}\sqrt{{{root}}}"),
            (
                rf"\frac{{1}}{{{first + 3}-\sqrt{{{root}}}}}",
                rf"\frac{{{first + 3}+\sqrt{{{root}}}}}{{{(first + 3) ** 2 - root}}}",
            ),
            (rf"{first}^{{{second}}}", rf"{first}^{{{second - 1}}}\cdot {first}"),
            (rf"10^{{-{second}}}", rf"\frac{{1}}{{10^{{{second}}}}}"),
            (f"{letter}^{{{second}}}-1", f"-(1-{letter}^{{{second}}})"),
            (f"({letter}+1)^{{{3 * second}}}", f"(({letter}+1)^3)^{{{second}}}"),
        ]
    )
    # A maximum is no answer where none is expected.
    if r"\max" not in gold and generator.random() < 0.5:
        gold, answer = answer, gold
    return Member(gold, response(generator, answer), "right")


def near_misses(generator: random.Random) -> Member:
    """One form of an identity, with another number in it."""
    honest = identities(generator)
    start = honest.response.rindex(r"\boxed{") + 7
    answer = honest.response[start:]
    end, depth = 0, 1
    while depth:
        depth += {"{": 1, "}": -1}.get(answer[end], 0)
        end += 1
    answer = answer[: end - 1]
    wrong = generator.choice(
        [f"{answer}+1", f"2({answer})", f"-({answer})", rf"\frac{{{answer}}}{{3}}", f"({answer})^2+1"]
    )
    return Member(honest.gold, response(generator, wrong), "wrong")


CLASSES: dict[str, Generator] = {
    "hidden-differences": hidden_differences,
    "hidden-differences-of-constants": hidden_differences_of_constants,
    "identities": identities,
    "near-misses": near_misses,
}
