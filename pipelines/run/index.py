"""The index of all runs on this machine and all registered versions: one page, `outputs/index.html`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.register.snapshot import VERSION_FILE, read_registry
from components.report.formatting import points
from components.shared import page
from components.shared.errors import PipelineError
from components.shared.versioning import is_url
from pipelines.run.curves import COLORS, curve_of, steps_of, svg_plot
from pipelines.run.history import LOG, OUTPUTS, PAGE, PARAMS, Run, every_run

INDEX = "index.html"
_REGISTRY = "registry"
_CURVES = ("reward", "accuracy")
"""Figures of the GRPO steps with a curve in the row of a run."""


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
    plot = None
    if len(compared) > 1:
        plot = svg_plot({row["name"]: row["accuracy"] for row in compared}, 640, 180, "accuracy of runs by step")
    values = {"runs": rows, "versions": versions, "problems": problems, "points": points, "plot": plot}
    values |= {"legend": list(zip(COLORS, compared, strict=False)), "colors": dict(zip(_CURVES, COLORS, strict=False))}
    text = page.render(Path(__file__).with_name("index.html.jinja"), **values)
    partial = outputs / f".{INDEX}.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(outputs / INDEX)
    return outputs / INDEX


def _row(run: Run, outputs: Path) -> dict[str, Any]:
    """What the page shows of a run."""
    report, steps = run.folder / PAGE, steps_of(run)
    curves = {name: curve for name in _CURVES if (curve := curve_of(steps, name))}
    ends = ", ".join(f"{name} {curve[0][1]:.2f} to {curve[-1][1]:.2f}" for name, curve in curves.items())
    return {
        "about": run.about,
        "accuracy": curves.get("accuracy"),
        "name": run.name,
        "params": run.params,
        "started": run.started,
        "status": _status(run),
        "passed": run.verdict.get("passed"),
        "page": report.relative_to(outputs).as_posix() if report.is_file() else None,
        "files": {name: f"runs/{run.name}/{name}" for name in (PARAMS, LOG) if (run.folder / name).is_file()},
        "target": run.verdict.get("target"),
        "version": run.version.get("tag"),
        "curves": svg_plot(curves, 160, 36, ends) if curves else None,
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
