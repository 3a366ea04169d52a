"""Built-in problems for a model with a calculator: products of two-digit numbers, reproducible from a seed.

A small model cannot compute the answers itself, but it can copy the numbers into calls.
"""

import random
from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from components.prepare_data.source import MAX_DRAWS, BuiltIn, fraction_of
from components.prepare_data.word_problems import NAMES, THINGS
from components.shared.problem import Problem, Split

CalculatorFamily = Literal["boxes", "more", "fewer", "more_and_fewer"]
_SIGNS = {"boxes": "", "more": "+", "fewer": "-", "more_and_fewer": "+-"}
"""Signs of the numbers that are added to or subtracted from the product."""
_SMALLEST_FACTOR, _SMALLEST_CHANGE, _LARGEST = 32, 12, 99
"""Limits of the factors and of the numbers added or subtracted: two digits each."""
_RESULTS = range(1_000, 10_000)
"""Results of calls: four digits each, so that a small model copies over a constant distance."""
_TEST_FRACTION, _DEV_FRACTION = 0.2, 0.1

Numbers = tuple[int, ...]
"""The numbers of a question, in order."""


class CalculatorProblems(BuiltIn):
    """Built-in generated problems whose solutions call a calculator, in one to three turns: nothing to download."""

    kind: Literal["calculator_problems"]
    num_train: int = Field(8000, ge=0)
    """Problems of the train split."""
    num_test: int = Field(600, ge=0)
    """Problems of the test split; none of their products occurs in another split."""
    num_dev: int = Field(0, ge=0)
    """Problems of the dev split; none of their products occurs in another split."""
    worked_fraction: float = Field(0.4, ge=0, le=1)
    """Fraction of the solutions that call the calculator (`call_format: fenced`); the others are the bare answer."""
    families: list[CalculatorFamily] = Field(list(get_args(CalculatorFamily)), min_length=1)
    """Kinds of problem, in equal shares; each becomes a subject of the scores. The level of a problem is the number of
    its calls: one for `boxes`, three for `more_and_fewer`."""

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield the train split, then the others; families take turns within each.

        A hash of the product alone decides its split, so no product of one split occurs in another, under any seed,
        name, thing or family.
        """
        for split in (Split.TRAIN, Split.TEST, Split.DEV):
            rng = random.Random(f"{seed} {split}")
            seen: set[tuple[CalculatorFamily, Numbers]] = set()
            for index in range(self.max_problems(split)):
                family = self.families[index % len(self.families)]
                draws = filter(None, (_draw(rng, family, split) for _ in range(MAX_DRAWS)))
                numbers = self._first((each for each in draws if (family, each) not in seen), split, index)
                seen.add((family, numbers))
                calls = _calls(family, numbers)
                _, answer = calls[-1]
                work = ""
                if fraction_of(f"worked {seed} {family} {numbers}") < self.worked_fraction:
                    for expression, result in calls:
                        work += f"```calculator\n{expression}\n```\n```output\n{result}\n```\n"
                question = _question(rng, family, numbers)
                yield self._problem(split, index, answer, work, question=question, subject=family, level=len(calls))


def split_of(factor: int, other: int) -> Split:
    """Return the split in which a product may occur; the order of the factors does not matter."""
    fraction = fraction_of(f"product {min(factor, other)} {max(factor, other)}")
    if fraction < _TEST_FRACTION:
        return Split.TEST
    return Split.DEV if fraction < _TEST_FRACTION + _DEV_FRACTION else Split.TRAIN


def _draw(rng: random.Random, family: CalculatorFamily, split: Split) -> Numbers | None:
    """Draw the numbers of a question; None if their product belongs to another split or a result is not in range."""
    minima = [_SMALLEST_FACTOR] * 2 + [_SMALLEST_CHANGE] * len(_SIGNS[family])
    numbers = tuple(rng.randint(minimum, _LARGEST) for minimum in minima)
    if split_of(*numbers[:2]) != split or any(result not in _RESULTS for _, result in _calls(family, numbers)):
        return None
    return numbers


def _question(rng: random.Random, family: CalculatorFamily, numbers: Numbers) -> str:
    """Return a story about a product and changes of it, with a random name and thing."""
    first, second, *changes = numbers
    parts = [f"{rng.choice(NAMES)} packs {first} boxes of {second} {rng.choice(THINGS)}"]
    for sign, change in zip(_SIGNS[family], changes, strict=True):
        parts.append(f"finds {change} more" if sign == "+" else f"loses {change} of them")
    return f"{' and '.join(parts)}. How many?"


def _calls(family: CalculatorFamily, numbers: Numbers) -> list[tuple[str, int]]:
    """Return the calls that answer a question, each with its expression and its result."""
    first, second, *changes = numbers
    result = first * second
    calls = [(f"{first}*{second}", result)]
    for sign, change in zip(_SIGNS[family], changes, strict=True):
        expression = f"{result}{sign}{change}"
        result += change if sign == "+" else -change
        calls.append((expression, result))
    return calls
