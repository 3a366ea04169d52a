"""The index of all runs on this machine and all registered versions: one page, `outputs/index.html`."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from components.register.snapshot import VERSION_FILE, read_registry
from components.report.formatting import points, value_range
from components.shared import page
from components.shared.errors import PipelineError
from components.shared.versioning import is_url
from pipelines.run.history import LOG, OUTPUTS, PAGE, PARAMS, Run, every_run
from pipelines.run.watch import COLORS, curve_of, steps_of, svg_plot

_CURVES = ("reward", "accuracy")  # figures of the GRPO steps that have a curve in the row of a run


def write_index() -> None:
    """Write the index of this machine's runs, and print its path."""
    OUTPUTS.mkdir(exist_ok=True)
    print(write(OUTPUTS))


def write(outputs: Path, registry: str = "registry") -> Path:
    """Write the index of the runs in `outputs`, and of versions in `registry` and in the runs' own; return its path."""
    runs = every_run(outputs)
    versions: list[dict[str, Any]] = []
    problems: list[str] = []
    # A registry at a URL would be cloned: only that of the current run is worth the time.
    folders = [run.version["registry"] for run in runs if run.version and not is_url(run.version["registry"])]
    for location in dict.fromkeys([registry, *folders]):
        if not is_url(location) and not Path(location).exists():
            continue
        try:
            versions += _versions(location, runs)
        except PipelineError as error:
            problems.append(str(error))
    rows = [_row(run, outputs) for run in runs]
    values = {"runs": rows, "versions": versions, "problems": problems, "points": points}
    registries = {each["registry"] for each in (*versions, *(run.version for run in runs if run.version))}
    values["has_several"] = len(registries) > 1
    values["colors"] = dict(zip(_CURVES, COLORS, strict=False))
    partial = outputs / f".index.html.{os.getpid()}"
    partial.write_text(page.render(Path(__file__).with_name("index.html.jinja"), **values), encoding="utf-8")
    return partial.replace(outputs / "index.html")


def _row(run: Run, outputs: Path) -> dict[str, Any]:
    """Return what the page shows of a run: the run itself, its status, links relative to the page, and curves."""
    report, steps = run.folder / PAGE, steps_of(run)
    every_curve = {name: curve_of(steps, name) for name in _CURVES}
    curves = {name: curve for name, curve in every_curve.items() if curve}
    summary = ", ".join(f"{name} {value_range([value for _, value in curve])}" for name, curve in curves.items())
    error = run.unfinished.error if run.unfinished else None
    return {
        "run": run,
        "status": f"{run.state}: {error['error']}" if error else run.state,
        "page": report.relative_to(outputs).as_posix() if report.is_file() else None,
        "files": {name: f"runs/{run.name}/{name}" for name in (PARAMS, LOG) if (run.folder / name).is_file()},
        "curves": svg_plot(curves, summary) if curves else None,
    }


def _versions(location: str, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield what the page shows of the versions in a registry, the newest first."""
    with read_registry(location) as registry:
        aliases = registry.aliases_by_version()
        # Several runs may name a version. The earliest, which is last in `runs`, has registered it.
        registered_by = {(run.version.get("tag"), run.version.get("registry")): run.name for run in runs}
        versions = registry.versions()[::-1]
        for version, contents in zip(versions, registry.read_each(versions, "verdict.json", VERSION_FILE), strict=True):
            verdict, registration = map(_parse, contents)
            yield {
                "tag": version.tag,
                "registry": location,
                "at": version.at,
                "by": registration.get("registered", {}).get("by", version.by),
                "aliases": aliases.get(version.tag, []),
                "target": verdict.get("target"),
                "run": registered_by.get((version.tag, location)),
            }


def _parse(content: bytes | None) -> dict[str, Any]:
    """Return the JSON object in a file of a registry; empty if the file is missing or damaged."""
    try:
        values = json.loads(content or "{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
