"""The report stage: compares the models of a run, decides whether the policy may be registered, and writes the page.

A separate stage because a missed gate must still leave a report: the verdict is decided here, `register` enforces it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import UndefinedError
from markupsafe import Markup

from components.report import charts, formatting
from components.report.config import ReportConfig
from components.report.findings import MODELS, Findings, Pair, find
from components.shared import jsonl, lineage, page
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.lineage import Lineage, value_digest
from components.shared.progress import say
from components.shared.stage import Stage

_GRPO_CURVES: dict[str, dict[str, str]] = {
    "Reward and accuracy of the completions": {"reward": "reward", "accuracy": "accuracy"},
    "Completions with worked steps (share)": {"worked_fraction": "worked"},
    "Completion length (tokens)": {"completion_length_tokens": "tokens"},
    "KL from the reference (nats per token)": {"kl": "KL"},
    "Entropy (nats per token)": {"entropy": "entropy"},
    "Clip fraction of the tokens": {"clip_high_fraction": "ratio too high", "clip_low_fraction": "ratio too low"},
    "Mismatch of sampler and trainer (nats per token)": {
        "sampler_mismatch": "mean difference",
        "sampler_mismatch_max": "largest",
    },
    "Gradient norm": {"gradient_norm": "norm"},
    "Zero-variance groups; truncated or unscorable completions": {
        "groups_without_spread_fraction": "zero variance",
        "truncated_fraction": "truncated",
        "unscorable_fraction": "unscorable",
    },
}
_TOOL_CURVES: dict[str, dict[str, str]] = {
    "Completions that use the tool (share)": {"tool_use_fraction": "with a call"},
    "Turns and calls of a completion": {"turns": "turns", "tool_calls": "calls"},
    "Tokens of the environment in a completion": {"environment_tokens": "tokens"},
    "Completions whose environment failed": {"environment_failures": "completions"},
}
"""Charts of a policy that acts in an environment."""
_SFT_CURVES = {"SFT loss (nats per token)": {"loss": "loss"}}
_FRACTIONS = {"worked_fraction", "groups_without_spread_fraction", "tool_use_fraction"}
"""First columns of the charts that are drawn from 0 % to 100 %."""


@dataclass(frozen=True)
class RunFacts:
    """What the page of one run has beside the report: it differs between equal runs."""

    version: Mapping[str, Any] | None = None
    """A registration's version.json."""
    seconds: Mapping[str, float] | None = None
    """Time of each stage."""
    timings: Path | None = None
    """The output `timings` of train_grpo."""
    made_by: Lineage | None = None
    """The lineage of the report."""
    command: str | None = None
    """What makes the run again, in a shell."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths of other files of the run, relative to the page, by what they are."""


def report(config: ReportConfig, *, report: Path, **folders: Path) -> dict[str, float]:
    """Compare base, SFT and GRPO on the same problems, decide the promotion gate and write the page."""
    findings = find(config, folders)
    verdict = findings.verdict
    (report / "report.html").write_text(render_report(config, folders, findings=findings), encoding="utf-8")
    jsonl.write_json(report / "verdict.json", verdict)
    jsonl.write_json(report / "summary.json", findings.summary())
    jsonl.write_json(report / "provenance.json", asdict(findings.provenance))
    jsonl.write_json(report / "metrics.json", findings.metrics())
    if not findings.learned:
        say("report", "warning: GRPO learned nothing, no step had a gradient: the policy is its reference")
    if findings.training and (stopped := findings.training["stopped"]):
        say("report", f"warning: training stopped after step {findings.training['num_steps']}: {stopped}")
    reasons = verdict["reasons"] or [part["reason"] for part in verdict["sources"]]
    say("report", f"gate {'passed' if verdict['passed'] else 'MISSED'}: {'; '.join(reasons)}")
    accuracies = {
        f"{model}_accuracy_{source}": score["accuracy"]
        for model, scores in findings.by_source.items()
        for source, score in scores.items()
    }
    figures = {name: verdict["target"][name] for name in ("gain", "p_value")}
    return {**accuracies, **figures, "gate_passed": float(verdict["passed"])}


STAGE = Stage(
    name="report",
    function=report,
    config=ReportConfig,
    inputs={
        "evaluation": "evaluate/evaluation",
        "sft_training": "train_sft/training",
        "grpo_training": "train_grpo/training",
        "validation": "validate_data/validation",
    },
    outputs=("report",),
    never_reused="always, as the registry that it reads may have changed",
)


def render_report(
    config: ReportConfig,
    folders: Mapping[str, Path],
    *,
    findings: Findings | None = None,
    verdict: Mapping[str, Any] | None = None,
    run: RunFacts | None = None,
) -> str:
    """Return the page over the report stage's input folders, by their names in the graph.

    Args:
        config: The gate, and the size of the page.
        folders: The inputs of the report stage.
        findings: What `find` returns for them, if it has been called already.
        verdict: The verdict, if it has been decided already.
        run: What the page of one run has in addition.
    """
    here = Path(__file__).parent
    findings, run = findings or find(config, folders, verdict), run or RunFacts()
    configs = findings.provenance.configs.items()
    validated: list[tuple[str, Any, Markup | None]] = []
    if training := findings.training:
        title = "Validation accuracy, with the policy's step"
        validated = [(title, [], charts.validation_chart(training["validation"], title, training["policy_step"]))]
    values = {
        "findings": findings,
        "target": findings.verdict["target"],
        "models": MODELS,
        "colors": charts.MODEL_COLORS,
        "panels": [
            *validated,
            *_panels(folders["grpo_training"], _GRPO_CURVES),
            *(panel for panel in _panels(folders["grpo_training"], _TOOL_CURVES) if panel[-1]),
            *_panels(folders["sft_training"], _SFT_CURVES),
        ],
        "phases": charts.phase_chart(run.timings) if run.timings else None,
        "examples": _choose_examples(findings.pairs, config.num_examples),
        "configs": {
            stage: yaml.safe_dump(each, sort_keys=False, allow_unicode=True, width=100) for stage, each in configs
        },
        "run": run,
        "costs": costs(run, findings),
        "formatting": formatting,
        "style": Markup((here / "report.css").read_text("utf-8")),
    }
    try:
        return page.render(here / "report.html.jinja", **values)
    except UndefinedError as error:
        raise PipelineError(f"report: its inputs lack a value of the page ({error}); run their stages again") from None


def page_of_run(config: Mapping[str, Any], folders: Mapping[str, str], report: Path, timings: Path) -> str:
    """Return the page with what the lineage in the finished `report` tells of the run.

    Args:
        config: The report section of the params file.
        folders: The inputs of the report stage.
        report: Its output.
        timings: The output `timings` of train_grpo; need not exist.
    """
    made_by = lineage.read(report)
    assert made_by is not None
    seconds = {made_by.stages[run.of].stage: run.seconds for run in made_by.runs}
    facts = RunFacts(seconds=seconds, timings=timings if timings.is_dir() else None, made_by=made_by)
    settings = validate(ReportConfig, dict(config), name=STAGE.name)
    return render_report(settings, {name: Path(path) for name, path in folders.items()}, run=facts)


def costs(run: RunFacts, findings: Findings) -> list[tuple[str, str, str, str]]:
    """Return the time, processor time and tokens of each stage of a run, in words; a total at the end."""
    if not run.seconds:
        return []
    places = {stage: run.made_by.environment(stage) if run.made_by else None for stage in run.seconds}
    tokens = {"evaluate": sum(evaluation.num_tokens for evaluation in findings.evaluations.values())}
    if run.timings:
        rows = [row for _, row in jsonl.read_rows(run.timings / "timings.jsonl")]
        tokens["train_grpo"] = round(sum(row.get("tokens_per_s", 0.0) * row["step_s"] for row in rows))
    units: dict[str, float] = {}
    lines = []
    for stage, seconds in run.seconds.items():
        place, used = places[stage], ""
        if place:
            unit, number = ("GPU", len(place.gpus)) if place.gpus else ("core", place.num_cores)
            units[unit] = units.get(unit, 0.0) + seconds * number / 3600
            used = formatting.hours(seconds * number / 3600, unit)
        sampled = page.count(tokens[stage]) if tokens.get(stage) else ""
        lines.append((stage, formatting.duration(seconds), used, sampled))
    total = ", ".join(formatting.hours(number, unit) for unit, number in units.items())
    sampled = page.count(sum(tokens.values()))
    return [*lines, ("Total", formatting.duration(sum(run.seconds.values())), total, sampled)]


def _choose_examples(pairs: Sequence[Pair], number: int) -> list[dict[str, Any]]:
    """Return `number` examples: half newly right, a quarter newly wrong, the rest the same before and after.

    Where a group has fewer, others have more. Chosen by the digest of the problem's id: the same in every run, and not
    hand-picked.
    """
    shuffled = sorted(pairs, key=lambda pair: value_digest(pair.first.id))
    newly_right, newly_wrong = -(-number // 2), number // 4
    same = number - newly_right - newly_wrong
    shares = {
        "SFT wrong, GRPO right": ((False, True), newly_right),
        "SFT right, GRPO wrong": ((True, False), newly_wrong),
        "Both right": ((True, True), same - same // 2),
        "Both wrong": ((False, False), same // 2),
    }
    members = {title: [pair for pair in shuffled if pair.right == right] for title, (right, _) in shares.items()}
    shown = {title: min(share, len(members[title])) for title, (_, share) in shares.items()}
    for title, each in members.items():
        shown[title] += min(number - sum(shown.values()), len(each) - shown[title])
    return [{"title": title, "total": len(each), "pairs": each[: shown[title]]} for title, each in members.items()]


def _panels(training: Path, charted: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Any, Markup | None]]:
    """Title, legend and chart of each figure; the chart is None if no step recorded its columns."""
    steps = [row for _, row in jsonl.read_rows(training / "steps.jsonl")]
    for title, names in charted.items():
        chart, legend = charts.curve_chart(steps, title, names, fraction=next(iter(names)) in _FRACTIONS)
        yield title, legend, chart
