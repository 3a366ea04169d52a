"""The section `prepare_data`: what is refused, and in which words."""

from typing import Any

import pytest

from components.prepare_data.config import PrepareConfig
from components.shared.config import validate
from components.shared.errors import PipelineError

_WORDS: dict[str, Any] = {
    "kind": "word_problems",
    "num_train": 10,
    "num_test": 5,
    "worked_fraction": 0.5,
    "families": ["total"],
    "min_operands": 3,
    "max_operands": 4,
}
_SECTION: dict[str, Any] = {
    "seed": 1,
    "sources": [_WORDS],
    "max_malformed_fraction": 0.01,
    "contamination": {"ngram_words": 13, "max_overlap": 0.5},
}


def test_numbers_may_come_as_kubeflow_sends_them() -> None:
    """A task's parameters arrive as floats; whole ones are whole numbers."""
    section = _SECTION | {"seed": 1.0, "sources": [_WORDS | {"num_train": 10.0, "max_operands": 4.0}]}
    assert validate(PrepareConfig, section, name="prepare_data") == PrepareConfig.model_validate(_SECTION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "prepare_data.sources: list should have at least 1 item"),
        ({"sources": [{"kind": "gsm9k"}]}, "expected tags: 'gsm8k', 'math', 'math500', 'mbpp', 'word_problems'"),
        ({"sources": [{"kind": "gsm8k"}]}, "has neither a `train` nor a `test` path"),
        ({"sources": [{"kind": "gsm8k", "train": "a", "train_limit": 0}]}, "greater than or equal to 1, got 0"),
        ({"sources": [_WORDS, _WORDS]}, "prepare_data.sources: `word_problems` occurs twice"),
        ({"sources": [_WORDS | {"min_operands": 5}]}, "max_operands must not be below min_operands (5)"),
        ({"sources": [_WORDS | {"max_operands": 7}]}, "max_operands: input should be less than or equal to 6, got 7"),
        ({"sources": [_WORDS | {"families": ["total", "total"]}]}, "families must not name a family twice"),
        ({"sources": [_WORDS | {"families": ["totals"]}]}, "'total', 'gains_and_losses', 'shared' or 'leftovers'"),
        ({"sources": [_WORDS | {"num_train": 0, "num_test": 0}]}, "num_train and num_test must not both be 0"),
        ({"max_malformed_fraction": 1}, "prepare_data.max_malformed_fraction: input should be less than 1, got 1"),
        ({"contamination": {"max_overlap": 2}}, "prepare_data.contamination.max_overlap: input should be less than or"),
    ],
)
def test_a_wrong_section_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    """The key is named together with what would be accepted."""
    with pytest.raises(PipelineError) as refused:
        validate(PrepareConfig, _SECTION | change, name="prepare_data")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
