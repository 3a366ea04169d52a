"""What the commands `grpo-pipeline runs` do: list, show, compare, open and remove the runs of this machine."""

import os
import stat
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.filesize import decimal

from components.shared import durable, jsonl
from components.shared.errors import PipelineError
from components.shared.lineage import flat
from components.shared.page import percent
from components.shared.work import last_step
from pipelines.run.curves import COLORS, curve_of, steps_of, text_plot
from pipelines.run.history import (
    ABOUT,
    FIGURES,
    JOURNAL,
    LOG,
    MODELS,
    OUTPUTS,
    PAGE,
    PARAMS,
    Run,
    StageRun,
    every_run,
    read_run,
    resolve,
)
from pipelines.run.screen import Screen, duration
from pipelines.run.settings import own_keys
from pipelines.tables import aligned, print_json, print_labelled


def list_runs(text: str, *, as_json: bool) -> None:
    """List the runs, the newest first; with `text`, those that have it in their description."""
    keys = ("name", "state", "params", "gate", "version")
    every = [each for each in map(_summary, every_run()) if text in f"{[each[key] for key in keys]} {_note(each)}"]
    if as_json:
        print_json(every)
    elif not every:
        print(f"{OUTPUTS / 'runs'} has no {f'run that says {text!r}' if text else 'runs'}")
    else:
        header = ("run", "state", *MODELS.values(), "gate", "version", "size", "freed by `runs rm`", "note")
        rows = [
            (
                each["name"],
                each["state"],
                *(percent(each["accuracy"][model]) if model in each["accuracy"] else "-" for model in MODELS),
                each["gate"] or "-",
                each["version"] or "-",
                decimal(each["bytes"]),
                decimal(each["bytes_freed"]),
                _note(each),
            )
            for each in every
        ]
        print(aligned([header, *rows]))


def show(run: str, *, as_json: bool) -> None:
    """Show one run with its stages."""
    shown = _read(run)
    facts = _summary(shown)
    if as_json:
        stages = [
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "reused_from": stage.reused_from,
                "error": stage.error and stage.error["error"],
                "outputs": {name: str(path) for name, path in stage.outputs.items()},
            }
            for stage in shown.stages.values()
        ]
        print_json({**facts, "stages": stages, "settings": _settings(shown), "files": _files(shown)})
        return
    gate = f", gate {facts['gate']}" if facts["gate"] else ""
    print(f"{shown.name}: {shown.state}{gate}{', ' + facts['version'] if facts['version'] else ''}")
    for stage in shown.stages.values():
        print_labelled(stage.name, _told(stage))
    if _note(facts):
        print_labelled("note", [_note(facts)])
    print_labelled("accuracy", _accuracies(shown))
    print_labelled("params set", own_keys(shown.folder / PARAMS))
    print_labelled("disk", [f"{decimal(facts['bytes'])}; `runs rm` frees {decimal(facts['bytes_freed'])}"])
    print_labelled("files", _files(shown).values())


def note(run: str, text: str, tags: Sequence[str]) -> None:
    """Replace the note and the tags of a run."""
    noted = _read(run)
    about = noted.about.model_copy(update={"note": text, "tags": tuple(tags)})
    jsonl.write_json(noted.folder / ABOUT, about.model_dump(mode="json"))


def compare(runs: Sequence[str], *, curve: str, as_json: bool) -> None:
    """Show how runs differ, with a curve of each in one plot."""
    compared = list(map(_read, runs))
    if not 2 <= len(compared) <= len(COLORS):
        raise PipelineError(f"runs compare: name 2 to {len(COLORS)} runs; these are {len(compared)}")
    settings = list(map(_settings, compared))
    params = {
        key: [each.get(key) for each in settings] for key in dict(pair for each in settings for pair in each.items())
    }
    params = {key: values for key, values in params.items() if len(set(values)) > 1}
    accuracies = list(map(_scores, compared))
    stages = [run.stages.values() for run in compared]
    seconds = [{stage.name: stage.seconds for stage in each if stage.seconds is not None} for each in stages]
    if as_json:
        names = [run.name for run in compared]
        print_json({"runs": names, "params": params, "accuracy": accuracies, "seconds": seconds})
        return
    print(" -> ".join(run.name for run in compared))
    print_labelled("params", [f"{key}: {' -> '.join(map(str, values))}" for key, values in params.items()] or ["same"])
    print_labelled("accuracy", _side_by_side(accuracies, percent))
    print_labelled("times", _side_by_side(seconds, duration))
    screen, rows = Screen(sys.stdout, sys.stderr), {run.name: steps_of(run) for run in compared}
    plot = text_plot({name: curve_of(each, curve) for name, each in rows.items()}, screen.size[0])
    known = sorted({column for each in rows.values() for row in each for column in row})
    if not plot and known and curve not in known:
        raise PipelineError(f"--curve {curve}: no step has this figure; there are {', '.join(known)}")
    if plot:
        screen.show(f"{curve} by step")
    for line in plot:
        screen.show(line)


def open_report(run: str) -> None:
    """Open the report of a run, and print where it is."""
    opened = _read(run)
    page = opened.folder / PAGE
    if not page.is_file():
        raise PipelineError(f"{page}: there is no report yet: the run is {opened.state}")
    print(page)
    webbrowser.open(page.resolve().as_uri())


def remove(runs: Sequence[str], *, yes: bool) -> int:
    """Remove runs, and return 1 if the user does not agree."""
    chosen = {run.name: run for run in map(_read, runs)}
    for run in chosen.values():
        if run.is_running:
            raise PipelineError(f"{run.name}: is running; stop it first")
    for run in chosen.values():
        print(f"{run.name}: {run.state}, frees {decimal(disk(run.folder)[1])}")
    try:
        agreed = yes or input("remove? [y/N] ").strip().lower() == "y"
    except EOFError:
        raise PipelineError("runs rm: no terminal to ask for confirmation; pass --yes") from None
    if not agreed:
        print("nothing was removed")
        return 1
    for run in chosen.values():
        remove_run(run)
    return 0


def remove_run(run: Run) -> None:
    """Remove a run that is not running, and have outputs/latest name the newest run with a report that is left."""
    durable.discard(run.folder)
    outputs = run.folder.parents[1]
    latest = outputs / "latest"
    if latest.is_symlink() and not latest.exists():
        with_report = [each.folder for each in every_run(outputs) if each.figures]
        latest.unlink()
        if with_report:
            latest.symlink_to(with_report[0].relative_to(outputs))


def disk(folder: Path) -> tuple[int, int]:
    """Return the bytes of all files in a folder, and of those without hard links elsewhere, which removal frees."""
    links: Counter[tuple[int, int]] = Counter()
    files: dict[tuple[int, int], os.stat_result] = {}
    for _, status in durable.walk(folder):
        if stat.S_ISREG(status.st_mode):
            links[status.st_dev, status.st_ino] += 1
            files[status.st_dev, status.st_ino] = status
    freed = sum(status.st_size for key, status in files.items() if links[key] >= status.st_nlink)
    return sum(status.st_size for status in files.values()), freed


def _read(name: str) -> Run:
    run = read_run(resolve(name))
    assert run is not None
    return run


def _summary(run: Run) -> dict[str, Any]:
    size_bytes, freed = disk(run.folder)
    passed = run.verdict.get("passed")
    return {
        "name": run.name,
        "started": run.started.isoformat(),
        "params": run.about.params,
        "state": run.state,
        "accuracy": _scores(run),
        "gate": None if passed is None else "passed" if passed else "missed",
        "version": run.version.get("tag"),
        "note": run.about.note,
        "tags": run.about.tags,
        "bytes": size_bytes,
        "bytes_freed": freed,
    }


def _note(summary: Mapping[str, Any]) -> str:
    return " ".join([*(f"#{tag}" for tag in summary["tags"]), summary["note"]])


def _scores(run: Run) -> dict[str, float]:
    """Return accuracies by model and source, `grpo.gsm8k`, and by model alone for the gate's first target."""
    models = run.figures.get("models") or {}
    target = (run.verdict.get("target") or {}).get("source")
    scores = {f"{model}.{source}": each["accuracy"] for model in models for source, each in models[model].items()}
    return {**{model: each[target]["accuracy"] for model, each in models.items() if target in each}, **scores}


def _told(stage: StageRun) -> Iterator[str]:
    if stage.reused_from:
        yield f"unchanged: from {stage.reused_from}"
    elif stage.seconds is not None:
        yield f"took {duration(stage.seconds)}"
    elif stage.error:
        yield f"{stage.end}: {stage.error['error']}"
    else:
        yield "not finished"
    step = last_step(stage.work) if stage.work and not stage.finished else None
    if step is not None:
        yield f"step {step} is saved in {stage.work}"


def _settings(run: Run) -> dict[str, str]:
    path = run.folder / PARAMS
    sections = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: value for name, section in (sections or {}).items() for key, value in flat(name, section)}


def _files(run: Run) -> dict[str, str]:
    named = {"report": PAGE, "figures": FIGURES, "params": PARAMS, "journal": JOURNAL, "log": LOG}
    return {what: str(run.folder / name) for what, name in named.items() if (run.folder / name).is_file()}


def _accuracies(run: Run) -> Iterator[str]:
    models = run.figures.get("models") or {}
    for source in models.get("grpo", {}):
        yield f"{source}: " + " -> ".join(
            f"{name} {percent(models[model][source]['accuracy'])}" for model, name in MODELS.items()
        )


def _side_by_side(values: Sequence[Mapping[str, float]], show: Any) -> list[str]:
    names = dict.fromkeys(name for each in values for name in each if "." in name or name not in MODELS)
    return [f"{name}: {' -> '.join(show(each[name]) if name in each else '-' for each in values)}" for name in names]
