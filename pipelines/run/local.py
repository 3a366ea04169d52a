"""One run of the graph on this machine: shows messages of its stages, and writes all their output to a log."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from rich.text import Text

from components.preflight.config import (
    STAGES,
    Params,
    advisories,
    as_yaml,
    contradictions,
    is_about_limits,
    load_params,
    stage_sections,
)
from components.register.checks import unwritable
from components.report import formatting
from components.report.report import STAGE as REPORT
from components.report.report import RunFacts, render_report
from components.shared import durable, jsonl, lineage
from components.shared.config import with_place
from components.shared.environment import JOURNAL_VARIABLE, limit_spin
from components.shared.errors import PipelineError, raise_all
from components.shared.execution import Revision, current_revision, find_secrets, uncommitted_files
from components.shared.live import base_name
from components.shared.page import percent
from components.shared.problem import problems_file, splits_in
from components.shared.work import last_step
from pipelines.doctor import slow_here, unused_gpu
from pipelines.requirements import missing_here, short_of_disk
from pipelines.run import history, index
from pipelines.run.expected import Expectation, expectations, records
from pipelines.run.history import About, Run, every_run, read_run, resolve
from pipelines.run.journal import Tracker
from pipelines.run.process import process
from pipelines.run.screen import Screen, Style
from pipelines.run.settings import heading, load
from pipelines.run.stages import header
from pipelines.run.watch import TRAININGS
from pipelines.tables import listed

_LOG_LINES, _LOG_BYTES = 20, 1 << 20
"""Last lines of the log that are shown when a stage is killed, and the end of the log in which they are looked for."""
_MARGIN_S = 5.0  # time for a stopped stage to end after it has written a checkpoint
_POLL_S = 0.2
_FILES = {"figures": history.FIGURES, "params": history.PARAMS, "log": history.LOG, "journal": history.JOURNAL}
_FILES |= {"outputs of the stages": history.ARTIFACTS, "all runs": "../../index.html"}
"""Links from the report to other files of the run, by label."""
_COLUMN_WIDTH = 24


def run(
    params: Path | None,
    settings: Sequence[str],
    *,
    resume: str | None,
    start: str,
    fresh: bool,
    dry_run: bool,
    name: str,
    **about: Any,
) -> int:
    """Run the whole graph with the options of the command line; return 0, or the exit code of the stage that failed.

    Stages reuse the outputs of earlier runs, except those from `start` on, or all with `fresh`. `about`: note and tags.
    PipelineError, before anything runs, names all contradictions between options or keys, and all missing data, models
    and rewards.
    """
    if start and start not in STAGES:
        raise PipelineError(f"--from {start}: no such stage; there are {', '.join(STAGES)}")
    if resume and params:
        raise PipelineError("--resume takes the params of the run; leave out --params, and change keys with --set")
    if not re.fullmatch(r"[\w.-]*", name):
        raise PipelineError(f"--name {name}: accepted are letters, digits, `_`, `-` and `.`")
    fresh_from = STAGES[0] if fresh else start
    resumed = resolve(resume) if resume else None
    path = resumed.folder / history.PARAMS if resumed else (params or Path("params.yaml"))
    config = load(path, settings)
    patch = current_revision().patch or ""
    warnings = _check(path, settings, config, patch, fresh_from)
    limit_spin()
    screen = Screen(sys.stdout, sys.stderr)
    before = resumed.about if resumed else About(params=path.stem)  # a resumed run keeps its note and tags
    note, tags = about["note"] or before.note, about["tags"] or before.tags
    description = About(params=before.params, note=note, tags=tags)
    name = name or (base_name(resumed.name) if resumed else path.stem)
    if dry_run or resumed:
        like = [resumed] if resumed else [run for run in every_run() if run.about.params == description.params]
        _show_expected(expectations(config, like, fresh_from=fresh_from), screen, every=dry_run)
    if dry_run:
        _show_warnings(warnings, screen)
        return 0
    folder = _new_folder(description, name)
    lock = durable.lock_folder(folder / history.LOCK)  # until the run ends
    (folder / history.PARAMS).write_text(f"{heading(path, settings)}{as_yaml(config)}", encoding="utf-8")
    screen.show(f"{path} -> {folder}/", Style.DIM)
    if files := uncommitted_files(patch):
        screen.show(f"uncommitted changes, recorded in the lineage of every stage: {listed(files)}", Style.DIM)
    _show_warnings(warnings, screen)
    exit_code = _run(folder, config, screen, fresh_from)
    lock.release()
    return exit_code


def _show_warnings(warnings: Sequence[str], screen: Screen) -> None:
    for warning in warnings:
        screen.show(f"warning: {warning}")


def _check(path: Path, settings: Sequence[str], params: Params, patch: str, fresh_from: str) -> list[str]:
    """Return warnings about a run; PipelineError with all problems that prevent it.

    `params` are those of the file at `path` with `settings` applied; `patch` has the uncommitted changes. The stages
    from `fresh_from` on reuse nothing.
    """
    data_folder = None if params.prepare_data.repository else Path()
    problems = missing_here(params) + contradictions(params, data_folder)
    proposal = f"`grpo-pipeline limits --params {path}` proposes limits that fit the data and the model"
    hint = proposal if any(map(is_about_limits, problems)) else ""
    has_base = not any("train_sft.model.base" in line for line in problems)  # otherwise its size is unknown
    full_disk = short_of_disk(params, history.OUTPUTS) if has_base else None
    is_set = [setting.partition("=")[0] for setting in settings]
    problems = [with_place(path, line, is_set) for line in problems]
    trains = fresh_from in STAGES[: STAGES.index("evaluate")] or not records("train_sft")
    if full_disk and trains:  # outputs that are reused take no space
        problems.append(full_disk)
    problems += filter(None, [unwritable(str(history.OUTPUTS))])
    raise_all(problems, hint)
    advice = "seems to contain a key or a password; remove it: uncommitted changes are recorded in every lineage"
    raise_all([f"{place}: {advice}" for place in find_secrets(patch)])
    warnings = (*advisories(params, data_folder), slow_here(params), full_disk, unused_gpu())
    return [warning for warning in warnings if warning]


def _run(folder: Path, params: Params, screen: Screen, fresh_from: str) -> int:
    """Run all stages in the folder of a new run, show the result, and return the exit code."""
    started = time.monotonic()
    # A stopped training writes a checkpoint.
    grace_s = _MARGIN_S + max(params.train_sft.checkpoint.grace_s, params.train_grpo.checkpoint.grace_s)
    with (folder / history.JOURNAL).open("a+", encoding="utf-8") as journal:
        tracker = Tracker(screen, journal, STAGES)
        try:
            _execute(folder, tracker, screen, grace_s, fresh_from)
        except SystemExit:
            screen.end(f"{_end_of(folder, params)}; log: {folder / history.LOG}")
            raise
        finally:
            screen.draw([])
    if not folder.is_dir():
        raise PipelineError(f"{folder}: was removed during the run")
    run = resolve(folder.name)
    exit_code = _show_failure(tracker, run, screen)
    if "report" in run.stages and run.stages["report"].finished is not None:
        _write_summary(run, exit_code)
        _make_latest(folder)
        _show_summary(run, screen)
    else:
        screen.show(_end_of(folder, params, fails_again=exit_code == PipelineError.exit_code))
    with suppress(PipelineError, OSError):  # a failed index does not fail the run
        index.write(history.OUTPUTS, params.register.registry)
    num_reused = sum(stage.reused_from is not None for stage in run.stages.values())
    reused = f" ({num_reused} unchanged)" if num_reused else ""
    done = (
        f"{tracker.num_finished} of {len(STAGES)} stages{reused} in {formatting.duration(time.monotonic() - started)}"
    )
    screen.show(f"{done}; log: {folder / history.LOG}", Style.DIM)
    return exit_code


def _show_expected(expected: Sequence[Expectation], screen: Screen, *, every: bool) -> None:
    """With `every`, show the expectation of each stage and the total time, else only the first stage to compute."""
    computed = [each for each in expected if not each.reused_from]
    for each in expected if every else computed[:1]:
        screen.show(f"[{expected.index(each) + 1}/{len(expected)}] {each.stage:<14}{each}")
    if every:
        seconds = [each.seconds for each in computed if each.seconds is not None]
        estimate = "no time estimate: no earlier run is comparable"
        if len(seconds) == len(computed):
            estimate = f"about {formatting.duration(sum(seconds))}"
        screen.show(f"{len(computed)} of {len(expected)} stages would run ({estimate}); nothing was run", Style.DIM)


def _end_of(folder: Path, params: Params, *, fails_again: bool = False) -> str:
    """Return where a run without a report ended, its last saved step, and the command that resumes it."""
    run = read_run(folder)
    assert run is not None, "the folder is named like a run"
    end = f"stopped after {[*run.stages][-1]}" if run.stages else "stopped"
    if stage := run.unfinished:
        end = f"{stage.end} at {stage.name}"
        step = last_step(stage.work) if stage.work else None
        if step is not None:
            end += f", step {step} of {getattr(params, stage.name).num_steps} is saved"
    resume = f"resume with: grpo-pipeline run --resume {folder.name}"
    if fails_again:  # with the same params
        settings = "--set KEY=VALUE for each key to change; a key that changes the result makes its stage start anew"
        return f"{end}; once the cause is corrected, {resume}, and {settings}"
    return f"{end}; {resume}"


def _new_folder(about: About, name: str) -> Path:
    """Make the folder of a run; runs started in the same second get different folders."""
    first = history.OUTPUTS / "runs" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    jsonl.write_json(folder / history.ABOUT, about.model_dump(mode="json"))
    return folder


def _execute(folder: Path, tracker: Tracker, screen: Screen, grace_s: float, fresh_from: str) -> None:
    """Run all stages in another process, which gets `grace_s` to end if it is stopped, and show their messages."""
    command = [sys.executable, "-m", "pipelines.run.stages", str(folder.resolve()), f"--fresh-from={fresh_from}"]
    command.append(f"--parent={os.getpid()}")
    environment = {**os.environ, JOURNAL_VARIABLE: str(folder.resolve() / history.JOURNAL)}
    with (
        # The temporary folders of killed stages are removed with this one.
        tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as scratch,
        (folder / history.LOG).open("wb") as log,
        process(command, {**environment, "TMPDIR": scratch}, grace_s=grace_s, log=log) as stages,
    ):
        try:
            while stages.poll() is None:
                tracker.read()
                with suppress(TimeoutExpired):
                    stages.wait(_POLL_S)
            tracker.read()
        except SystemExit:
            screen.draw([])
            if tracker.running in TRAININGS:
                saves = f"finishes its step and saves a checkpoint, within {grace_s:g} s"
                screen.show(f"stopping: {tracker.running} {saves}; Ctrl-C again ends it at once", Style.DIM)
            raise


def _show_failure(tracker: Tracker, run: Run, screen: Screen) -> int:
    """Show where to find the cause if a stage has failed, and return the exit code of the run."""
    stage = tracker.running
    if stage is None:
        return 0
    if tracker.exit_code is not None:  # the stage has reported its error
        for output in run.stages[stage].outputs.values():
            if (page := output / history.PAGE).is_file():
                screen.detail(f"see {os.path.relpath(page)}")
        return tracker.exit_code
    log = run.folder / history.LOG
    _, _, stage_log = durable.tail(log, max_bytes=_LOG_BYTES).rpartition(f"{header(stage)}\n")
    lines = [line.rstrip() for line in stage_log.splitlines() if line.strip()]
    screen.error(f"{stage} stopped unexpectedly; the last lines of {log}:", *lines[-_LOG_LINES:])
    return 1


def _make_latest(folder: Path) -> None:
    """Point outputs/latest to a run, atomically."""
    link = history.OUTPUTS / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(history.OUTPUTS))
    link.replace(history.OUTPUTS / "latest")


def _write_summary(run: Run, exit_code: int) -> None:
    """Write report.html and summary.json of a run, even if it missed the gate or its registration failed.

    They are those of its report stage, with version, times and digests added.
    """
    folder = run.folder
    params = load_params(folder / history.PARAMS)
    artifacts = folder / history.ARTIFACTS
    reused = {name: stage.reused_from for name, stage in run.stages.items() if stage.reused_from}
    computed = [stage for stage in run.stages.values() if not stage.reused_from]
    seconds = {stage.name: stage.seconds for stage in computed if stage.seconds is not None}
    version = jsonl.read_json(artifacts / "register/registration/version.json") if exit_code == 0 else None
    made_by = lineage.read(artifacts / "report/report")
    assert made_by is not None  # the run has made it
    command = _repeating_command(folder, made_by.revision(), version)
    facts = RunFacts(version, seconds, artifacts / "train_grpo/timings", made_by, command, _FILES)
    figures = jsonl.read_json(artifacts / "report/report/summary.json")
    inputs = {name: artifacts / source for name, source in REPORT.inputs.items()}
    page = render_report(params.report, inputs, verdict=figures["verdict"], run=facts)
    (folder / history.PAGE).write_text(page, encoding="utf-8")
    problems = artifacts / "prepare_data/problems"
    digests = {
        **figures["digests"],
        "params_file": lineage.value_digest(stage_sections(params)),
        **{split: lineage.file_digest(problems_file(problems, split)) for split in splits_in(problems)},
    }
    added = {"digests": digests, "version": version, "seconds": seconds, "reused_from": reused, "exit": exit_code}
    jsonl.write_json(folder / history.FIGURES, {**figures, **added})


def _repeating_command(folder: Path, revision: Revision | None, version: Mapping[str, Any] | None) -> str:
    """Return the shell command that repeats a run: from its version if it has one, otherwise from its commit."""
    if version:
        return f".venv/bin/grpo-pipeline reproduce {version['tag']}"
    lines = [f"git checkout {revision.commit}"] if revision and revision.commit else []
    if revision and revision.patch_digest:
        lines.append("# and apply the uncommitted changes, `revisions` in lineage.json of the report")
    return "\n".join([*lines, f".venv/bin/grpo-pipeline run --params {folder / history.PARAMS}"])


def _show_summary(run: Run, screen: Screen) -> None:
    """Show the accuracies, the verdict and the version of a run from its summary.json."""
    figures = jsonl.read_json(run.folder / history.FIGURES)
    verdict, version, lengths = figures["verdict"], figures["version"], figures["mean_length_tokens"]
    rows: dict[str, list[str]] = {"on held-out problems": list(formatting.MODELS.values())}
    for source in (part["source"] for part in verdict["sources"]):
        scores = [figures["models"][model][source] for model in formatting.MODELS]
        cells = [f"{percent(score['accuracy'])} ({formatting.interval(score['interval'])})" for score in scores]
        rows[f"{source} accuracy"] = cells
    rows["step-by-step answers"] = [percent(figures["worked_fraction"][model]) for model in formatting.MODELS]
    rows["mean tokens"] = [f"{lengths[model]:.1f}" for model in formatting.MODELS]
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
    registered = f"{version['tag']} in {version['registry']}" if version else "nothing"
    if version and not (run.stages["register"].finished or {})["metrics"]["registered"]:
        registered = f"nothing new: the same weights are already registered as {registered}"
    screen.show(f"registered  {registered}")
    screen.show(f"report      {run.folder / history.PAGE}")
