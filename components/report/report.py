"""The report stage: compares the models of a run, decides whether the policy may be registered, and writes the page.

The verdict is decided here and enforced by `register`: a separate stage, so that a missed gate still leaves a report.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import UndefinedError
from markupsafe import Markup

from components.report import charts, formatting
from components.report.config import ReportConfig
from components.report.findings import Findings, Pair, read_findings
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


class _Panel(NamedTuple):
    """A chart of the page."""

    title: str
    legend: list[tuple[str, str]]
    """Names and colors of the curves."""
    chart: Markup | None
    """None if no step recorded its columns."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of one run on its page, which differ between equal runs."""

    version: Mapping[str, Any] | None = None
    """A registration's version.json."""
    seconds: Mapping[str, float] | None = None
    """Time of each stage."""
    timings: Path | None = None
    """The output `timings` of train_grpo."""
    made_by: Lineage | None = None
    """The lineage of the report."""
    command: str | None = None
    """Shell command that repeats the run."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths of other files of the run, relative to the page, by title."""


def report(config: ReportConfig, *, report: Path, **folders: Path) -> dict[str, float]:
    """Compare base, SFT and GRPO on the same problems, decide the promotion gate and write the page."""
    findings = read_findings(config, folders)
    verdict = findings.verdict
    (report / "report.html").write_text(render_report(config, folders, findings=findings), encoding="utf-8")
    jsonl.write_json(report / "verdict.json", verdict)
    jsonl.write_json(report / "summary.json", findings.summary())
    jsonl.write_json(report / "provenance.json", asdict(findings.provenance))
    jsonl.write_json(report / "metrics.json", findings.metrics())
    if not findings.learned:
        say("report", "warning: GRPO learned nothing, no step had a gradient: the policy is its reference")
    training = findings.training
    if training and training["stopped"]:
        say("report", f"warning: training stopped after step {training['num_steps']}: {training['stopped']}")
    reasons = verdict["reasons"] or [part["reason"] for part in verdict["sources"]]
    for reason in reasons:
        say("report", f"gate {'passed' if verdict['passed'] else 'MISSED'}: {reason}")
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
    """Return the HTML page on the inputs of the report stage, which are in `folders` by their names in the graph.

    `findings` and `verdict` are those of the inputs, if they are known already.
    """
    here = Path(__file__).parent
    findings = findings or read_findings(config, folders, verdict)
    run = run or RunFacts()
    training = findings.training
    panels: list[_Panel] = []
    if training:
        title = "Validation accuracy, with the policy's step"
        panels = [_Panel(title, [], charts.validation_chart(training["validation"], title, training["policy_step"]))]
    panels += _panels(folders["grpo_training"], _GRPO_CURVES)
    # Without tools, no step has the columns of these charts.
    panels += (panel for panel in _panels(folders["grpo_training"], _TOOL_CURVES) if panel.chart)
    panels += _panels(folders["sft_training"], _SFT_CURVES)
    values = {
        "findings": findings,
        "target": findings.verdict["target"],
        "models": {model: f"{name[0].upper()}{name[1:]}" for model, name in formatting.MODELS.items()},
        "colors": formatting.MODEL_COLORS,
        "panels": panels,
        "phases": charts.phase_chart(run.timings) if run.timings else None,
        "examples": _choose_examples(findings.pairs, config.num_examples),
        "configs": {
            stage: yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=100)
            for stage, section in findings.provenance.configs.items()
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
    """Return the page with facts of the run, from the lineage of the finished `report`.

    `config` is the report section of the params file, `folders` are the inputs of the report stage, `timings` is an
    output of train_grpo, which need not exist.
    """
    made_by = lineage.read(report)
    assert made_by is not None
    seconds = {made_by.stages[run.of].stage: run.seconds for run in made_by.runs}
    facts = RunFacts(seconds=seconds, timings=timings if timings.is_dir() else None, made_by=made_by)
    settings = validate(ReportConfig, dict(config), name=STAGE.name)
    return render_report(settings, {name: Path(path) for name, path in folders.items()}, run=facts)


def costs(run: RunFacts, findings: Findings) -> list[tuple[str, str, str, str]]:
    """Return rows with name, time, processor time and sampled tokens, as text: one for each stage, and a total.

    There are no rows while the times are not known.
    """
    if not run.seconds:
        return []
    tokens = {"evaluate": sum(evaluation.num_tokens for evaluation in findings.evaluations.values())}
    if run.timings:
        timings = [row for _, row in jsonl.read_rows(run.timings / "timings.jsonl")]
        tokens["train_grpo"] = round(sum(row.get("tokens_per_s", 0.0) * row["step_s"] for row in timings))
    total_hours: dict[str, float] = defaultdict(float)  # of GPUs and of cores
    rows = []
    for stage, seconds in run.seconds.items():
        environment = run.made_by.environment(stage) if run.made_by else None
        used = ""
        if environment:
            unit, number = ("GPU", len(environment.gpus)) if environment.gpus else ("core", environment.num_cores)
            hours = seconds * number / 3600
            total_hours[unit] += hours
            used = formatting.hours(hours, unit)
        sampled = page.count(tokens[stage]) if tokens.get(stage) else ""
        rows.append((stage, formatting.duration(seconds), used, sampled))
    total_used = ", ".join(formatting.hours(hours, unit) for unit, hours in total_hours.items())
    total_time = formatting.duration(sum(run.seconds.values()))
    total_tokens = sum(tokens.get(stage, 0) for stage in run.seconds)  # a reused stage has no row
    return [*rows, ("Total", total_time, total_used, page.count(total_tokens))]


def _choose_examples(pairs: Sequence[Pair], number: int) -> list[dict[str, Any]]:
    """Return `number` examples in groups: half newly right, a quarter newly wrong, the rest the same before and after.

    If a group has fewer problems, the others get more. The order is that of the digests of the problems' ids: the same
    in every run, and not hand-picked.
    """
    shuffled = sorted(pairs, key=lambda pair: value_digest(pair.first.id))
    newly_right, newly_wrong = math.ceil(number / 2), number // 4
    same = number - newly_right - newly_wrong
    groups = [
        ("SFT wrong, GRPO right", (False, True), newly_right),
        ("SFT right, GRPO wrong", (True, False), newly_wrong),
        ("Both right", (True, True), math.ceil(same / 2)),
        ("Both wrong", (False, False), same // 2),
    ]
    members = {title: [pair for pair in shuffled if pair.right == right] for title, right, _ in groups}
    num_shown = {title: min(share, len(members[title])) for title, _, share in groups}
    for title, each in members.items():
        num_missing = number - sum(num_shown.values())
        num_shown[title] = min(num_shown[title] + num_missing, len(each))
    return [{"title": title, "total": len(each), "pairs": each[: num_shown[title]]} for title, each in members.items()]


def _panels(training: Path, titles: Mapping[str, Mapping[str, str]]) -> Iterator[_Panel]:
    """Yield the charts of a training: `titles` has the columns of each, with their names in the legend."""
    steps = [row for _, row in jsonl.read_rows(training / "steps.jsonl")]
    for title, names in titles.items():
        first_column = next(iter(names))
        chart, legend = charts.curve_chart(steps, title, names, fraction=first_column in _FRACTIONS)
        yield _Panel(title, legend, chart)
