"""The results of a run: its report with version and times, summary.json, and a table on the screen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from components.preflight.config import load_params, stage_sections
from components.report import formatting
from components.report.report import RunFacts, render_report
from components.shared import jsonl, lineage
from components.shared.execution import Revision
from components.shared.page import percent
from components.shared.problem import problems_file, splits_in
from pipelines.run.history import ARTIFACTS, FIGURES, JOURNAL, LOG, MODELS, PAGE, PARAMS, Run
from pipelines.run.screen import Screen, Style

_FILES = {"figures": FIGURES, "params": PARAMS, "log": LOG, "journal": JOURNAL, "outputs of the stages": ARTIFACTS}
_FILES |= {"all runs": "../../index.html"}
"""Links from the report to other files of the run, by label."""
_COLUMN_WIDTH = 24


def write(run: Run, exit_code: int) -> None:
    """Write report.html and summary.json of a run: those of its report stage, with version, times and digests added."""
    folder = run.folder
    params = load_params(folder / PARAMS)
    outputs = {name: stage.outputs for name, stage in run.stages.items()}
    inputs = {
        "evaluation": outputs["evaluate"]["evaluation"],
        **{f"{model}_training": outputs[f"train_{model}"]["training"] for model in ("sft", "grpo")},
        "validation": outputs["validate_data"]["validation"],
    }
    reused = {name: stage.reused_from for name, stage in run.stages.items() if stage.reused_from}
    computed = [stage for stage in run.stages.values() if not stage.reused_from]
    seconds = {stage.name: stage.seconds for stage in computed if stage.seconds is not None}
    version = jsonl.read_json(outputs["register"]["registration"] / "version.json") if exit_code == 0 else None
    timings = outputs["train_grpo"]["timings"]
    made_by = lineage.read(outputs["report"]["report"])
    command = _command(folder, made_by.revision() if made_by else None, version)
    facts = RunFacts(version, seconds, timings, made_by, command, _FILES)
    figures = jsonl.read_json(outputs["report"]["report"] / "summary.json")
    page = render_report(params.report, inputs, verdict=figures["verdict"], run=facts)
    (folder / PAGE).write_text(page, encoding="utf-8")
    problems = outputs["prepare_data"]["problems"]
    digests = {
        **figures["digests"],
        "params_file": lineage.value_digest(stage_sections(params)),
        **{split: lineage.file_digest(problems_file(problems, split)) for split in splits_in(problems)},
    }
    added = {"digests": digests, "version": version, "seconds": seconds, "reused_from": reused, "exit": exit_code}
    jsonl.write_json(folder / FIGURES, {**figures, **added})


def _command(folder: Path, revision: Revision | None, version: Mapping[str, Any] | None) -> str:
    """Return the shell command that repeats a run: from its version if it has one, otherwise from its commit."""
    if version:
        return f".venv/bin/grpo-pipeline reproduce {version['tag']}"
    lines = [f"git checkout {revision.commit}"] if revision and revision.commit else []
    if revision and revision.patch_digest:
        lines.append("# and apply the uncommitted changes, `revisions` in lineage.json of the report")
    return "\n".join([*lines, f".venv/bin/grpo-pipeline run --params {folder / PARAMS}"])


def show(folder: Path, screen: Screen) -> None:
    """Show the accuracies, the verdict and the version of a run from its summary.json."""
    figures = jsonl.read_json(folder / FIGURES)
    verdict, version, lengths = figures["verdict"], figures["version"], figures["mean_length_tokens"]
    rows: dict[str, list[str]] = {"on held-out problems": list(MODELS.values())}
    for source in (part["source"] for part in verdict["sources"]):
        scores = [figures["models"][model][source] for model in MODELS]
        cells = [f"{percent(score['accuracy'])} ({formatting.interval(score['interval'])})" for score in scores]
        rows[f"{source} accuracy"] = cells
    rows["answers with steps"] = [percent(figures["worked_fraction"][model]) for model in MODELS]
    rows["mean tokens"] = [f"{lengths[model]:.1f}" for model in MODELS]
    screen.show()
    label_width = max(_COLUMN_WIDTH, *(len(label) + 2 for label in rows))
    for number, (label, cells) in enumerate(rows.items()):
        line = f"{label:<{label_width}}" + "".join(f"{cell:<{_COLUMN_WIDTH}}" for cell in cells).rstrip()
        screen.show(line, Style.BOLD if number == 0 else "")
    screen.show()
    outcome = ("passed", Style.GREEN)
    if not verdict["passed"]:
        outcome = ("MISSED" if verdict["enforced"] else "MISSED (not enforced)", Style.RED)
    first, *others = verdict["reasons"] or [part["reason"] for part in verdict["sources"]]
    screen.show(Text.assemble("gate        ", outcome, f": {first}"))
    for line in others:
        screen.show(f"            {line}")
    if verdict["champion"] and verdict["champion"]["passed"]:
        screen.show(f"champion    {verdict['champion']['reason'].removeprefix('champion ')}")
    if verdict["looks"]:
        screen.show(f"test set    {formatting.test_set_use(verdict['looks'])}")
    screen.show(f"registered  {version['tag']} in {version['registry']}" if version else "registered  nothing")
    screen.show(f"report      {folder / PAGE}")
