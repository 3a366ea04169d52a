"""The index of all runs on this machine and all registered versions: one page, `outputs/index.html`."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from components.register.snapshot import VERSION_FILE, read_registry
from components.report.formatting import points
from components.shared import jsonl, page
from components.shared.errors import PipelineError
from components.shared.versioning import is_url

PAGE = "index.html"
_REGISTRY = "registry"
_NAME = re.compile(r"(\d{8}T\d{6}Z)-(.+)")
_CURVES = {"reward": "#e0803a", "accuracy": "#4a8fd4"}
"""Columns of the steps of GRPO, with the colors of their curves."""
_WIDTH, _HEIGHT, _MAX_POINTS = 160, 36, 80


@dataclass(frozen=True)
class Run:
    """One run, as far as it got."""

    name: str
    params: str
    started: datetime
    status: str
    passed: bool | None
    """The verdict of the gate; None where there is none."""
    page: str | None
    """Path of the report, relative to the index."""
    target: Mapping[str, Any] | None
    """Figures of the gate's targets, as in the verdict."""
    version: str | None
    registry: str | None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Listed:
    """One registered version."""

    tag: str
    at: str
    by: str
    aliases: Sequence[str]
    target: Mapping[str, Any] | None
    run: str | None
    """Name of the run that registered it, if it is still here."""


def write(outputs: Path, registry: str = _REGISTRY) -> Path:
    """Write the index of the runs in `outputs` and of the versions in their registries; return its path."""
    runs = sorted(_runs(outputs), key=lambda run: (run.started, run.name), reverse=True)
    versions: list[Listed] = []
    problems: list[str] = []
    # Of other runs, only folders: each URL would be cloned.
    folders = [run.registry for run in runs if run.registry and not is_url(run.registry)]
    for location in dict.fromkeys([registry, *folders]):
        if not is_url(location) and not Path(location).exists():
            continue
        try:
            versions += _versions(location, runs)
        except PipelineError as error:
            problems.append(str(error))
    values = {"runs": runs, "versions": versions, "problems": problems, "sparkline": sparkline, "points": points}
    text = page.render(Path(__file__).with_name("index.html.jinja"), colors=_CURVES, **values)
    partial = outputs / f".{PAGE}.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(outputs / PAGE)
    return outputs / PAGE


def _runs(outputs: Path) -> Iterator[Run]:
    for folder in (outputs / "runs").glob("*/"):
        match = _NAME.fullmatch(folder.name)
        if match:
            started = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            yield _run(folder, started, match[2], outputs)


def _run(folder: Path, started: datetime, params: str, outputs: Path) -> Run:
    events = list(_events(folder / "journal.jsonl"))
    figures: Mapping[str, Any] = {}
    with suppress(PipelineError):  # one that is missing, or half written
        figures = jsonl.read_json(folder / "summary.json")
    verdict, version = figures.get("verdict") or {}, figures.get("version") or {}
    report = folder / "report.html"
    return Run(
        name=folder.name,
        params=params,
        started=started,
        status=_status(events, figures),
        passed=verdict.get("passed"),
        page=report.relative_to(outputs).as_posix() if report.is_file() else None,
        target=verdict.get("target"),
        version=version.get("tag"),
        registry=version.get("registry"),
        curves=_curves(events),
    )


def _events(journal: Path) -> Iterator[Mapping[str, Any]]:
    """What the journal says; a line that is half written is skipped."""
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines() if journal.is_file() else ():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def _status(events: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> str:
    """What became of a run, in words."""
    if figures.get("exit") == 0:
        return "finished"
    last = events[-1] if events else {}
    if last.get("event") == "failed":
        return f"failed in {last['stage']}: {last['error']}"
    return f"not finished: {last['stage']} {last['event']}" if "stage" in last else "not begun"


def _curves(events: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The curves of GRPO, thinned; none where it was not finished."""
    trained = next((each for each in events if each.get("stage") == "train_grpo" and "outputs" in each), None)
    path = Path(trained["outputs"].get("training", "")) / "steps.jsonl" if trained else Path()
    rows: list[Mapping[str, Any]] = []
    if path.is_file():
        with suppress(PipelineError):
            rows = [row for _, row in jsonl.read_rows(path)]
    kept = rows[:: -(-len(rows) // _MAX_POINTS) or 1]
    curves = {name: [float(row[name]) for row in kept if row.get(name) is not None] for name in _CURVES}
    return {name: values for name, values in curves.items() if values}


def _versions(location: str, runs: Sequence[Run]) -> Iterator[Listed]:
    """The versions in a registry, the newest first."""
    with read_registry(location) as registry:
        aliases = registry.aliases()
        # The newest first: of several runs with equal weights the first one registered them.
        registered_by = {(run.version, run.registry): run.name for run in runs}
        for version in reversed(registry.versions()):
            target, by = None, version.by
            with suppress(PipelineError, ValueError, KeyError):
                target = json.loads(registry.read(version.tag, "verdict.json"))["target"]
                by = json.loads(registry.read(version.tag, VERSION_FILE))["registered"]["by"]
            yield Listed(
                tag=version.tag,
                at=version.at,
                by=by,
                aliases=[alias.partition("@")[2] for alias, tag in aliases.items() if tag == version.tag],
                target=target,
                run=registered_by.get((version.tag, location)),
            )


def sparkline(curves: Mapping[str, Sequence[float]]) -> Markup:
    """Return small curves from 0 to 1 or to their largest value, as an element for HTML; on hover, their ends."""
    top = max([1.0, *(value for values in curves.values() for value in values)])
    lines = []
    # The second curve is dashed, so that both are visible if they coincide.
    for (name, values), dashes in zip(curves.items(), ("", ' stroke-dasharray="4 3"'), strict=False):
        step = (_WIDTH - 4) / max(1, len(values) - 1)
        scaled = (max(0.0, value) / top for value in values)
        places = (f"{2 + at * step:.1f},{_HEIGHT - 2 - (_HEIGHT - 4) * each:.1f}" for at, each in enumerate(scaled))
        style = f'fill="none" stroke="{_CURVES[name]}" stroke-width="1.5"{dashes}'
        lines.append(f'<polyline points="{" ".join(places)}" {style}/>')
    label = ", ".join(f"{name} {values[0]:.2f} to {values[-1]:.2f}" for name, values in curves.items())
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}"'
    return Markup(f"<svg style='display: block' {view}><title>{label}</title>{''.join(lines)}</svg>")
