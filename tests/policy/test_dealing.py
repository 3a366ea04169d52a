import random
from collections import Counter

import pytest
import torch

from components.policy.packing import Shard, TokenSequence, pack_shard
from components.policy.parallel import SINGLE_PROCESS, Ranks

CPU = torch.device("cpu")


def _rollout(num_groups: int, group_size: int, seed: int = 1) -> list[TokenSequence]:
    lengths = random.Random(seed)
    return [
        TokenSequence((number, *range(lengths.randint(1, 9))), tuple(range(lengths.randint(1, 30))))
        for number in range(num_groups)
        for _ in range(group_size)
    ]


def _grouped(num_groups: int, group_size: int) -> list[TokenSequence]:
    """Groups that share a prompt."""
    each = _rollout(num_groups, group_size)
    return [TokenSequence(each[n - n % group_size].prompt_ids, each[n].completion_ids) for n in range(len(each))]


class _Together(Ranks):
    """A process that is told how many micro-batches another has."""

    most = 0

    def all_gather(self, value: object, what: str) -> list[object]:  # type: ignore[override]
        del what
        return [value, self.most]


def _deal_to(size: int, sequences: list[TokenSequence], chosen: list[int]) -> list[Shard]:
    def share(rank: int, most: int) -> Shard:
        ranks = _Together(rank, size)
        ranks.most = most
        return pack_shard(ranks, sequences, max_tokens=64, device=CPU, indices=chosen)

    most = max(len(share(rank, 0).batches) for rank in range(size))
    return [share(rank, most) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_completion_is_dealt_out_once(size: int) -> None:
    """To one process, in as many passes for each of them; what is not chosen to none."""
    sequences = _grouped(7, 4)
    chosen = [number for number in range(28) if number % 5]
    shares = _deal_to(size, sequences, chosen)
    dealt = Counter(number for share in shares for batch in share.batches for number in set(batch.sequence_N.tolist()))
    assert dealt == Counter(chosen)
    assert len({len(share.all_batches) for share in shares}) == 1


def test_the_shares_are_about_as_large() -> None:
    """No process has more than the largest group beyond another."""
    sequences = _grouped(24, 4)
    shares = _deal_to(4, sequences, list(range(96)))
    loads = [sum(len(batch.target_N) for batch in share.batches) for share in shares]
    largest = max(sum(len(each.completion_ids) for each in sequences[start : start + 4]) for start in range(0, 96, 4))
    assert max(loads) - min(loads) <= 1.5 * largest


def test_the_largest_groups_are_dealt_first() -> None:
    """Four groups of 10 tokens and then one of 40: in the order they come, one process would have 60 and one 20."""
    sequences = [TokenSequence((number,), tuple(range(length))) for number, length in enumerate([9, 9, 9, 9, 39])]
    shares = _deal_to(2, sequences, list(range(5)))
    assert [sum(len(batch.input_ids_T) for batch in share.batches) for share in shares] == [40, 40]


def test_a_process_without_a_group_keeps_the_others_company() -> None:
    """Its passes are of something short, and none of them counts."""
    shares = _deal_to(3, _grouped(2, 2), [0, 1, 2, 3])
    idle = [share for share in shares if not share.batches]
    assert len(idle) == 1
    assert idle[0].all_batches == idle[0].dummies != []


def test_one_process_has_it_all() -> None:
    """And nobody to keep company."""
    share = pack_shard(SINGLE_PROCESS, _grouped(3, 2), max_tokens=64, device=CPU, indices=range(6))
    assert share.dummies == []
    assert {number for batch in share.batches for number in batch.sequence_N.tolist()} == set(range(6))
