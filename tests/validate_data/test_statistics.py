"""Quantiles of lengths, on numbers whose ranks can be read off."""

import pandas as pd
import pytest

from components.validate_data.statistics import describe


@pytest.mark.parametrize("order", [1, -1])
def test_quantiles_are_those_of_their_names(order: int) -> None:
    """Of the lengths 0 to 100 in any order the median is 50 and the 95th percentile 95."""
    lengths = list(range(101))[::order]
    frame = pd.DataFrame({"worked": True, "prompt_tokens": lengths, "solution_tokens": [2 * each for each in lengths]})
    described = describe(frame, [])
    found = {name: described["prompt_tokens"][name] for name in ("min", "median", "p95", "max")}
    assert found == {"min": 0, "median": 50, "p95": 95, "max": 100}
    assert described["solution_tokens"]["p95"] == 190
