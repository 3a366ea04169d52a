"""The report as one self-contained HTML page: a plain function over the folders that the stages left."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import UndefinedError
from markupsafe import Markup

from components.report import charts, examples, wording
from components.report.config import ReportConfig
from components.report.curves import curve, read_steps
from components.report.findings import MODELS, Findings, find
from components.report.phases import phases
from components.shared import page
from components.shared.errors import PipelineError

_CURVES: tuple[tuple[str, dict[str, str], dict[str, bool]], ...] = (
    ("Reward and accuracy of the samples", {"reward": "reward", "accuracy": "accuracy"}, {"from_zero": True}),
    ("Worked share of the samples", {"worked_fraction": "worked"}, {"fraction": True}),
    ("Response length (tokens)", {"completion_length_tokens": "tokens"}, {"from_zero": True}),
    ("KL from the reference (nats per token)", {"kl": "KL"}, {"from_zero": True}),
    ("Entropy (nats per token)", {"entropy": "entropy"}, {"from_zero": True}),
    (
        "Clip fraction of the tokens",
        {"clip_high_fraction": "ratio too high", "clip_low_fraction": "ratio too low"},
        {"from_zero": True},
    ),
    (
        "Sampler against trainer (nats per token)",
        {"sampler_mismatch": "mean difference", "sampler_mismatch_max": "largest"},
        {"from_zero": True},
    ),
    ("Gradient norm", {"gradient_norm": "norm"}, {"from_zero": True}),
    (
        "Groups without spread; samples cut off or unscorable",
        {
            "groups_without_spread_fraction": "without spread",
            "truncated_fraction": "cut off",
            "unscorable_fraction": "unscorable",
        },
        {"fraction": True},
    ),
)
_SFT_CURVES: tuple[tuple[str, dict[str, str], dict[str, bool]], ...] = (
    ("SFT loss (nats per token)", {"loss": "loss"}, {"from_zero": True}),
)


def render_report(
    config: ReportConfig,
    folders: Mapping[str, Path],
    *,
    version: Mapping[str, Any] | None = None,
    seconds: Mapping[str, float] | None = None,
    timings: Path | None = None,
) -> str:
    """Return the page over the report stage's input folders, by their names in the graph.

    `version` (a registration's version.json), `seconds` per stage and `timings` of train_grpo are of one run, and no
    part of what equal runs have in common.
    """
    return render(find(config, folders), config, folders, version=version, seconds=seconds, timings=timings)


def render(
    findings: Findings,
    config: ReportConfig,
    folders: Mapping[str, Path],
    *,
    version: Mapping[str, Any] | None = None,
    seconds: Mapping[str, float] | None = None,
    timings: Path | None = None,
) -> str:
    """Return the page of findings that were already read."""
    here = Path(__file__).parent
    values = _context(findings, config, folders)
    of_run = {"version": version, "seconds": seconds, "phases": phases(timings) if timings else None}
    style = Markup((here / "report.css").read_text("utf-8"))
    try:
        return page.render(here / "report.html.jinja", **values, **of_run, say=wording, style=style)
    except UndefinedError as error:
        raise PipelineError(f"the inputs lack what the report shows ({error}); run their stages again") from None


def _context(findings: Findings, config: ReportConfig, folders: Mapping[str, Path]) -> dict[str, Any]:
    return {
        "names": MODELS,
        "colors": charts.MODEL_COLORS,
        "verdict": findings.verdict,
        "learned": findings.learned,
        "evaluations": findings.evaluations,
        "sources": findings.sources,
        "by_source": findings.by_source,
        "worked": findings.of_each_model("worked_fraction"),
        "length": findings.of_each_model("mean_length_tokens"),
        "truncated": findings.of_each_model("truncated_fraction"),
        "subjects": _groups(findings, "by_subject"),
        "levels": _groups(findings, "by_level"),
        "base_model": _base_model(findings),
        "accuracy_chart": Markup(charts.accuracy_chart(findings.by_source, MODELS)),
        "panels": _panels(folders["grpo_training"], _CURVES) + _panels(folders["sft_training"], _SFT_CURVES),
        "examples": examples.choose(findings.pairs, config.num_examples),
        "validation": findings.validation,
        "provenance": findings.provenance,
        "configs": {
            stage: yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
            for stage, values in findings.provenance.configs.items()
        },
    }


def _groups(findings: Findings, key: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Rows of a table by subject or level: source, group, and each model's score; without groups no rows."""
    rows = []
    for source in findings.sources:
        scores = {
            model: evaluation.scores["greedy"][key].get(source, {})
            for model, evaluation in findings.evaluations.items()
        }
        groups = [group for group in scores["grpo"] if group]
        if len(groups) > 1:
            rows += [(source, group, {model: scores[model][group] for model in MODELS}) for group in sorted(groups)]
    return rows


def _base_model(findings: Findings) -> str | None:
    """The name of the base model in the configs that the artifacts carry."""
    for config in findings.provenance.configs.values():
        model = config.get("model")
        if isinstance(model, dict) and "base" in model:
            return str(model["base"])
    return None


def _panels(
    training: Path, wanted: Sequence[tuple[str, dict[str, str], dict[str, bool]]]
) -> list[tuple[str, list[tuple[str, str]], Markup | None]]:
    """Each chart with its title and legend; None in its place where no step recorded the quantity."""
    steps = read_steps(training)
    panels = []
    for title, keys, options in wanted:
        curves = [line for key, name in keys.items() if (line := curve(steps, key, name))]
        legend = [(line.name, charts.series_color(index)) for index, line in enumerate(curves)] if len(keys) > 1 else []
        panels.append((title, legend, Markup(charts.line_chart(curves, title=title, **options)) if curves else None))
    return panels
