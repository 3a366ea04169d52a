"""One run of the graph on this machine, under KFP's local runner: progress on the screen, everything else in a log.

The graph runs in a process of its own, `python -m pipelines.run.local PARAMS PIPELINE_ROOT JOURNAL [--containers]`,
whose output is read here: the part of it that is meant for people is shown.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from types import ModuleType

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
from components.preflight.disk import short_of_disk
from components.preflight.inputs import missing_here
from components.shared import durable, jsonl
from components.shared.environment import JOURNAL_VARIABLE, limit_spin
from components.shared.errors import PipelineError, raise_all
from components.shared.execution import current_revision, keys_in, uncommitted_files
from components.shared.reuse import offer
from components.shared.work import last_step
from pipelines.doctor import slow_here, unused_gpu
from pipelines.run import expected as expectation
from pipelines.run import index, settings, summary
from pipelines.run.history import (
    ABOUT,
    ARTIFACTS,
    JOURNAL,
    LOCK,
    LOG,
    OUTPUTS,
    PARAMS,
    About,
    read_run,
    resolve,
    runs,
)
from pipelines.run.journal import Tracker
from pipelines.run.process import lines, output, process
from pipelines.run.screen import Screen, Style, duration
from pipelines.run.stage_server import forked_stages

_LINES_SHOWN = 20
_FILES_SHOWN = 5
_TAIL_BYTES = 1 << 20
_MARGIN_S = 5.0
_KFP_INDENT = " " * 4


@dataclass(frozen=True)
class Request:
    """What a run is asked to do, beside its params."""

    params: Path = Path("params.yaml")
    settings: Sequence[str] = ()
    """Keys with values in YAML, `train_grpo.num_steps=10`, which go before the file."""
    resume: str | None = None
    """Run whose params are taken in the place of a file's."""
    start: str = ""
    """First stage that is computed even if it is unchanged."""
    fresh: bool = False
    """Whether every stage is computed."""
    dry: bool = False
    """Whether everything is checked and nothing is run."""
    containers: bool = False
    """Whether each stage runs in a container of its image."""
    verbose: bool = False
    """Whether everything that KFP and the stages print is shown."""
    name: str = ""
    """Name of its folder after the time; that of its params file if empty."""
    note: str = ""
    tags: Sequence[str] = ()


def run(request: Request) -> int:
    """Run the whole graph and return 0, or the exit code of the stage that failed.

    Stages that an earlier run has finished are taken from there, unless the request says otherwise.

    Raises:
        PipelineError: Keys contradict one another, or data, a model, a reward or the registry is missing. All of it is
            named, and nothing was run.
    """
    before = read_run(resolve(request.resume)) if request.resume else None
    path, name = (before.folder / PARAMS, before.params) if before else (request.params, request.params.stem)
    params = settings.load(path, request.settings)
    data = None if params.prepare_data.repository else Path()
    wrong = missing_here(params, containers=request.containers) + contradictions(params, data)
    if any(map(is_about_limits, wrong)):
        wrong.append(f"`grpo-pipeline limits --params {path}` proposes limits that fit the data and the model")
    wrong = [f"{path}: {line}" for line in wrong]
    earlier = runs(OUTPUTS)
    offered = {} if request.fresh else expectation.offers(earlier, before=request.start)
    full = None if any("train_sft.model.base" in line for line in wrong) else short_of_disk(params, OUTPUTS)
    # What is taken from an earlier run takes no space.
    raise_all(wrong if full is None or offered.get("train_sft") else [*wrong, full])
    limit_spin()
    patch = current_revision().patch or ""
    found = "seems to hold a key or a password; remove it: uncommitted changes are recorded with all that is made"
    raise_all([f"{place}: {found}" for place in keys_in(patch)])
    engine = _containers() if request.containers else None
    screen = Screen(sys.stdout, sys.stderr)
    if request.dry or before:
        asked = "--fresh" if request.fresh else f"--from {request.start}"
        like = [before] if before else [run for run in earlier if run.params == name]
        expected = expectation.expectations(
            params, like, offered, asked=asked if request.fresh or request.start else ""
        )
        _show_expected(expected, screen, every=request.dry)
    if request.dry:
        return 0
    folder = _new_folder(About(params=name, note=request.note, tags=tuple(request.tags)), request.name or name)
    lock = durable.lock_folder(folder / LOCK)  # while it is locked the run goes on
    heading = settings.heading(path, request.settings)
    (folder / PARAMS).write_text(f"{heading}{as_yaml(params)}", encoding="utf-8")
    offer(folder / JOURNAL, offered)
    screen.show(f"{path} -> {folder}/", Style.DIM)
    if not before and (purpose := _purpose(path)):
        screen.show(purpose, Style.DIM)
    if files := uncommitted_files(patch):
        shown = ", ".join(files[:_FILES_SHOWN]) + (" ..." if len(files) > _FILES_SHOWN else "")
        screen.show(f"uncommitted changes are recorded with all that is made: {shown}", Style.DIM)
    idle = "" if request.containers else unused_gpu()
    for line in filter(None, [*advisories(params, data), slow_here(params), full, idle]):
        screen.show(f"warning: {line}")
    exit_code = _run(folder, params, screen, engine, verbose=request.verbose)
    lock.release()
    return exit_code


def _purpose(path: Path) -> str:
    """The first sentence of the comment that a params file begins with."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0]


def _run(folder: Path, params: Params, screen: Screen, engine: ModuleType | None, *, verbose: bool) -> int:
    """Run the graph in the folder of a new run, and return the exit code."""
    started = time.monotonic()
    # The longest that a stage may need to write a checkpoint.
    grace_s = _MARGIN_S + max(params.train_sft.checkpoint.grace_s, params.train_grpo.checkpoint.grace_s)
    with (folder / JOURNAL).open("a+", encoding="utf-8") as journal:
        tracker = Tracker(screen, journal)
        try:
            status = _execute(folder, tracker, screen, grace_s, engine, verbose=verbose)
        except SystemExit:
            screen.end(f"{_end_of(folder, params)}; log: {folder / LOG}")
            raise
    exit_code = _exit_code(tracker, status, folder, screen)
    if any(task.name == "report" for task in tracker.finished):
        summary.write(folder, tracker.tasks, exit_code)
        _make_latest(folder)
        summary.show(folder, screen)
    elif tracker.tasks:
        screen.show(_end_of(folder, params))
    with suppress(PipelineError, OSError):  # of all runs: what became of this one does not depend on it
        index.write(OUTPUTS, params.register.registry)
    done = f"{len(tracker.finished)} of {len(tracker.tasks)} stages in {duration(time.monotonic() - started)}"
    screen.show(f"{done}; log: {folder / LOG}", Style.DIM)
    return exit_code


def _show_expected(expected: Sequence[expectation.Expectation], screen: Screen, *, every: bool) -> None:
    """Show what is expected of each stage; without `every`, of the first that is computed."""
    computed = [each for each in expected if not each.reused_from]
    for each in expected if every else computed[:1]:
        screen.show(f"[{expected.index(each) + 1}/{len(expected)}] {each.stage:<14}{each}")
    if every:
        seconds = [each.seconds for each in computed]
        known = "no estimate: no run like it" if None in seconds else f"about {duration(sum(filter(None, seconds)))}"
        screen.show(f"{len(computed)} of {len(expected)} stages would run ({known}); nothing was run", Style.DIM)


def _end_of(folder: Path, params: Params) -> str:
    """Where a run that did not get to its report has ended, what of it is saved, and the command that goes on."""
    run = read_run(folder)
    stage = run.unfinished if run else None
    done = list(run.stages) if run else []
    end = f"{stage.end} at {stage.name}" if stage else f"stopped after {done[-1]}" if done else "stopped"
    step = last_step(stage.work) if stage and stage.work else None
    total = getattr(getattr(params, stage.name), "num_steps", None) if stage else None
    saved = "" if step is None else f", step {step}{f' of {total}' if total else ''} is saved"
    return f"{end}{saved}; resume with: grpo-pipeline run --resume {folder.name}"


def _containers() -> ModuleType:
    """Import what runs stages in containers, which needs a package of its own, and check that they can run."""
    try:
        from pipelines.run import containers
    except ModuleNotFoundError as error:
        raise PipelineError(f"--containers needs the Python package {error.name}: pip install docker") from None
    containers.check()
    return containers


def _new_folder(about: About, name: str) -> Path:
    """Make the folder of a run; two runs begun in the same second get different ones."""
    first = folder = OUTPUTS / "runs" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = first.with_name(f"{first.name}-{number}")
        else:
            jsonl.write_json(folder / ABOUT, about.model_dump(mode="json"))
            return folder


def _execute(
    folder: Path, tracker: Tracker, screen: Screen, grace_s: float, engine: ModuleType | None, *, verbose: bool
) -> int:
    """Run the graph in a process of its own until it ends; log and show its output, and return its exit status."""
    paths = [str(folder.resolve() / name) for name in (PARAMS, ARTIFACTS, JOURNAL)]
    command = [sys.executable, "-m", "pipelines.run.local", *paths, *(["--containers"] if engine else [])]
    environment = {**os.environ, JOURNAL_VARIABLE: paths[-1]}
    with (
        engine.no_containers_left(folder.resolve()) if engine else nullcontext(),
        # KFP leaves temporary folders behind; they go away with this one.
        tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as scratch,
        (folder / LOG).open("wb", buffering=0) as log,
        process(command, {**environment, "TMPDIR": scratch}, grace_s=grace_s) as graph,
    ):
        try:
            for line in lines(output(graph)):
                if line is None:
                    tracker.idle()
                    continue
                log.write(line + b"\n")
                if verbose:
                    screen.show(line.decode("utf-8", errors="replace"), Style.DIM)
                tracker.line(line.decode("utf-8", errors="replace"))
        except SystemExit:
            screen.draw([])
            if tracker.running and tracker.running.name.startswith("train"):
                limit = f"at most {grace_s:g} s"
                screen.show(
                    f"stopping: {tracker.running.name} ends its step and saves a checkpoint ({limit})", Style.DIM
                )
            raise
        status = graph.wait()
    tracker.idle()
    tracker.idle()
    return status


def _exit_code(tracker: Tracker, status: int, folder: Path, screen: Screen) -> int:
    """Return the exit code of the run, and show where to look if something went wrong."""
    if not folder.is_dir():
        raise PipelineError(f"{folder}: was removed while the run was at work")
    task = tracker.running
    if tracker.tasks and task is None and status == 0:
        return 0
    if task is not None and tracker.exit_code is not None:
        for page in (output / "report.html" for output in task.outputs.values()):
            if page.is_file():
                screen.detail(f"see {os.path.relpath(page)}")
        return tracker.exit_code
    what = f"{task.name} stopped unexpectedly" if task else "the graph could not be run"
    screen.error(f"{what}; the last lines of {folder / LOG}:", *_last_lines(folder / LOG, of_stage=status == 0))
    return 1


def _last_lines(log: Path, *, of_stage: bool) -> list[str]:
    """The end of the log; with `of_stage`, of the output of the last stage, which KFP indents, without KFP's own."""
    text = [line.rstrip() for line in durable.tail(log, max_bytes=_TAIL_BYTES).splitlines()]
    if of_stage:
        text = [line.removeprefix(_KFP_INDENT) for line in text if line.startswith(_KFP_INDENT)]
        # A task begins by printing its inputs, as a JSON object.
        text = text[len(text) - text[::-1].index("}") :] if "}" in text else text
    return [line for line in text if line][-_LINES_SHOWN:]


def _make_latest(folder: Path) -> None:
    """Have outputs/latest point to a run; there is no moment without it."""
    link = OUTPUTS / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(OUTPUTS))
    link.replace(OUTPUTS / "latest")


def _run_graph(params: Path, pipeline_root: str, journal: Path, *, containers: bool) -> None:
    """Run every task of the graph, one after the other, in this environment or each in a container of its image."""
    # Standard output is a pipe here: without this, lines would arrive in blocks of 8 KiB.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with nullcontext() if containers else forked_stages():
        _run_tasks(params, pipeline_root, journal, containers=containers)


def _start_nothing_after_stop() -> None:
    """Leave SIGINT to the stage at work, which ends in good order, and have KFP start no stage after it.

    A stage may miss the signal while it starts, or be done with its work: the run ends all the same.
    """
    from kfp.local import subprocess_task_handler

    start, stops = subprocess_task_handler.run_local_subprocess, list[int]()
    signal.signal(signal.SIGINT, lambda number, _: stops.append(number))

    def run(full_command: Sequence[str], env_vars: Mapping[str, str] | None = None) -> int:
        exit_code: int = 128 + stops[0] if stops else start(full_command=full_command, env_vars=env_vars)
        return exit_code

    subprocess_task_handler.run_local_subprocess = run


def _run_tasks(params: Path, pipeline_root: str, journal: Path, *, containers: bool) -> None:
    from kfp import local

    from pipelines.graph import local_graph

    graph = local_graph(stage_sections(load_params(params)))
    journal.write_text(json.dumps({"event": "planned", "tasks": STAGES}) + "\n", encoding="utf-8")
    if containers:
        runner = _containers().runner(journal.parent, journal)
    else:
        _start_nothing_after_stop()
        runner = local.SubprocessRunner(use_venv=False)
    local.init(runner, pipeline_root=pipeline_root, raise_on_error=False)
    graph()


if __name__ == "__main__":
    _run_graph(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), containers="--containers" in sys.argv)
