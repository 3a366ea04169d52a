"""The figures of a version that can be sorted and filtered by."""

from typing import Any

from components.register.catalogue import scores


def score(correct: int, total: int) -> dict[str, Any]:
    """An accuracy with its counts."""
    return {"correct": correct, "total": total, "accuracy": correct / total}


def test_the_accuracy_on_several_targets_counts_problems() -> None:
    """The large source counts for more than the small one; other sources do not count, and each has its own figure."""
    of_source = {"large": score(90, 900), "small": score(90, 100), "other": score(0, 500)}
    target = {"source": "large + small", "sources": ["large", "small"], "gain": 0.1, "p_value": 0.01}
    verdict = {"passed": True, "target": {**target, "grpo": score(180, 1000)}}
    found = scores(verdict, {"models": {"grpo": of_source}})
    assert found["accuracy_grpo"] == 0.18
    assert (found["accuracy_grpo.large"], found["accuracy_grpo.small"], found["accuracy_grpo.other"]) == (0.1, 0.9, 0.0)
    assert found["num_test_problems"] == 1000
