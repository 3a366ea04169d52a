"""Exact estimators of what k samples of a problem would score, from the n >= k samples that there are.

Both are the mean over all subsets of k of the n samples, so they are unbiased for k new samples, and deterministic.
Letters: n samples, c of them right, k drawn, v votes for the right answer.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the fraction of the subsets of k samples with at least one right one (Chen et al. 2021, equation 1)."""
    return 1 - comb(n - c, k) / comb(n, k)


@lru_cache(maxsize=8192)  # many problems have the same votes
def maj_at_k(c: int, wrong: tuple[int, ...], num_without_answer: int, k: int) -> float:
    """Return the fraction of the subsets of k samples whose most frequent answer is right.

    `wrong` are the numbers of samples with each wrong answer. A sample without an answer has no vote; where none of the
    k votes, the subset is wrong. Where the right answer ties with t others, the subset counts 1 / (t + 1): the tie is
    broken at random.
    """
    n = c + sum(wrong) + num_without_answer
    wins = 0.0
    for v in range(1, min(c, k) + 1):
        ways = _ways(wrong, num_without_answer, v, k - v)
        wins += comb(c, v) * sum(count / (t + 1) for t, count in enumerate(ways))
    return wins / comb(n, k)


def _ways(wrong: Sequence[int], num_without_answer: int, v: int, size: int) -> list[int]:
    """For each t the ways to draw `size` samples that are not right, t wrong answers v times and none more often.

    Each wrong answer adds a factor to a generating function in two variables: draws and ties.
    """
    rivals = [count for count in wrong if count >= v]
    rest = sum(count for count in wrong if count < v) + num_without_answer  # cannot get v votes, so any draw will do
    ways = [[comb(rest, drawn)] for drawn in range(size + 1)]  # by samples drawn, then by ties
    for count in rivals:
        grown = [[0] * (len(ties) + 1) for ties in ways]
        for drawn, ties in enumerate(ways):
            for votes in range(min(v, size - drawn) + 1):
                factor, tied = comb(count, votes), votes == v
                for t, number in enumerate(ties):
                    grown[drawn + votes][t + tied] += factor * number
        ways = grown
    return ways[size]
