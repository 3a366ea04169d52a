"""Exact estimators of the score of k samples of a problem, from n >= k samples.

Both are the mean over all subsets of k of the n samples, so they are deterministic, and unbiased for k new samples.
Letters: n samples, c of them right; a subset has k samples, v of them right (votes for the right answer).
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

    `wrong` has the number of samples with each wrong answer. Samples without an answer do not vote. If the right answer
    ties with t others, the subset counts 1 / (t + 1), as if the tie were broken at random.
    """
    n = c + sum(wrong) + num_without_answer
    wins = 0.0
    for v in range(1, min(c, k) + 1):
        ways = _ways_by_ties(wrong, num_without_answer, v, k - v)
        wins += comb(c, v) * sum(count / (t + 1) for t, count in enumerate(ways))
    return wins / comb(n, k)


def _ways_by_ties(wrong: Sequence[int], num_without_answer: int, v: int, size: int) -> list[int]:
    """Return a list whose element t counts the draws in which exactly t wrong answers have v votes, and none has more.

    A draw has `size` samples that are not right.
    """
    # Answers with fewer than v samples cannot tie: any draw of them and of samples without an answer is allowed.
    num_harmless = sum(count for count in wrong if count < v) + num_without_answer
    ways = [[comb(num_harmless, num_drawn)] for num_drawn in range(size + 1)]  # ways[num_drawn][t]
    for count in wrong:  # adds in turn each answer with v samples or more, with every number of votes up to v
        if count < v:
            continue
        extended = [[0] * (len(by_ties) + 1) for by_ties in ways]
        for num_drawn, by_ties in enumerate(ways):
            for votes in range(min(v, size - num_drawn) + 1):
                num_ways = comb(count, votes)
                for t, number in enumerate(by_ties):
                    ties = t + 1 if votes == v else t
                    extended[num_drawn + votes][ties] += num_ways * number
        ways = extended
    return ways[size]
