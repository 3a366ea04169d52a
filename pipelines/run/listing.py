"""The commands `grpo-pipeline runs` and `gc`: list, show, annotate, compare, open and remove the runs of this machine.

Registries, their storage, the run started last and everything that a process uses are never garbage.
"""

import os
import stat
import sys
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from rich.filesize import decimal

from components.report.formatting import MODELS, duration
from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.execution import ABSENT
from components.shared.lineage import flat
from components.shared.page import percent
from components.shared.progress import brief
from components.shared.stage import WORK
from components.shared.work import fingerprint_in, last_step, reserved
from pipelines.run.history import ABOUT, ARTIFACTS, OUTPUTS, PAGE, PARAMS, Run, StageRun, every_run, resolve
from pipelines.run.screen import Screen
from pipelines.run.settings import own_keys
from pipelines.run.watch import COLORS, curve_of, steps_of, text_plot
from pipelines.tables import aligned, change_lines, print_json, print_labelled, setting_changes

_Links = Counter[tuple[int, int]]
"""Numbers of hard links, by the device and inode of their file."""


def list_runs(text: str, *, as_json: bool) -> None:
    """List the runs with `text` in their name, state, params file, verdict, version, note or tags, the newest first."""
    summaries = []
    for summary in map(_summary, every_run()):
        searched = [*(summary[key] for key in ("name", "state", "params", "gate", "version")), _note(summary)]
        if text in " ".join(map(str, searched)):
            summaries.append(summary)
    if as_json:
        print_json(summaries)
    elif not summaries:
        print(f"{OUTPUTS / 'runs'} has no {f'run that says {text!r}' if text else 'runs'}")
    else:
        rows = [("run", "state", *MODELS.values(), "gate", "version", "size", "freeable", "note")]
        for each in summaries:
            scores = each["accuracy"]
            accuracies = [percent(scores[model]) if model in scores else "-" for model in MODELS]
            sizes = [decimal(each["bytes"]), decimal(each["bytes_freed"])]
            outcome = [each["gate"] or "-", each["version"] or "-"]
            rows.append((each["name"], each["state"], *accuracies, *outcome, *sizes, _note(each)))
        print(aligned(rows))


def show(name: str, *, as_json: bool) -> None:
    """Show one run with its stages."""
    run = resolve(name)
    summary = _summary(run)
    if as_json:
        stages = [
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "reused_from": stage.reused_from,
                "error": stage.error["error"] if stage.error else None,
                "outputs": {name: str(path) for name, path in stage.outputs.items()},
            }
            for stage in run.stages.values()
        ]
        print_json({**summary, "stages": stages, "settings": _settings(run), "files": run.files})
        return
    gate = f", gate {summary['gate']}" if summary["gate"] else ""
    version = f", registered {summary['version']}" if summary["version"] else ""
    if version and summary["gate"] == "missed":
        gate += " but not enforced"
    print(f"{run.name}: {run.state}{gate}{version}")
    for stage in run.stages.values():
        print_labelled(stage.name, _stage_lines(stage))
    if _note(summary):
        print_labelled("note", [_note(summary)])
    print_labelled("accuracy", _accuracies(run))
    print_labelled("settings", own_keys(run.folder / PARAMS))
    shared = ", and keeps what other runs share" if summary["bytes_freed"] < summary["bytes"] else ""
    print_labelled("disk", [f"{decimal(summary['bytes'])}; `runs rm` frees {decimal(summary['bytes_freed'])}{shared}"])
    print_labelled("files", run.files.values())


def note(name: str, text: str, tags: Sequence[str]) -> None:
    """Replace the note and the tags of a run."""
    run = resolve(name)
    about = run.about.model_copy(update={"note": text, "tags": tuple(tags)})
    jsonl.write_json(run.folder / ABOUT, about.model_dump(mode="json"))


def compare(names: Sequence[str], *, curve: str, as_json: bool) -> None:
    """Print how the params, accuracies and times of 2 to 6 runs differ, and plot the figure `curve` of their steps."""
    runs = list(map(resolve, names))
    full_names = [run.name for run in runs]
    if not 2 <= len(runs) <= len(COLORS):
        raise PipelineError(f"runs compare: name 2 to {len(COLORS)} runs; these are {len(runs)}")
    params = setting_changes(*map(_settings, runs))
    accuracies = list(map(_accuracy_by_source, runs))
    stages = [run.stages.values() for run in runs]
    seconds = [{stage.name: stage.seconds for stage in each if stage.seconds is not None} for each in stages]
    if as_json:
        print_json({"runs": full_names, "params": params, "accuracy": accuracies, "seconds": seconds})
        return
    print(" -> ".join(full_names))
    print_labelled("params", change_lines(params))
    print_labelled("accuracy", _side_by_side(accuracies, percent))
    print_labelled("times", _side_by_side(seconds, duration))
    _plot({run.name: steps_of(run) for run in runs}, curve)


def _plot(steps_by_run: Mapping[str, Sequence[Mapping[str, Any]]], curve: str) -> None:
    """Plot one figure of the steps of runs; PipelineError if there are steps, and none has the figure."""
    screen = Screen(sys.stdout, sys.stderr)
    figures = sorted({column for steps in steps_by_run.values() for row in steps for column in row})
    if figures and curve not in figures:
        raise PipelineError(f"--curve {curve}: no step has this figure; there are {', '.join(figures)}")
    curves = {name: curve_of(steps, curve) for name, steps in steps_by_run.items()}
    lines = text_plot(curves, screen.size[0], percent if curve == "accuracy" else brief)
    if lines:
        sampled = " of sampled completions" if curve == "accuracy" else ""
        screen.show(f"{curve}{sampled}, by step of train_grpo")
    for line in lines:
        screen.show(line)


def open_report(name: str) -> None:
    """Print the path of a run's report, and open it in the browser."""
    run = resolve(name)
    page = run.folder / PAGE
    if not page.is_file():
        raise PipelineError(f"{page}: there is no report yet: the run is {run.state}")
    print(page)
    webbrowser.open(page.resolve().as_uri())


def remove(names: Sequence[str], *, yes: bool) -> int:
    """Remove runs after asking, or without with `yes`; return 1 if the user does not agree."""
    runs = {run.name: run for run in map(resolve, names)}
    for run in runs.values():
        if run.is_running:
            raise PipelineError(f"{run.name}: is running; stop it first")
    removed_links: _Links = Counter()
    for run in runs.values():
        print(f"{run.name}: {run.state}, frees {decimal(disk(run.folder, removed_links)[1])}")
    try:
        has_agreed = yes or input("remove? [y/N] ").strip().lower() == "y"
    except EOFError:
        print()
        raise PipelineError("runs rm: no terminal to ask for confirmation; pass --yes") from None
    if not has_agreed:
        print("nothing was removed")
        return 1
    for run in runs.values():
        remove_run(run.folder)
    return 0


def remove_run(folder: Path) -> None:
    """Remove a run that is not running; if outputs/latest pointed to it, point it to the newest run with a report."""
    durable.discard(folder)
    outputs = folder.parents[1]
    latest = outputs / "latest"
    if latest.is_symlink() and not latest.exists():
        with_report = [each.folder for each in every_run(outputs) if each.figures]
        latest.unlink()
        if with_report:
            latest.symlink_to(with_report[0].relative_to(outputs))


class Garbage(NamedTuple):
    """A folder that can be removed."""

    path: Path
    reason: str
    kind: Literal["run", "artifacts", "work"]
    """A whole run, the artifacts of a run, or unfinished work."""


def collect(keep: int | None, *, dry_run: bool) -> None:
    """Remove garbage, with `keep` also all but the newest `keep` runs, and print its size; `dry_run` only prints."""
    if keep is not None and keep < 1:
        raise PipelineError(f"--keep {keep}: the run started last always stays; accepted: 1 or more")
    total_bytes = 0
    removed_links: _Links = Counter()
    for each in garbage(every_run(), keep=keep):
        freed_bytes = disk(each.path, removed_links if dry_run else None)[1]
        if dry_run or _remove(each):
            total_bytes += freed_bytes
            print(f"{'would remove' if dry_run else 'removed'} {each.path} ({decimal(freed_bytes)}): {each.reason}")
    print(f"{decimal(total_bytes)} {'would be freed' if dry_run else 'freed'}")


def garbage(runs: Sequence[Run], *, keep: int | None) -> Iterator[Garbage]:
    """Yield what can be removed: old runs if `keep` is given, artifacts of failed runs, and work that cannot resume.

    `runs` are all runs, the newest first.
    """
    num_kept = len(runs) if keep is None else keep
    for run in runs[num_kept:]:
        if not run.is_running:
            yield Garbage(run.folder, f"older than the newest {keep}", "run")
    finished = [run.started for run in runs if run.state == "finished"]
    for run in runs[1:num_kept]:  # the run started last always stays
        has_failed = run.state != "finished" and not run.is_running
        is_superseded = any(run.started < started for started in finished)
        training = run.stages.get("train_grpo")
        has_policy = training is not None and training.finished is not None  # which may exist only here
        if has_failed and is_superseded and not has_policy and (run.folder / ARTIFACTS).is_dir():
            yield Garbage(run.folder / ARTIFACTS, f"the run {run.state}, and a later one has finished", "artifacts")
    for folder in sorted(WORK.glob("*/[!.]*/")):
        step, fingerprint = last_step(folder), fingerprint_in(folder)
        if step is None:
            yield Garbage(folder, "has no checkpoint", "work")
        elif fingerprint is None or fingerprint.get("files") != lineage.stage_files(folder.parent.name):
            yield Garbage(folder, f"step {step} of other code, which cannot be resumed", "work")


def _remove(item: Garbage) -> bool:
    """Remove garbage and return True; return False for work that a process uses."""
    if item.kind == "work":
        with reserved(item.path) as is_free:
            if is_free:
                durable.discard(item.path)
            return is_free
    if item.kind == "run":
        remove_run(item.path)
    else:
        durable.discard(item.path)
    return True


def disk(folder: Path, removed_links: _Links | None = None) -> tuple[int, int]:
    """Return the bytes of all files in a folder, and those that its removal frees: other runs may have hard links.

    `removed_links` counts the links in folders that will be removed before this one; the links here are added to it.
    """
    num_links: _Links = Counter() if removed_links is None else removed_links
    files: dict[tuple[int, int], os.stat_result] = {}  # by device and inode: a file may have several links here
    for _, status in durable.walk(folder):
        if stat.S_ISREG(status.st_mode):
            num_links[status.st_dev, status.st_ino] += 1
            files[status.st_dev, status.st_ino] = status
    freed_bytes = sum(status.st_size for key, status in files.items() if num_links[key] >= status.st_nlink)
    return sum(status.st_size for status in files.values()), freed_bytes


def _summary(run: Run) -> dict[str, Any]:
    """Return the values of a run that `runs list --json` prints."""
    size_bytes, freed_bytes = disk(run.folder)
    return {
        "name": run.name,
        "started": run.started.isoformat(),
        "params": run.about.params,
        "state": run.state,
        "accuracy": _accuracy_by_source(run),
        "gate": {True: "passed", False: "missed", None: None}[run.verdict.get("passed")],
        "version": run.version.get("tag"),
        "note": run.about.note,
        "tags": run.about.tags,
        "bytes": size_bytes,
        "bytes_freed": freed_bytes,
    }


def _note(summary: Mapping[str, Any]) -> str:
    tags = " ".join(f"#{tag}" for tag in summary["tags"])
    return ": ".join(filter(None, [tags, summary["note"]]))


def _accuracy_by_source(run: Run) -> dict[str, float]:
    """Return accuracies by model and source, such as `grpo.gsm8k`, and by model alone for the gate's first target."""
    models = run.figures.get("models") or {}
    target = (run.verdict.get("target") or {}).get("source")
    by_model = {model: scores[target]["accuracy"] for model, scores in models.items() if target in scores}
    by_source = {f"{model}.{source}": models[model][source]["accuracy"] for model in models for source in models[model]}
    return by_model | by_source


def _stage_lines(stage: StageRun) -> Iterator[str]:
    """Yield how a stage ended or how long it took, and which step of its work is saved."""
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
    """Return each value of a run's params, as JSON, by its key, such as `train_grpo.num_steps`."""
    path = run.folder / PARAMS
    sections = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: value for name, section in (sections or {}).items() for key, value in flat(name, section)}


def _accuracies(run: Run) -> Iterator[str]:
    """Yield a line for each source, with the accuracy of each model."""
    models = run.figures.get("models") or {}
    for source in models.get("grpo", {}):
        accuracies = (f"{name} {percent(models[model][source]['accuracy'])}" for model, name in MODELS.items())
        yield f"{source}: {' -> '.join(accuracies)}"


def _side_by_side(columns: Sequence[Mapping[str, float]], to_text: Callable[[float], str]) -> Iterator[str]:
    """Yield a line for each name in any column, with its value in every column."""
    for name in dict.fromkeys(name for column in columns for name in column):
        if name not in MODELS:  # these accuracies are also there by source, such as `grpo.gsm8k`
            values = (to_text(column[name]) if name in column else ABSENT for column in columns)
            yield f"{name}: {' -> '.join(values)}"
