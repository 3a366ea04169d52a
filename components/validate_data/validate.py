"""Decides whether problems are fit to train and to evaluate on, and shows on one page what they are like."""

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
from components.validate_data import rows as raw
from components.validate_data.config import ValidateConfig
from components.validate_data.expectations import Severity, expectations
from components.validate_data.frame import derive
from components.validate_data.statistics import describe
from components.validate_data.suite import Outcome, run

PAGE = "report.html"
_TEMPLATE = Path(__file__).parent / "report.html.jinja"
_NAMED = 3


def validate(config: ValidateConfig, *, problems: Path, validation: Path) -> dict[str, float]:
    """Check the problems against every expectation; reject them where a critical one is not met."""
    rows = raw.read(problems)
    frame = derive(rows, config)
    outcomes = run(frame, expectations(config))
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
            say("validate_data", f"{outcome.severity}: {_in_words(outcome)}")
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
    return f"{_in_words(missed[0])}{also}; {PAGE} has the details"


def _in_words(outcome: Outcome) -> str:
    """One line: which expectation, how many rows, the first of them, what is wrong with it."""
    text = f"`{outcome.name}` is not met ({outcome.title[:1].lower()}{outcome.title[1:]})"
    if not outcome.unexpected:
        return f"{text}: {outcome.detail}"
    named = outcome.examples[:_NAMED]
    more = outcome.unexpected - len(named)
    reason = f" ({outcome.detail})" if outcome.detail else ""
    listed = f"{named[0]}{reason}" + "".join(f", {label}" for label in named[1:])
    return f"{text}: {listed}{f' and {more:,} more' if more > 0 else ''}"
