"""The scores of hand-made records, and the estimators against an enumeration of all subsets."""

import random
from fractions import Fraction
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from components.evaluate.estimators import maj_at_k, pass_at_k
from components.evaluate.scores import scores
from components.shared.statistics import mean_interval, score, wilson_interval


def _record(number: int, sample: int, verdict: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "id": f"p{number}",
        "source": "sums" if number < 4 else "words",
        "subject": "",
        "level": 1 + number % 2,
        "question": "how many " * (10 * number + 1),
        "num_steps": None if number == 4 else 3 * number,
        "sample": sample,
        "extracted": "5" if verdict == "right" else "6",
        "verdict": verdict,
        "reason": {"right": "same number", "wrong": "different number"}.get(verdict, "time"),
        "flexible": {"extracted": "5", "verdict": verdict},
        "num_tokens": 10 * (number + 1),
        "finished": number != 2,
        "worked": number == 0,
    }
    return {**fields, **changes}


GREEDY = [
    _record(0, 0, "right"),
    _record(1, 0, "wrong", extracted=None, flexible={"extracted": "5", "verdict": "right"}),
    _record(2, 0, "unscorable", extracted=None),
    _record(3, 0, "right"),
    _record(4, 0, "wrong", subject="shared"),
]
SAMPLED = [
    *(_record(0, sample, "right") for sample in (1, 2, 3, 4)),
    _record(1, 1, "right"),
    *(_record(1, sample, "wrong", extracted=answer) for sample, answer in ((2, "1/2"), (3, r"\frac{1}{2}"), (4, None))),
]


def test_greedy_scores_by_hand() -> None:
    """Correct, total, accuracy and Wilson's interval of all and of each group; means over greedy records."""
    summary = scores(GREEDY + SAMPLED, num_samples=4, temperature=1.0)
    greedy = summary["greedy"]
    assert greedy["all"] == {"correct": 2, "total": 5, "accuracy": 0.4, "interval": list(wilson_interval(2, 5))}
    assert greedy["by_source"] == {"sums": score(2, 4), "words": score(0, 1)}
    assert greedy["by_subject"] == {"sums": {}, "words": {"shared": score(0, 1)}}
    for name, totals in {
        "by_level": {"1": 2, "2": 2},
        "by_length": {"0-24": 2, "25-49": 1, "50-99": 1},
        "by_steps": {"0": 1, "3": 1, "6": 1, "8+": 1},
    }.items():
        groups = [(group, each["total"]) for group, each in greedy[name]["sums"].items()]
        assert groups == list(totals.items())
    assert greedy["by_steps"]["words"] == {}
    assert summary["mean_length_tokens"] == pytest.approx(30)
    assert summary["worked_fraction"] == summary["truncated_fraction"] == pytest.approx(1 / 5)


def test_flexible_scores_and_counts_stand_beside_strict_ones() -> None:
    """In the same tables, the sampled answers included; a truncated answer is not unanswered as well."""
    summary = scores(GREEDY + SAMPLED, num_samples=4, temperature=1.0)
    assert summary["flexible"]["by_source"]["sums"]["correct"] == 3
    kept = {key: value for key, value in summary["sampled"].items() if key not in {"num_samples", "temperature"}}
    assert summary["flexible"]["sampled"] == kept
    for key in ("truncated", "unanswered", "unscorable"):
        share = {"count": 1, "total": 4, "fraction": 0.25, "interval": list(wilson_interval(1, 4))}
        assert summary[key]["by_source"]["sums"] == share
        assert summary[key]["by_source"]["words"]["count"] == 0
        assert summary[key]["all"]["fraction"] == 0.2
    greedy_only = scores(GREEDY, num_samples=0, temperature=1.0)
    assert greedy_only["flexible"]["sampled"] is None
    assert greedy_only["sampled"] is greedy_only["pass_at_k"] is greedy_only["maj_at_k"] is None


def test_sampled_answers_are_averaged_over_problems() -> None:
    """Four samples of two problems, five right."""
    summary = scores(GREEDY + SAMPLED, num_samples=4, temperature=1.0)
    sampled = summary["sampled"]
    assert (sampled["num_samples"], sampled["temperature"]) == (4, 1.0)
    expected = {"accuracy": 0.625, "interval": list(mean_interval([1, 0.25], 8)), "problems": 2}
    assert sampled["by_source"]["sums"] == {**expected, "samples": 8}
    assert summary["pass_at_k"]["by_source"]["sums"]["1"] == expected
    passed = {k: each["accuracy"] for k, each in summary["pass_at_k"]["by_level"]["sums"]["2"].items()}
    assert passed == {"1": 0.25, "2": 0.5, "4": 1.0}
    pairs = summary["pass_at_k"]["by_source"]["sums"]["2"]
    assert pairs["interval"] == list(mean_interval([1, 0.5], 4)), "eight answers are four pairs"
    few = [_record(1, sample, "right") for sample in (1, 2, 3)]
    passed = scores(GREEDY + few, num_samples=3, temperature=1.0)["pass_at_k"]["all"]
    assert list(passed) == ["1", "2"], "three samples of one problem limit k for all"


def test_a_wrong_answer_in_two_notations_is_one_vote_and_no_answer_is_none() -> None:
    """A half beats five by two votes to one; of two samples each wins where it is drawn twice, alone, or by chance."""
    majority = scores(GREEDY + SAMPLED, num_samples=4, temperature=1.0)["maj_at_k"]["by_level"]["sums"]["2"]
    assert {k: each["accuracy"] for k, each in majority.items()} == {
        "1": 0.25,
        "2": pytest.approx((1 / 2 + 1 / 2 + 1) / 6),  # with either half, and with the one that has no answer
        "4": 0.0,
    }


def _votes() -> list[tuple[list[int], int]]:
    """Votes for the right answer, then for each wrong one, and samples without an answer: all kinds of ties."""
    draw = random.Random(0)
    some = [([draw.randint(0, 4) for _ in range(draw.randint(1, 5))], draw.randint(0, 2)) for _ in range(40)]
    return [([2, 2, 2], 0), ([0, 1], 0), ([3], 2), ([0], 3), *(case for case in some if sum(case[0]) + case[1])]


def test_estimators_agree_with_all_subsets() -> None:
    """For every k, with ties broken evenly and samples that have no answer."""
    for votes, silent in _votes():
        answers = [answer for answer, count in enumerate(votes) for _ in range(count)] + [None] * silent
        for k in range(1, len(answers) + 1):
            subsets = list(combinations(answers, k))
            passed = fmean(0 in subset for subset in subsets)
            assert pass_at_k(len(answers), votes[0], k) == pytest.approx(passed)
            won = sum(_share_of_right(subset) for subset in subsets) / len(subsets)
            assert maj_at_k(votes[0], tuple(votes[1:]), silent, k) == pytest.approx(float(won)), (votes, silent, k)


def _share_of_right(subset: tuple[int | None, ...]) -> Fraction:
    """The probability that a random one of the most frequent answers is the right one, 0."""
    counts = {answer: subset.count(answer) for answer in set(subset) - {None}}
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction(int(0 in first), len(first) or 1)


def test_reasons_are_counted_by_verdict_and_source() -> None:
    """Reasons of the greedy answers, the most frequent first."""
    echo = _record(3, 0, "wrong", reason="echoes the question")
    reasons = scores(
        [*GREEDY[:3], echo, _record(4, 0, "right"), _record(1, 1, "right")], num_samples=1, temperature=1.0
    )["reasons"]
    assert reasons["all"] == {
        "right": {"same number": 2},
        "wrong": {"different number": 1, "echoes the question": 1},
        "unscorable": {"time": 1},
    }
    assert reasons["by_source"]["words"] == {"right": {"same number": 1}, "wrong": {}, "unscorable": {}}
