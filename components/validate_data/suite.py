"""Great Expectations, asked: the expectations as a suite over the frame, its answers as outcomes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from components.shared.errors import PipelineError
from components.validate_data.expectations import Expectation, Severity
from components.validate_data.frame import LABEL

_MAX_EXAMPLES = 10
_IN_WORDS = {
    "answer": "answer {}",
    "grade": "graded {}",
    "prompt_tokens": "{} tokens",
    "solution_tokens": "{} tokens",
    "twin": "as {}",
    "test_twin": "as {}",
    "answer_share": "{:.2%} of its split",
}
"""How a column's value reads beside a row; others speak for themselves."""


@dataclass(frozen=True)
class Outcome:
    """What became of one expectation."""

    name: str
    title: str
    severity: Severity
    success: bool
    checked: int
    """Rows that it concerns."""
    unexpected: int | None
    """Rows that do not meet it; None where it is about a split as a whole."""
    unexpected_percent: float | None
    examples: list[str]
    """Labels of the first of these rows."""
    detail: str
    """What is wrong, in a few words; empty where all is well."""


def run(frame: pd.DataFrame, expectations: Sequence[Expectation]) -> list[Outcome]:
    """Return the outcome of each expectation, in the same order.

    A check that cannot be carried out is an error of its own, never an outcome: it says nothing about the data.
    """
    concerned = [expectation for expectation in expectations if frame[expectation.rule.column].notna().any()]
    results = {result["expectation_config"]["meta"]["name"]: result for result in _ask(frame, concerned)}
    return [_outcome(expectation, results.get(expectation.name), frame) for expectation in expectations]


def _ask(frame: pd.DataFrame, expectations: Sequence[Expectation]) -> Iterator[dict[str, Any]]:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx  # seconds to import, and no other stage needs it
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_pandas("problems").add_dataframe_asset(name="frame")
    suite = gx.ExpectationSuite(name="problems", expectations=[_translated(gx, each) for each in expectations])
    definition = gx.ValidationDefinition(
        name="problems", data=asset.add_batch_definition_whole_dataframe("all"), suite=context.suites.add(suite)
    )
    answer = context.validation_definitions.add(definition).run(
        batch_parameters={"dataframe": frame},
        result_format={"result_format": "COMPLETE", "unexpected_index_column_names": [LABEL]},
    )
    for result in answer.results:
        yield result.to_json_dict()


def _translated(gx: Any, expectation: Expectation) -> Any:
    rule = expectation.rule
    kind = getattr(gx.expectations, rule.type)
    return kind(column=rule.column, severity=expectation.severity.value, meta={"name": expectation.name}, **rule.limits)


def _outcome(expectation: Expectation, result: Mapping[str, Any] | None, frame: pd.DataFrame) -> Outcome:
    if result is None:  # no row that it concerns, as for the length of train solutions without a train split
        return _made(expectation, success=True, checked=0, unexpected=0)
    if broken := _exception(result["exception_info"]):
        raise PipelineError(
            f"expectation `{expectation.name}` could not be checked, the data were not judged: {broken}"
        )
    found = result["result"]
    if "unexpected_count" not in found:
        detail = "" if result["success"] else f"{found['observed_value']:,} rows"
        return _made(expectation, success=result["success"], checked=int(found["observed_value"]), detail=detail)
    lines = [line[LABEL] for line in found.get("unexpected_index_list") or []]
    return _made(
        expectation,
        success=result["success"],
        checked=found["element_count"] - found["missing_count"],
        unexpected=found["unexpected_count"],
        examples=lines[:_MAX_EXAMPLES],
        detail=_detail(expectation, frame, lines),
    )


def _made(
    expectation: Expectation,
    *,
    success: bool,
    checked: int,
    unexpected: int | None = None,
    examples: Sequence[str] = (),
    detail: str = "",
) -> Outcome:
    return Outcome(
        name=expectation.name,
        title=expectation.title,
        severity=expectation.severity,
        success=success,
        checked=checked,
        unexpected=unexpected,
        unexpected_percent=None if unexpected is None else round(100 * unexpected / max(checked, 1), 4),
        examples=list(dict.fromkeys(examples)),
        detail=detail,
    )


def _detail(expectation: Expectation, frame: pd.DataFrame, labels: Sequence[str]) -> str:
    """What the first unexpected row shows of itself."""
    if not labels or not expectation.shows:
        return ""
    row = frame[frame[LABEL] == labels[0]].iloc[0]
    return ", ".join(_shown(name, row[name]) for name in expectation.shows)


def _shown(name: str, value: Any) -> str:
    return _IN_WORDS.get(name, "{}").format(value)


def _exception(info: Mapping[str, Any]) -> str:
    """Why a check could not be carried out; Great Expectations says so in one of two forms."""
    reports = [info] if "raised_exception" in info else list(info.values())
    messages = [str(report["exception_message"]).strip() for report in reports if report["raised_exception"]]
    return messages[0].splitlines()[0] if messages else ""
