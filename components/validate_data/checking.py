"""Runs expectations with Great Expectations, which takes seconds to import: only the check itself imports this."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from components.shared.errors import PipelineError
from components.validate_data.frame import LABEL

os.environ["GX_ANALYTICS_ENABLED"] = "false"  # the library reads it when it is imported
import great_expectations as gx
from great_expectations.data_context.types.base import ProgressBarsConfig

_MAX_EXAMPLES = 10


@dataclass(frozen=True)
class Outcome:
    """The result of one expectation."""

    name: str
    title: str
    severity: str
    success: bool
    checked: int
    """Number of rows to which it applies."""
    unexpected: int | None = None
    """Number of rows that do not meet it; None if it is about a split as a whole."""
    unexpected_percent: float | None = None
    examples: Sequence[str] = ()
    """Labels of the first unexpected rows."""
    detail: str = ""
    """What is wrong with the first unexpected row, or with the split; empty for success."""


def check(frame: pd.DataFrame, expectations: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Return the outcome of each expectation, in the same order; PipelineError if one could not be evaluated."""
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    # Great Expectations hashes all its data more than once, so it gets only the columns that are needed.
    columns = dict.fromkeys([LABEL, *(each["kwargs"]["column"] for each in expectations)])
    validation = context.data_sources.pandas_default.read_dataframe(frame[list(columns)]).validate(
        gx.ExpectationSuite(name="problems", expectations=list(expectations)),
        result_format={"result_format": "COMPLETE", "unexpected_index_column_names": [LABEL]},
    )
    outcomes = [_outcome(result.to_json_dict(), frame) for result in validation.results]
    # The results may come in another order.
    by_name = {outcome.name: outcome for outcome in outcomes}
    return [by_name[each["meta"]["name"]] for each in expectations]


def _outcome(result: Mapping[str, Any], frame: pd.DataFrame) -> Outcome:
    """Return the outcome in a result of Great Expectations; PipelineError if it has none."""
    expectation, counts = result["expectation_config"], result["result"]
    name, title, template = (expectation["meta"][key] for key in ("name", "title", "detail"))
    reason = _exception(result["exception_info"])
    if reason:
        raise PipelineError(f"expectation `{name}` could not be evaluated, so the data were not judged: {reason}")
    outcome = partial(Outcome, name, title, expectation["severity"], result["success"])
    if "unexpected_count" not in counts:  # the expectation is about the sum of a column
        rows = counts["observed_value"]
        return outcome(checked=rows, detail="" if result["success"] else f"{rows:,} rows")
    checked, unexpected = counts["element_count"] - counts["missing_count"], counts["unexpected_count"]
    labels = [row[LABEL] for row in counts.get("unexpected_index_list") or []]
    return outcome(
        checked,
        unexpected,
        unexpected_percent=round(100 * unexpected / max(checked, 1), 4),
        examples=list(dict.fromkeys(labels[:_MAX_EXAMPLES])),
        detail=template.format(**frame[frame[LABEL] == labels[0]].iloc[0]) if labels else "",
    )


def _exception(info: Mapping[str, Any]) -> str:
    """Return the first line of the first exception in `info`, one report or several by metric; "" without one."""
    reports = [info] if "raised_exception" in info else info.values()
    messages = [str(report["exception_message"]).strip() for report in reports if report["raised_exception"]]
    return messages[0].partition("\n")[0] if messages else ""
