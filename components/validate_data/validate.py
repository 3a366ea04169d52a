"""Decide whether problems are fit for training and evaluation, and describe them on one page."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared import jsonl, lineage
from components.shared.errors import DataRejectedError
from components.shared.page import render
from components.shared.problem import splits_in
from components.shared.progress import say
from components.shared.stage import Stage
from components.validate_data.config import ValidateConfig

if TYPE_CHECKING:
    from components.validate_data.checking import Outcome

PAGE = "report.html"
_TEMPLATE = Path(__file__).parent / "report.html.jinja"
_MAX_NAMED = 3
"""Rows that a message names."""


def validate(config: ValidateConfig, *, problems: Path, validation: Path) -> dict[str, float]:
    """Check the problems against every expectation; DataRejectedError if a critical one is not met."""
    # Great Expectations and pandas take seconds to import.
    from components.validate_data.checking import check
    from components.validate_data.expectations import SEVERITIES, expectations
    from components.validate_data.frame import build_frame, describe

    frame = build_frame(problems, config)
    outcomes = check(frame, expectations(config))
    missed: dict[str, list[Outcome]] = {severity: [] for severity in SEVERITIES}
    for outcome in outcomes:
        if not outcome.success:
            missed[outcome.severity].append(outcome)
    rejected = missed["critical"]
    result: dict[str, Any] = {
        "success": not rejected,
        "rows": {str(split): int(frame[f"in_{split}"].sum()) for split in splits_in(problems)},
        "expectations": [asdict(outcome) for outcome in outcomes],
        "statistics": describe(frame),
    }
    jsonl.write_json(validation / "result.json", result)
    page = render(_TEMPLATE, result=result, config=config, digest=lineage.digest(problems))
    (validation / PAGE).write_text(page, encoding="utf-8")
    # All but the first, which the error names: the log is the only output that Kubeflow keeps of a failed task.
    for outcome in (*rejected[1:], *missed["warning"], *missed["info"]):
        say("validate_data", f"{outcome.severity}: {_describe(outcome)}")
    if rejected:
        names = [outcome.name for outcome in rejected]
        also = f"; also not met: {', '.join(names[1:])}" if names[1:] else ""
        remedy = "; `grpo-pipeline limits` proposes limits that fit" if "prompt_length" in names else ""
        raise DataRejectedError(f"{_describe(rejected[0])}{also}; {PAGE} has the details{remedy}")
    which = "critical" if missed["warning"] or missed["info"] else f"{len(outcomes)}"
    say("validate_data", f"{len(frame):,} problems, all {which} expectations met")
    return {
        "expectations": float(len(outcomes)),
        **{f"{split}_rows": float(number) for split, number in result["rows"].items()},
        **{f"missed_{severity}": float(len(each)) for severity, each in missed.items()},
    }


STAGE = Stage(
    name="validate_data",
    function=validate,
    config=ValidateConfig,
    inputs={"problems": "prepare_data/problems"},
    outputs=("validation",),
)


def _describe(outcome: "Outcome") -> str:
    """Return one line about a missed expectation, the first unexpected rows, and what is wrong with the very first."""
    text = f"`{outcome.name}` is not met ({outcome.title[:1].lower()}{outcome.title[1:]})"
    if not outcome.unexpected:
        return f"{text}: {outcome.detail}"
    first, *others = outcome.examples[:_MAX_NAMED]
    detail = f" ({outcome.detail})" if outcome.detail else ""
    num_more = outcome.unexpected - 1 - len(others)
    more = f" and {num_more:,} more" if num_more else ""
    return f"{text}: {', '.join([f'{first}{detail}', *others])}{more}"
