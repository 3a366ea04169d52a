"""Built-in word problems: sums of single digits told as little stories, the same for the same seed everywhere."""

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import accumulate

from components.prepare_data.config import Family, WordProblemsConfig
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

SOURCE = "word_problems"
_NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Sam", "Tom", "Zoe")
_THINGS = ("apples", "books", "cards", "coins", "nuts", "pens", "shells", "stones")
_TEST_SHARE = 0.2
_MAX_MISSES = 20_000
"""Draws in a row without a new problem after which there are taken to be no more."""

Chain = tuple[int, ...]
"""A calculation: the first number, then what is added to it or, below zero, taken away."""


def word_problems(config: WordProblemsConfig, seed: int) -> Iterator[Problem]:
    """Yield the train split, then the test split; families and levels take turns within each.

    Whether a calculation belongs to train or test is decided by its digest alone, so no calculation of the test
    split occurs in the train split, under any seed, name, thing or family.
    """
    yield from _split(config, seed, Split.TRAIN, config.num_train)
    yield from _split(config, seed, Split.TEST, config.num_test)


def split_of(chain: Chain) -> Split:
    """Return the only split in which a calculation may occur."""
    return Split.TEST if _share(f"split {chain}") < _TEST_SHARE else Split.TRAIN


def _split(config: WordProblemsConfig, seed: int, split: Split, count: int) -> Iterator[Problem]:
    random_ = random.Random(f"{seed} {split}")
    levels = config.max_operands - config.min_operands + 1
    seen: set[tuple[Family, Chain]] = set()
    for index in range(count):
        family = config.families[index % len(config.families)]
        level = 1 + index // len(config.families) % levels
        chain = _new_chain(random_, family, config.min_operands + level - 1, split, seen)
        if chain is None:
            raise PipelineError(
                f"prepare_data.sources: word_problems: num_{split} is {count}, but only {index} distinct ones exist in "
                "equal shares of families and levels; ask for fewer or raise max_operands"
            )
        seen.add((family, chain))
        worked = _share(f"worked {seed} {family} {chain}") < config.worked_fraction
        yield Problem(
            id=f"{SOURCE}/{split}/{index:05d}",
            source=SOURCE,
            split=split,
            question=_QUESTIONS[family](random_, chain),
            solution=_worked(chain) if worked else _bare(chain),
            answer=str(sum(chain)),
            subject=family,
            level=level,
        )


def _new_chain(
    random_: random.Random, family: Family, length: int, split: Split, seen: set[tuple[Family, Chain]]
) -> Chain | None:
    for _ in range(_MAX_MISSES):
        chain = _chain(random_, _signs(random_, family, length))
        if split_of(chain) == split and (family, chain) not in seen:
            return chain
    return None


def _signs(random_: random.Random, family: Family, length: int) -> list[int]:
    """Whether each number is added (1) or taken away (-1)."""
    if family == "gains_and_losses":
        return [1, *(random_.choice((1, -1)) for _ in range(length - 1))]
    num_losses = length // 3 or 1
    return [1] * (length - num_losses) + [-1] * num_losses if family == "leftovers" else [1] * length


def _chain(random_: random.Random, signs: list[int]) -> Chain:
    """Single digits with these signs, except that nothing is taken away where nothing is left."""
    total = random_.randint(2, 9)  # "has 1 coins" would not be English
    chain = [total]
    for sign in signs[1:]:
        step = random_.randint(1, 9) if sign > 0 or total == 0 else -random_.randint(1, min(9, total))
        chain.append(step)
        total += step
    return tuple(chain)


def _total(random_: random.Random, chain: Chain) -> str:
    name, thing = random_.choice(_NAMES), random_.choice(_THINGS)
    return f"{name} has {chain[0]} {thing} and gets {_list(chain[1:])} more. Total?"


def _gains_and_losses(random_: random.Random, chain: Chain) -> str:
    name, thing = random_.choice(_NAMES), random_.choice(_THINGS)
    events = ", ".join(f"{'gets' if step > 0 else 'loses'} {abs(step)}" for step in chain[1:])
    return f"{name} has {chain[0]} {thing}, {events}. How many?"


def _shared(random_: random.Random, chain: Chain) -> str:
    (one, other), thing = random_.sample(_NAMES, 2), random_.choice(_THINGS)
    half = (len(chain) + 1) // 2
    first, second = (" and ".join(map(str, part)) for part in (chain[:half], chain[half:]))
    return f"{one} has {first} {thing}, {other} has {second}. Together?"


def _leftovers(random_: random.Random, chain: Chain) -> str:
    name, thing = random_.choice(_NAMES), random_.choice(_THINGS)
    found = [step for step in chain if step > 0]
    lost = [-step for step in chain if step < 0]
    return f"{name} finds {_list(found)} {thing} and gives away {_list(lost)}. Left?"


_QUESTIONS: dict[Family, Callable[[random.Random, Chain], str]] = {
    "total": _total,
    "gains_and_losses": _gains_and_losses,
    "shared": _shared,
    "leftovers": _leftovers,
}


def _list(numbers: Chain | list[int]) -> str:
    return ", ".join(map(str, numbers))


def _bare(chain: Chain) -> str:
    return f"#### {sum(chain)}"


def _worked(chain: Chain) -> str:
    """One addition or subtraction per line, then the answer."""
    totals = list(accumulate(chain))
    steps = [f"{before}{step:+d}={after}\n" for before, step, after in zip(totals, chain[1:], totals[1:], strict=False)]
    return "".join(steps) + _bare(chain)


def _share(text: str) -> float:
    """A number from 0 to 1 that `text` alone determines."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
