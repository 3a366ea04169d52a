"""Problems to validate: a few sums, good until a test spoils them."""

from typing import Any

from components.shared.problem import Problem, Split

PARAMS: dict[str, Any] = {
    "model": {"base": "scratch:tiny", "prompt": "{question}\n", "answer": "declared"},
    "max_prompt_tokens": 60,
    "max_solution_tokens": 60,
    "min_within_limit_fraction": 0.9,
    "min_train_rows": 20,
    "min_test_rows": 10,
    "max_answer_share": 0.2,
    "min_worked_fraction": 0.3,
}


def problem(split: Split, number: int) -> Problem:
    """Return a sum that no other number has, with its work."""
    left = 2 * number + (split == Split.TEST)
    return Problem(
        id=f"sums/{split}/{number}",
        source="sums",
        split=split,
        question=f"What is {left} + 1?",
        solution=f"{left} + 1 = {left + 1}\n#### {left + 1}",
        answer=str(left + 1),
        subject="",
        level=None,
    )
