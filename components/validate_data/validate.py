"""Decide whether problems are fit for training and evaluation, and describe them on one page."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.shared import jsonl, lineage
from components.shared.errors import DataRejectedError
from components.shared.page import render
from components.shared.problem import Split
from components.shared.progress import say
from components.shared.stage import Stage
from components.validate_data.config import ValidateConfig
from components.validate_data.expectations import Outcome, Severity, check, expectations
from components.validate_data.frame import build_frame, describe, load_rows

PAGE = "report.html"
_TEMPLATE = Path(__file__).parent / "report.html.jinja"
_MAX_NAMED = 3
"""Rows that a message names."""


def validate(config: ValidateConfig, *, problems: Path, validation: Path) -> dict[str, float]:
    """Check the problems against every expectation; reject them if a critical one is not met."""
    rows = load_rows(problems)
    frame = build_frame(rows, config)
    outcomes = check(frame, expectations(config))
    result = {
        "success": not _missed(outcomes, Severity.CRITICAL),
        "rows": {str(split): sum(row.split == split for row in rows) for split in Split},
        "expectations": [asdict(outcome) for outcome in outcomes],
        "statistics": describe(frame, rows),
    }
    jsonl.write_json(validation / "result.json", result)
    page = render(_TEMPLATE, result=result, config=config, digest=lineage.digest(problems))
    (validation / PAGE).write_text(page, encoding="utf-8")
    for outcome in outcomes:
        if not outcome.success and outcome.severity != Severity.CRITICAL:
            say("validate_data", f"{outcome.severity}: {_describe(outcome)}")
    if rejected := _missed(outcomes, Severity.CRITICAL):
        raise DataRejectedError(_rejection(rejected))
    say("validate_data", f"{len(rows):,} problems, all critical expectations met")
    return _metrics(result, outcomes)


STAGE = Stage(
    name="validate_data",
    function=validate,
    config=ValidateConfig,
    inputs=("problems",),
    outputs=("validation",),
)


def _missed(outcomes: Sequence[Outcome], severity: Severity) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.success and outcome.severity == severity]


def _metrics(result: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, float]:
    rows = {f"{split}_rows": float(number) for split, number in result["rows"].items()}
    missed = {f"missed_{severity}": float(len(_missed(outcomes, severity))) for severity in Severity}
    return {"expectations": float(len(outcomes)), **rows, **missed}


def _rejection(missed: Sequence[Outcome]) -> str:
    others = [outcome.name for outcome in missed[1:]]
    also = f"; also not met: {', '.join(others)}" if others else ""
    return f"{_describe(missed[0])}{also}; {PAGE} has the details"


def _describe(outcome: Outcome) -> str:
    """Return one line with the expectation, the first rows that do not meet it, and why the first one does not."""
    text = f"`{outcome.name}` is not met ({outcome.title[:1].lower()}{outcome.title[1:]})"
    if not outcome.unexpected:
        return f"{text}: {outcome.detail}"
    first, *others = outcome.examples[:_MAX_NAMED]
    detail = f" ({outcome.detail})" if outcome.detail else ""
    num_more = outcome.unexpected - 1 - len(others)
    more = f" and {num_more:,} more" if num_more else ""
    return f"{text}: {', '.join([f'{first}{detail}', *others])}{more}"
