"""Built-in word problems: sums of single digits as short stories, reproducible from a seed on any machine."""

import random
from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field, model_validator

from components.prepare_data.source import MAX_DRAWS, BuiltIn, fraction_of
from components.shared.problem import Problem, Split

Family = Literal["total", "gains_and_losses", "shared", "leftovers"]
MAX_OPERANDS = 6
"""Most numbers in a problem: six single digits keep every intermediate result within 0 to 60."""
NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "nuts", "pens", "shells", "stones")
_TEST_FRACTION = 0.2

Chain = tuple[int, ...]
"""A calculation: the first number, then the numbers that are added to it; a negative one is subtracted."""


class WordProblems(BuiltIn):
    """Built-in generated word problems: nothing to download, small enough for a model made from scratch."""

    kind: Literal["word_problems"]
    num_train: int = Field(12000, ge=0)
    """Problems of the train split."""
    num_test: int = Field(600, ge=0)
    """Problems of the test split; none of their calculations occurs in another split."""
    num_dev: int = Field(0, ge=0)
    """Problems of the dev split, which does not change the other splits; none of their calculations occurs in another
    split."""
    worked_fraction: float = Field(0.4, ge=0, le=1)
    """Fraction of the solutions that show their steps; the others are the bare answer."""
    families: list[Family] = Field(list(get_args(Family)), min_length=1)
    """Kinds of problem, in equal shares; each becomes a subject of the scores."""
    min_operands: int = Field(4, ge=2, le=MAX_OPERANDS)
    """Numbers in the easiest problems (level 1); each additional number is another level."""
    max_operands: int = Field(MAX_OPERANDS, ge=2, le=MAX_OPERANDS)
    """Numbers in the hardest problems."""

    @model_validator(mode="after")
    def _operands_are_a_range(self) -> "WordProblems":
        if self.max_operands < self.min_operands:
            raise ValueError("max_operands must not be below min_operands")
        return self

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield the train split, then the others; families and levels take turns within each.

        A hash of the calculation alone decides whether it belongs to the test split, so no calculation of that split
        occurs in another, under any seed, name, thing or family. The dev split has calculations that the train split
        could have, but does not.
        """
        num_levels = self.max_operands - self.min_operands + 1
        trained: set[Chain] = set()
        for split in (Split.TRAIN, Split.TEST, Split.DEV):
            origin = Split.TEST if split == Split.TEST else Split.TRAIN  # `split_of` knows no dev split
            rng = random.Random(f"{seed} {split}")
            seen: set[tuple[Family, Chain]] = set()
            for index in range(self.max_problems(split)):
                family = self.families[index % len(self.families)]
                level = 1 + index // len(self.families) % num_levels
                draws = (_chain(rng, family, self.min_operands + level - 1) for _ in range(MAX_DRAWS))
                allowed = (chain for chain in draws if split_of(chain) == origin and chain not in trained)
                chain = self._first((chain for chain in allowed if (family, chain) not in seen), split, index)
                seen.add((family, chain))
                is_worked = fraction_of(f"worked {seed} {family} {chain}") < self.worked_fraction
                work = _steps(chain) if is_worked else ""
                question = _question(rng, family, chain)
                yield self._problem(split, index, sum(chain), work, question=question, subject=family, level=level)
            if split == Split.TRAIN:
                trained = {chain for _, chain in seen}


def split_of(chain: Chain) -> Split:
    """Return TEST for a calculation that may occur only in the test split, TRAIN for any other."""
    return Split.TEST if fraction_of(f"split {chain}") < _TEST_FRACTION else Split.TRAIN


def _chain(rng: random.Random, family: Family, length: int) -> Chain:
    """Return a random calculation with `length` single digits and the signs of a family; no total is below 0."""
    num_losses = max(1, length // 3) if family == "leftovers" else 0
    signs = [1] * (length - num_losses - 1) + [-1] * num_losses
    if family == "gains_and_losses":
        signs = [rng.choice((1, -1)) for _ in signs]
    total = rng.randint(2, 9)  # "has 1 coins" would not be English
    chain = [total]
    for sign in signs:
        is_gain = sign > 0 or total == 0  # nothing can be lost of 0
        step = rng.randint(1, 9) if is_gain else -rng.randint(1, min(9, total))
        chain.append(step)
        total += step
    return tuple(chain)


def _question(rng: random.Random, family: Family, chain: Chain) -> str:
    """Return a story about a calculation, with random names and a random thing."""
    names = rng.sample(NAMES, 2) if family == "shared" else [rng.choice(NAMES)]
    name, thing, first = names[0], rng.choice(THINGS), chain[0]
    if family == "total":
        return f"{name} has {first} {thing} and gets {_list(chain[1:])} more. Total?"
    if family == "gains_and_losses":
        events = ", ".join(f"{'gets' if step > 0 else 'loses'} {abs(step)}" for step in chain[1:])
        return f"{name} has {first} {thing}, {events}. How many?"
    if family == "shared":
        half = (len(chain) + 1) // 2
        mine, yours = (" and ".join(map(str, part)) for part in (chain[:half], chain[half:]))
        return f"{name} has {mine} {thing}, {names[1]} has {yours}. Together?"
    gains, losses = [step for step in chain if step > 0], [-step for step in chain if step < 0]
    return f"{name} finds {_list(gains)} {thing} and gives away {_list(losses)}. Left?"


def _list(numbers: Chain | list[int]) -> str:
    return ", ".join(map(str, numbers))


def _steps(chain: Chain) -> str:
    """Return a line for each step of a calculation, such as `3+4=7`."""
    lines, total = "", chain[0]
    for step in chain[1:]:
        lines += f"{total}{step:+d}={total + step}\n"
        total += step
    return lines
