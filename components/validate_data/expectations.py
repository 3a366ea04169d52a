"""The expectations of the problems, as Great Expectations reads them. To add one, add it to the list here.

The columns of the data that expectations are about are computed in `frame.py`.
"""

from functools import partial
from typing import Any

from components.validate_data.config import ValidateConfig
from components.validate_data.frame import LABEL

SEVERITIES = ("critical", "warning", "info")
"""A missed critical expectation rejects the data and stops the pipeline; the others are reported only."""


def expectations(config: ValidateConfig) -> list[dict[str, Any]]:
    """Return the expectations under `config`, the most basic first, as Great Expectations reads them."""
    critical, warning, info = (partial(_expect, severity) for severity in SEVERITIES)
    train, test, mostly = config.min_train_rows, config.min_test_rows, config.min_within_limit_fraction
    prompt, solution = config.max_prompt_tokens, config.max_solution_tokens
    share, worked = config.max_answer_share, config.min_worked_fraction
    all_of = "All" if mostly == 1 else f"{100 * mostly:g} % of the"
    return [
        critical("columns", "Rows have exactly the columns of a problem", _equals("columns", ""), "{columns}"),
        critical("values", "Values have the right type and are not empty", _equals("defect", ""), "{defect}"),
        critical("unique_ids", "No two problems have the same id", _rule("values_to_be_unique", LABEL), "{place}"),
        critical("splits", "Problems name the split of their file", _equals("split_matches_file", 1)),
        critical("train_rows", f"The train split has {train:,} rows or more", _sum_of("in_train", train)),
        critical("test_rows", f"The test split has {test:,} rows or more", _sum_of("in_test", test)),
        critical(
            "gradable_answers",
            "The grader finds that each solution ends in its answer",
            _equals("grade", "right"),
            "answer {answer}, graded {grade}",
        ),
        critical(
            "no_contamination",
            "No question is asked in two splits",
            _at_most("copies_held_out", 0),
            "as {held_out_twin}",
        ),
        critical(
            "prompt_length",
            f"{all_of} prompts have {prompt:,} tokens or fewer",
            _at_most("prompt_tokens", prompt, mostly),
            "{prompt_tokens} tokens",
        ),
        warning(
            "solution_length",
            f"{all_of} train solutions have {solution:,} tokens or fewer",
            _at_most("solution_tokens", solution, mostly),
            "{solution_tokens} tokens",
        ),
        warning("solutions", "Train problems have a solution to learn from", _equals("has_solution", 1)),
        warning("distinct_questions", "No question is asked twice within a split", _at_most("copies", 1), "as {twin}"),
        warning(
            "answer_balance",
            f"No answer is shared by more than {100 * share:g} % of a split",
            _at_most("answer_share", share),
            "answer {answer}, {answer_share:.2%} of its split",
        ),
        info(
            "worked_solutions",
            f"{100 * worked:g} % or more of the train solutions show their work",
            _equals("worked", 1, worked),
        ),
    ]


def _expect(severity: str, name: str, title: str, rule: dict[str, Any], detail: str = "") -> dict[str, Any]:
    """Return an expectation; `detail` is a format string with the columns that explain why a row is unexpected."""
    return {**rule, "severity": severity, "meta": {"name": name, "title": title, "detail": detail}}


def _equals(column: str, value: object, mostly: float = 1.0) -> dict[str, Any]:
    return _rule("values_to_be_in_set", column, value_set=[value], mostly=mostly)


def _at_most(column: str, limit: float, mostly: float = 1.0) -> dict[str, Any]:
    return _rule("values_to_be_between", column, max_value=limit, mostly=mostly)


def _sum_of(column: str, at_least: int) -> dict[str, Any]:
    return _rule("sum_to_be_between", column, min_value=at_least)


def _rule(kind: str, column: str, **limits: Any) -> dict[str, Any]:
    return {"type": f"expect_column_{kind}", "kwargs": {"column": column, **limits}}
