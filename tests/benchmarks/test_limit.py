"""The arithmetic limit that the benchmark compares with."""

import importlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules are found beside its script, not in a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("case")


@pytest.fixture
def limit(case: Any) -> Any:
    """See `case`."""
    return importlib.import_module("limit")


def test_operations_are_those_counted_by_hand(case: Any, limit: Any) -> None:
    """Two prompts of 3 tokens, four completions of 4, 26 parameters with 7 x 3 of the head, two layers of width 3."""
    config = SimpleNamespace(num_hidden_layers=2, hidden_size=3, vocab_size=7)
    # 22 tokens at 2 x 5 each, 16 of them at 2 x 21 more.
    # Prompt tokens see 1, 2, 3 keys, those of a completion 4, 5, 6, 7: 2 x 6 + 4 x 22 = 100.
    by_hand = 22 * 2 * 5 + 16 * 2 * 21 + 100 * 4 * 2 * 3
    forward = limit.forward_flops(config, case.Row.parse("2x2:3/4"), num_parameters=26)
    assert forward == by_hand
    assert limit.update_operations(forward) == 4 * by_hand
    assert limit.step_operations(forward) == 5 * by_hand


def test_a_range_spreads_lengths_evenly_in_a_fixed_order(case: Any) -> None:
    """Every step between neighbouring lengths is the same but for rounding, and both ends are there."""
    lengths = case.Row.parse("4x8:117/16-256").lengths_B()
    ordered = sorted(lengths)
    steps = [after - before for before, after in pairwise(ordered)]
    assert (len(lengths), ordered[0], ordered[-1]) == (32, 16, 256)
    assert max(steps) - min(steps) <= 1
    assert lengths != ordered
    assert lengths == case.Row.parse("4x8:117/16-256").lengths_B()


@pytest.mark.parametrize("text", ["4x8:117/64", "2x16:464/16-64"])
def test_rows_are_named_as_they_are_written(case: Any, text: str) -> None:
    """What a person asks for is what the results call it."""
    assert str(case.Row.parse(text)) == text


@pytest.mark.parametrize("text", ["4x8", "4x8:117", "4x8:117/64-", "x:1/1", "4x8:117/64 "])
def test_other_texts_are_no_rows(case: Any, text: str) -> None:
    """The message shows what is expected."""
    with pytest.raises(ValueError, match="4x8:117/64"):
        case.Row.parse(text)
