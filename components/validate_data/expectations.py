"""The expectations of the data: the one place to look at, and to add to, for what problems have to be like."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from components.validate_data.config import ValidateConfig


class Severity(StrEnum):
    """What follows where an expectation is not met."""

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
    """A rule with its name, its meaning and its weight."""

    name: str
    title: str
    severity: Severity
    rule: Rule
    shows: tuple[str, ...] = ()
    """Columns that explain a row which does not meet it."""


def expectations(config: ValidateConfig) -> list[Expectation]:
    """Return what is expected under `config`, the most basic first."""
    return [*_well_formed(), *_sound(config), *_teachable(config)]


def _well_formed() -> list[Expectation]:
    critical = Severity.CRITICAL
    return [
        Expectation(
            "columns",
            "Rows have exactly the columns of a problem",
            critical,
            _one_of("column_defect", [""]),
            ("column_defect",),
        ),
        Expectation(
            "values", "Values have the right type and are not empty", critical, _one_of("defect", [""]), ("defect",)
        ),
        Expectation("unique_ids", "No two problems have the same id", critical, _unique("row"), ("place",)),
        Expectation(
            "splits", "Problems say the split of the file they are in", critical, _one_of("says_its_split", [1])
        ),
    ]


def _sound(config: ValidateConfig) -> list[Expectation]:
    critical, train, test = Severity.CRITICAL, config.min_train_rows, config.min_test_rows
    return [
        Expectation("train_rows", f"The train split has {train:,} rows or more", critical, _sum_of("in_train", train)),
        Expectation("test_rows", f"The test split has {test:,} rows or more", critical, _sum_of("in_test", test)),
        Expectation(
            "gradable_answers",
            "The grader finds that each solution ends in its answer",
            critical,
            _one_of("grade", ["right"]),
            ("answer", "grade"),
        ),
        Expectation(
            "no_contamination",
            "No train question is asked in the test split",
            critical,
            _at_most("copies_in_test", 0),
            ("test_twin",),
        ),
    ]


def _teachable(config: ValidateConfig) -> list[Expectation]:
    mostly = config.min_within_limit_fraction
    whose = "All" if mostly == 1 else f"{100 * mostly:g} % of the"
    share, worked = config.max_answer_share, config.min_worked_fraction
    return [
        Expectation(
            "prompt_length",
            f"{whose} prompts have {config.max_prompt_tokens:,} tokens or fewer",
            Severity.CRITICAL,
            _at_most("prompt_tokens", config.max_prompt_tokens, mostly),
            ("prompt_tokens",),
        ),
        Expectation(
            "solution_length",
            f"{whose} train solutions have {config.max_solution_tokens:,} tokens or fewer",
            Severity.WARNING,
            _at_most("solution_tokens", config.max_solution_tokens, mostly),
            ("solution_tokens",),
        ),
        Expectation(
            "solutions", "Train problems have a solution to learn from", Severity.WARNING, _one_of("has_solution", [1])
        ),
        Expectation(
            "distinct_questions",
            "No question is asked twice within a split",
            Severity.WARNING,
            _at_most("copies", 1),
            ("twin",),
        ),
        Expectation(
            "answer_balance",
            f"No answer is that of more than {100 * share:g} % of a split",
            Severity.WARNING,
            _at_most("answer_share", share),
            ("answer", "answer_share"),
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


def _unique(column: str) -> Rule:
    return Rule("ExpectColumnValuesToBeUnique", column, {})


def _sum_of(column: str, at_least: int) -> Rule:
    return Rule("ExpectColumnSumToBeBetween", column, {"min_value": at_least})
