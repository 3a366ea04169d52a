from typing import Any

import pytest

from components.evaluate.scores import scores
from components.shared.statistics import wilson_interval


def _record(number: int, sample: int, verdict: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "id": f"p{number}",
        "source": "sums" if number < 4 else "words",
        "subject": "",
        "level": 1 + number % 2,
        "sample": sample,
        "verdict": verdict,
        "num_tokens": 10 * (number + 1),
        "finished": number != 2,
        "worked": number == 0,
    }
    return {**fields, **changes}


RECORDS = [
    _record(0, 0, "right"),
    _record(1, 0, "wrong"),
    _record(2, 0, "unscorable"),
    _record(3, 0, "right"),
    _record(4, 0, "wrong", subject="shared"),
    *(_record(0, sample, "right") for sample in (1, 2)),
    *(_record(1, sample, verdict) for sample, verdict in ((1, "right"), (2, "wrong"))),
]


def test_scores_by_hand() -> None:
    """Correct, total, accuracy and Wilson's interval by source, subject and level."""
    found = scores(RECORDS, num_samples=2, temperature=1.0)
    greedy = found["greedy"]
    assert greedy["all"] == {"correct": 2, "total": 5, "accuracy": 0.4, "interval": list(wilson_interval(2, 5))}
    assert {source: (each["correct"], each["total"]) for source, each in greedy["by_source"].items()} == {
        "sums": (2, 4),
        "words": (0, 1),
    }
    assert greedy["by_subject"] == {"sums": {}, "words": {"shared": greedy["by_source"]["words"]}}
    assert {level: each["total"] for level, each in greedy["by_level"]["sums"].items()} == {"1": 2, "2": 2}


def test_what_is_said_of_the_greedy_answers_is_of_all_of_them() -> None:
    """Length, worked and truncated shares are means over greedy records; unscorable ones are counted."""
    found = scores(RECORDS, num_samples=2, temperature=1.0)
    assert found["mean_length_tokens"] == pytest.approx(30)
    assert found["worked_fraction"] == pytest.approx(1 / 5)
    assert found["truncated_fraction"] == pytest.approx(1 / 5)
    assert found["unscorable"] == 1


def test_drawn_answers_are_averaged_over_problems() -> None:
    """Two samples of two problems, three of them right: 75 %, of two problems and four samples."""
    sampled = scores(RECORDS, num_samples=2, temperature=1.0)["sampled"]
    assert (sampled["num_samples"], sampled["temperature"]) == (2, 1.0)
    found = sampled["by_source"]["sums"]
    assert (found["accuracy"], found["problems"], found["samples"]) == (0.75, 2, 4)
    assert found["interval"][0] < 0.75 < found["interval"][1]


def test_without_drawn_answers_there_is_nothing_to_say_of_them() -> None:
    """The key is there and null, so that nobody takes a missing sweep for a bad one."""
    assert scores(RECORDS[:5], num_samples=0, temperature=1.0)["sampled"] is None
