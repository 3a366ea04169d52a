"""The index of all runs on this machine and all registered versions: one page, `outputs/index.html`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from components.register.snapshot import VERSION_FILE, read_registry
from components.report.formatting import points
from components.shared import page
from components.shared.errors import PipelineError
from components.shared.versioning import is_url
from pipelines.run.curves import COLORS, curve_of, steps_of, svg_plot
from pipelines.run.history import LOG, OUTPUTS, PAGE, PARAMS, Run, every_run

INDEX = "index.html"
_REGISTRY = "registry"
_CURVES = {"reward": "#e0803a", "accuracy": "#4a8fd4"}
"""Columns of the steps of GRPO, with the colors of their curves."""
_WIDTH, _HEIGHT = 160, 36


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


def write_index() -> None:
    """Write the index of this machine's runs, and print its path."""
    OUTPUTS.mkdir(exist_ok=True)
    print(write(OUTPUTS))


def write(outputs: Path, registry: str = _REGISTRY) -> Path:
    """Write the index of the runs in `outputs` and of the versions in their registries; return its path."""
    every = every_run(outputs)
    versions: list[Listed] = []
    problems: list[str] = []
    # Of other runs, only folders: each URL would be cloned.
    folders = [run.version["registry"] for run in every if run.version and not is_url(run.version["registry"])]
    for location in dict.fromkeys([registry, *folders]):
        if not is_url(location) and not Path(location).exists():
            continue
        try:
            versions += _versions(location, every)
        except PipelineError as error:
            problems.append(str(error))
    rows = [_row(run, outputs) for run in every]
    compared = [row for row in rows if row["accuracy"]][: len(COLORS)]
    plot = svg_plot({row["name"]: row["accuracy"] for row in compared}) if len(compared) > 1 else None
    values = {"runs": rows, "versions": versions, "problems": problems, "sparkline": sparkline, "points": points}
    values |= {"plot": plot, "legend": list(zip(COLORS, compared, strict=False))}
    text = page.render(Path(__file__).with_name("index.html.jinja"), colors=_CURVES, **values)
    partial = outputs / f".{INDEX}.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(outputs / INDEX)
    return outputs / INDEX


def _row(run: Run, outputs: Path) -> dict[str, Any]:
    """What the page shows of a run."""
    report, steps = run.folder / PAGE, steps_of(run)
    curves = {name: [value for _, value in curve_of(steps, name)] for name in _CURVES}
    return {
        "about": run.about,
        "accuracy": curve_of(steps, "accuracy"),
        "name": run.name,
        "params": run.params,
        "started": run.started,
        "status": _status(run),
        "passed": run.verdict.get("passed"),
        "page": report.relative_to(outputs).as_posix() if report.is_file() else None,
        "files": {name: f"runs/{run.name}/{name}" for name in (PARAMS, LOG) if (run.folder / name).is_file()},
        "target": run.verdict.get("target"),
        "version": run.version.get("tag"),
        "curves": {name: values for name, values in curves.items() if values},
    }


def _status(run: Run) -> str:
    """What became of a run, in words."""
    if run.figures.get("exit") == 0:
        return "finished"
    last = run.events[-1] if run.events else {}
    if last.get("event") == "failed":
        return f"failed in {last['stage']}: {last['error']}"
    return run.state


def _versions(location: str, runs: Sequence[Run]) -> Iterator[Listed]:
    """The versions in a registry, the newest first."""
    with read_registry(location) as registry:
        aliases = registry.aliases()
        # The newest first: of several runs with equal weights the first one registered them.
        registered_by = {(run.version.get("tag"), run.version.get("registry")): run.name for run in runs}
        versions = registry.versions()[::-1]
        for version, contents in zip(versions, registry.read_each(versions, "verdict.json", VERSION_FILE), strict=True):
            target, by = None, version.by
            with suppress(ValueError, KeyError):
                verdict, registration = (json.loads(content or "{}") for content in contents)
                target, by = verdict["target"], registration["registered"]["by"]
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
