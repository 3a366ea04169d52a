"""Problems to show with the answers before and after: what GRPO put right, what it kept, what it broke."""

from collections.abc import Sequence
from dataclasses import dataclass

from components.report.evaluation import Pair
from components.shared.lineage import value_digest


@dataclass(frozen=True)
class ExampleGroup:
    """Examples of one outcome, out of all that had it."""

    title: str
    total: int
    pairs: list[Pair]


def choose(pairs: Sequence[Pair], number: int) -> list[ExampleGroup]:
    """Return about `number` examples: half put right, a quarter broken, the rest right before and after.

    Drawn by the digest of the problem's id: the same for every run, and no pick of anyone's.
    """
    drawn = sorted(pairs, key=lambda pair: value_digest(pair.first.id))
    put_right, broken = -(-number // 2), number // 4
    shares = {
        (False, True): ("SFT wrong, GRPO right", put_right),
        (True, False): ("SFT right, GRPO wrong", broken),
        (True, True): ("Both right", number - put_right - broken),
    }
    groups = []
    for outcome, (title, share) in shares.items():
        having = [pair for pair in drawn if pair.right == outcome]
        groups.append(ExampleGroup(title, len(having), having[:share]))
    return groups
