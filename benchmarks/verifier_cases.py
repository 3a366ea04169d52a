"""Responses with known verdicts that verifier.py has graded: outputs of models, made-up ones, and some that hang."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, TypedDict

_HANGING = ("9^{9^{9^{9}}}", "10000000!", r"\binom{10^9}{5\cdot 10^8}", "2^{10^{10}}", "(x+1)^{100000}")
_FILLER = "We work this out step by step. In step {n} we have ${a} + {b} = {c}$, which we need later on."
_MATH: list[Callable[[int, int, int], tuple[str, str, str]]] = [
    lambda a, b, c: (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b + 1}}}"),
    lambda a, b, c: (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"{a + 1}\sqrt{{{b}}}"),
    lambda a, b, c: (rf"({a},-{b})", rf"\left({a}, -{b}\right)", rf"(-{b},{a})"),
    lambda a, b, c: (rf"[{a},{a + b})", rf"{a} \le x < {a + b}", rf"[{a},{a + b}]"),
    lambda a, b, c: (f"x^2-{a * a}", f"(x-{a})(x+{a})", f"(x-{a})^2"),
    lambda a, b, c: (rf"{a}+{b}i", rf"{b}i+{a}", rf"{a}-{b}i"),
    lambda a, b, c: (rf"{a}\pi", rf"\pi\cdot {a}", str(3 * a)),
    lambda a, b, c: (rf"\{{{a},-{b},{a + c}\}}", rf"\{{-{b},{a + c},{a}\}}", rf"\{{{a},{a + c}\}}"),
    lambda a, b, c: (rf"{a}^\circ", str(a), rf"{a + 1}^\circ"),
    lambda a, b, c: (rf"\frac{{{a}}}{{x+{b}}}", rf"{a}(x+{b})^{{-1}}", rf"\frac{{x+{b}}}{{{a}}}"),
    lambda a, b, c: (str(a * b), f"{a * b}.0", str(a * b + 1)),
    lambda a, b, c: (
        rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        rf"\begin{{pmatrix}}{a}\\{2 * b}/2\end{{pmatrix}}",
        rf"\begin{{pmatrix}} {a} \\ {b + 1} \end{{pmatrix}}",
    ),
]


class Case(TypedDict):
    """A response, the expected answer, and whether the response has it."""

    gold: str
    response: str
    right: bool
    label: NotRequired[bool]
    """What an output of a model is labelled, before labels are corrected."""


_MISLABELLED = {
    # The expected text itself, letter by letter.
    *("lo12577", "lo12580", "lo12582", "lo12583"),
    "lo08467",  # an equation whose last side is the expected text
    "lo08647",  # the expected angle, in radians
}
"""Outputs whose label says that they are wrong, although they are right."""


def outputs(path: Path) -> list[Case]:
    """Return outputs of models from a file with the keys `id`, `gold`, `response` and `is_correct`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "gold": row["gold"],
            "response": row["response"],
            "right": row["is_correct"] or row["id"] in _MISLABELLED,
            "label": row["is_correct"],
        }
        for row in rows
    ]


def warm_up(size: int) -> list[Case]:
    """Return other cases than those that are measured."""
    generator = random.Random(1)
    return [_gsm8k(generator) if n % 2 else _math(generator) for n in range(size)]


def batches(size: int) -> dict[str, list[Case]]:
    """Return `size` cases of each kind, the same ones every time."""
    generator = random.Random(0)
    gsm8k = [_gsm8k(generator) for _ in range(size)]
    return {
        "GSM8K-like": gsm8k,
        "MATH-like": [_math(generator) for _ in range(size)],
        "1 % hang": [_hang(generator, case) if n % 100 == 50 else case for n, case in enumerate(gsm8k)],
    }


def _gsm8k(generator: random.Random) -> Case:
    gold = generator.randrange(1, 20_000)
    right = generator.random() < 0.6
    written = f"{gold:,}" if right else str(gold + generator.choice((-10, -1, 1, 10, 100)))
    return {"gold": str(gold), "response": _response(generator, written), "right": right}


def _math(generator: random.Random) -> Case:
    gold, same, other = generator.choice(_MATH)(*(generator.randrange(2, 12) for _ in range(3)))
    right = generator.random() < 0.6
    written = generator.choice((gold, same)) if right else other
    return {"gold": gold, "response": _response(generator, written), "right": right}


def _hang(generator: random.Random, case: Case) -> Case:
    return {"gold": case["gold"], "response": _response(generator, generator.choice(_HANGING)), "right": False}


def _response(generator: random.Random, answer: str) -> str:
    """Some text, and the answer in the form that all graders read."""
    steps = []
    for n in range(1, generator.randrange(3, 10)):
        a, b = generator.randrange(100), generator.randrange(100)
        steps.append(_FILLER.format(n=n, a=a, b=b, c=a + b))
    return "\n".join(steps) + f"\n\nThe final answer is $\\boxed{{{answer}}}$."
