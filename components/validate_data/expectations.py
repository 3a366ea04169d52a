"""What is expected of the problems, and how Great Expectations checks it. To add an expectation, add it to a list here.

A new column that an expectation is about is computed in `frame.py`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd

from components.shared.errors import PipelineError
from components.validate_data.config import ValidateConfig
from components.validate_data.frame import LABEL

_MAX_EXAMPLES = 10


class Severity(StrEnum):
    """What follows if an expectation is not met."""

    CRITICAL = "critical"
    """The data are rejected and the pipeline stops."""
    WARNING = "warning"
    """Training goes on; somebody should look."""
    INFO = "info"
    """Worth knowing."""


@dataclass(frozen=True)
class Rule:
    """A rule about one column of the frame, as Great Expectations knows it."""

    type: str
    column: str
    limits: dict[str, Any]


@dataclass(frozen=True)
class Expectation:
    """A rule with its name, its meaning and its severity."""

    name: str
    title: str
    severity: Severity
    rule: Rule
    detail: str = ""
    """Format of the columns that explain why a row does not meet it."""


@dataclass(frozen=True)
class Outcome:
    """The result of one expectation."""

    name: str
    title: str
    severity: Severity
    success: bool
    checked: int
    """Rows to which it applies."""
    unexpected: int | None = None
    """Rows that do not meet it; None if it is about a split as a whole."""
    unexpected_percent: float | None = None
    examples: Sequence[str] = ()
    """Labels of the first of these rows."""
    detail: str = ""
    """What is wrong with the first of them; empty if nothing is."""


def expectations(config: ValidateConfig) -> list[Expectation]:
    """Return what is expected under `config`, the most basic first."""
    return [*_of_format(), *_of_content(config), *_of_training(config)]


def _of_format() -> list[Expectation]:
    critical = Severity.CRITICAL
    columns, values = _one_of("column_defect", [""]), _one_of("defect", [""])
    unique = Rule("ExpectColumnValuesToBeUnique", LABEL, {})
    return [
        Expectation("columns", "Rows have exactly the columns of a problem", critical, columns, "{column_defect}"),
        Expectation("values", "Values have the right type and are not empty", critical, values, "{defect}"),
        Expectation("unique_ids", "No two problems have the same id", critical, unique, "{place}"),
        Expectation("splits", "Problems name the split of their file", critical, _one_of("split_matches_file", [1])),
    ]


def _of_content(config: ValidateConfig) -> list[Expectation]:
    critical, train, test = Severity.CRITICAL, config.min_train_rows, config.min_test_rows
    gradable, copies = _one_of("grade", ["right"]), _at_most("copies_in_test", 0)
    return [
        Expectation("train_rows", f"The train split has {train:,} rows or more", critical, _sum_of("in_train", train)),
        Expectation("test_rows", f"The test split has {test:,} rows or more", critical, _sum_of("in_test", test)),
        Expectation(
            *("gradable_answers", "The grader finds that each solution ends in its answer", critical, gradable),
            "answer {answer}, graded {grade}",
        ),
        Expectation(
            "no_contamination", "No train question is asked in the test split", critical, copies, "as {test_twin}"
        ),
    ]


def _of_training(config: ValidateConfig) -> list[Expectation]:
    mostly, share, worked = config.min_within_limit_fraction, config.max_answer_share, config.min_worked_fraction
    all_of = "All" if mostly == 1 else f"{100 * mostly:g} % of the"
    return [
        Expectation(
            "prompt_length",
            f"{all_of} prompts have {config.max_prompt_tokens:,} tokens or fewer",
            Severity.CRITICAL,
            _at_most("prompt_tokens", config.max_prompt_tokens, mostly),
            "{prompt_tokens} tokens",
        ),
        Expectation(
            "solution_length",
            f"{all_of} train solutions have {config.max_solution_tokens:,} tokens or fewer",
            Severity.WARNING,
            _at_most("solution_tokens", config.max_solution_tokens, mostly),
            "{solution_tokens} tokens",
        ),
        Expectation(
            "solutions", "Train problems have a solution to learn from", Severity.WARNING, _one_of("has_solution", [1])
        ),
        Expectation(
            "distinct_questions",
            "No question is asked twice within a split",
            Severity.WARNING,
            _at_most("copies", 1),
            "as {twin}",
        ),
        Expectation(
            "answer_balance",
            f"No answer is shared by more than {100 * share:g} % of a split",
            Severity.WARNING,
            _at_most("answer_share", share),
            "answer {answer}, {answer_share:.2%} of its split",
        ),
        Expectation(
            "worked_solutions",
            f"{100 * worked:g} % or more of the train solutions show their work",
            Severity.INFO,
            _one_of("worked", [1], mostly=worked),
        ),
    ]


def _one_of(column: str, values: Sequence[object], mostly: float = 1.0) -> Rule:
    return Rule("ExpectColumnValuesToBeInSet", column, {"value_set": list(values), "mostly": mostly})


def _at_most(column: str, limit: float, mostly: float = 1.0) -> Rule:
    return Rule("ExpectColumnValuesToBeBetween", column, {"max_value": limit, "mostly": mostly})


def _sum_of(column: str, at_least: int) -> Rule:
    return Rule("ExpectColumnSumToBeBetween", column, {"min_value": at_least})


def check(frame: pd.DataFrame, expectations: Sequence[Expectation]) -> list[Outcome]:
    """Return the outcome of each expectation, in the same order.

    Raises:
        PipelineError: An expectation could not be evaluated; that is never a verdict on the data.
    """
    applicable = [each for each in expectations if frame[each.rule.column].notna().any()]
    results = {result["expectation_config"]["meta"]["name"]: result for result in _results(frame, applicable)}
    return [_outcome(each, results.get(each.name), frame) for each in expectations]


def _results(frame: pd.DataFrame, expectations: Sequence[Expectation]) -> Iterator[dict[str, Any]]:
    """Yield the results of Great Expectations as it writes them to JSON."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx  # seconds to import, and no other stage needs it
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_pandas("problems").add_dataframe_asset(name="frame")
    rules = [
        getattr(gx.expectations, each.rule.type)(
            column=each.rule.column, severity=each.severity.value, meta={"name": each.name}, **each.rule.limits
        )
        for each in expectations
    ]
    suite = context.suites.add(gx.ExpectationSuite(name="problems", expectations=rules))
    batch = asset.add_batch_definition_whole_dataframe("all")
    definition = gx.ValidationDefinition(name="problems", data=batch, suite=suite)
    validation = context.validation_definitions.add(definition).run(
        batch_parameters={"dataframe": frame},
        result_format={"result_format": "COMPLETE", "unexpected_index_column_names": [LABEL]},
    )
    for result in validation.results:
        yield result.to_json_dict()


def _outcome(expectation: Expectation, result: Mapping[str, Any] | None, frame: pd.DataFrame) -> Outcome:
    name, title, severity = expectation.name, expectation.title, expectation.severity
    if result is None:  # it applies to no row, such as the length of train solutions without a train split
        return Outcome(name, title, severity, success=True, checked=0, unexpected=0, unexpected_percent=0.0)
    if reason := _exception(result["exception_info"]):
        raise PipelineError(f"expectation `{name}` could not be evaluated, so the data were not judged: {reason}")
    success, counts = result["success"], result["result"]
    if "unexpected_count" not in counts:
        rows = counts["observed_value"]
        return Outcome(name, title, severity, success, checked=int(rows), detail="" if success else f"{rows:,} rows")
    checked, unexpected = counts["element_count"] - counts["missing_count"], counts["unexpected_count"]
    labels = [row[LABEL] for row in counts.get("unexpected_index_list") or []]
    return Outcome(
        *(name, title, severity, success, checked, unexpected),
        unexpected_percent=round(100 * unexpected / max(checked, 1), 4),
        examples=list(dict.fromkeys(labels[:_MAX_EXAMPLES])),
        detail=expectation.detail.format(**frame[frame[LABEL] == labels[0]].iloc[0]) if labels else "",
    )


def _exception(info: Mapping[str, Any]) -> str:
    """Return why a rule could not be evaluated, in either of the two forms that Great Expectations has for it."""
    reports = [info] if "raised_exception" in info else list(info.values())
    messages = [str(report["exception_message"]).strip() for report in reports if report["raised_exception"]]
    return messages[0].splitlines()[0] if messages else ""
