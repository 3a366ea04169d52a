"""One run of the graph on this machine: messages of its stages on the screen, all their output in a log."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

from components.preflight.config import (
    STAGES,
    Params,
    advisories,
    as_yaml,
    contradictions,
    is_about_limits,
)
from components.shared import durable, jsonl
from components.shared.environment import JOURNAL_VARIABLE, limit_spin
from components.shared.errors import PipelineError, raise_all
from components.shared.execution import current_revision, keys_in, uncommitted_files
from components.shared.work import last_step
from pipelines.doctor import slow_here, unused_gpu
from pipelines.requirements import missing_here, short_of_disk
from pipelines.run import expected as expectation
from pipelines.run import index, settings, summary
from pipelines.run.history import (
    ABOUT,
    JOURNAL,
    LOCK,
    LOG,
    OUTPUTS,
    PARAMS,
    About,
    every_run,
    read_run,
    resolve,
)
from pipelines.run.journal import Tracker
from pipelines.run.process import process
from pipelines.run.screen import Screen, Style, duration
from pipelines.run.stages import header

_LINES_SHOWN = 20
_FILES_SHOWN = 5
_TAIL_BYTES = 1 << 20
_MARGIN_S = 5.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Request:
    """The options of `grpo-pipeline run`."""

    params: Path | None
    """Params file; None for params.yaml, or for the params of the run to resume."""
    settings: Sequence[str]
    """Keys with YAML values, `train_grpo.num_steps=10`, which override the file."""
    resume: str | None
    """Run whose params replace a file."""
    start: str
    """First stage that is computed even if it is unchanged."""
    fresh: bool
    """Whether every stage is computed."""
    dry_run: bool
    """Whether everything is checked and nothing is run."""
    name: str
    """Name of the run's folder, after the time; empty for the name of the params file."""
    note: str
    tags: Sequence[str]

    def __post_init__(self) -> None:
        if self.start and self.start not in STAGES:
            raise PipelineError(f"--from {self.start}: no such stage; there are {', '.join(STAGES)}")
        if self.resume and self.params:
            raise PipelineError("--resume takes the params of the run; leave out --params, and change keys with --set")
        if not re.fullmatch(r"[\w.-]*", self.name):
            accepted = "names a folder; accepted are letters, digits, `_`, `-` and `.`"
            raise PipelineError(f"--name {self.name}: {accepted}")

    @property
    def fresh_from(self) -> str:
        """First stage that is computed even if it is unchanged; empty to reuse any."""
        return STAGES[0] if self.fresh else self.start


def run(**options: Any) -> int:
    """Run the whole graph with the options of a `Request`; return 0, or the exit code of the stage that failed.

    Stages that an earlier run finished are reused unless the request says otherwise.

    Raises:
        PipelineError: Options or keys contradict one another, or data, a model, a reward or the registry is missing:
            all problems at once, and nothing was run.
    """
    request = Request(**options)
    before = read_run(resolve(request.resume)) if request.resume else None
    path = before.folder / PARAMS if before else request.params or Path("params.yaml")
    name = before.params if before else path.stem
    params = settings.load(path, request.settings)
    data = None if params.prepare_data.repository else Path()
    wrong = missing_here(params) + contradictions(params, data)
    if any(map(is_about_limits, wrong)):
        wrong.append(f"`grpo-pipeline limits --params {path}` proposes limits that fit the data and the model")
    wrong = [f"{path}: {line}" for line in wrong]
    full = None if any("train_sft.model.base" in line for line in wrong) else short_of_disk(params, OUTPUTS)
    # Outputs that are reused take no space.
    raise_all(wrong if full is None or expectation.records("train_sft") else [*wrong, full])
    limit_spin()
    patch = current_revision().patch or ""
    found = "seems to contain a key or a password; remove it: uncommitted changes are recorded in every lineage"
    raise_all([f"{place}: {found}" for place in keys_in(patch)])
    screen = Screen(sys.stdout, sys.stderr)
    if request.dry_run or before:
        like = [before] if before else [run for run in every_run(OUTPUTS) if run.params == name]
        _show_expected(
            expectation.expectations(params, like, fresh_from=request.fresh_from), screen, every=request.dry_run
        )
    if request.dry_run:
        return 0
    folder = _new_folder(About(params=name, note=request.note, tags=tuple(request.tags)), request.name or name)
    lock = durable.lock_folder(folder / LOCK)  # until the run ends
    heading = settings.heading(path, request.settings)
    (folder / PARAMS).write_text(f"{heading}{as_yaml(params)}", encoding="utf-8")
    screen.show(f"{path} -> {folder}/", Style.DIM)
    if not before and (purpose := _purpose(path)):
        screen.show(purpose, Style.DIM)
    if files := uncommitted_files(patch):
        shown = ", ".join(files[:_FILES_SHOWN]) + (" ..." if len(files) > _FILES_SHOWN else "")
        screen.show(f"uncommitted changes are recorded in every lineage: {shown}", Style.DIM)
    for line in filter(None, [*advisories(params, data), slow_here(params), full, unused_gpu()]):
        screen.show(f"warning: {line}")
    exit_code = _run(folder, params, screen, request)
    lock.release()
    return exit_code


def _purpose(path: Path) -> str:
    """Return the first sentence of the comment at the top of a params file."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0]


def _run(folder: Path, params: Params, screen: Screen, request: Request) -> int:
    """Run all stages in the folder of a new run, and return the exit code."""
    started = time.monotonic()
    # The longest time that a stage may need to write a checkpoint.
    grace_s = _MARGIN_S + max(params.train_sft.checkpoint.grace_s, params.train_grpo.checkpoint.grace_s)
    with (folder / JOURNAL).open("a+", encoding="utf-8") as journal:
        tracker = Tracker(screen, journal, STAGES)
        try:
            _execute(folder, tracker, screen, grace_s, request)
        except SystemExit:
            screen.end(f"{_end_of(folder, params)}; log: {folder / LOG}")
            raise
        finally:
            screen.draw([])
    exit_code = _exit_code(tracker, folder, screen)
    run = read_run(folder)
    assert run is not None
    if "report" in run.stages and run.stages["report"].finished is not None:
        summary.write(run, exit_code)
        _make_latest(folder)
        summary.show(folder, screen)
    else:
        screen.show(_end_of(folder, params))
    with suppress(PipelineError, OSError):  # a failed index does not fail the run
        index.write(OUTPUTS, params.register.registry)
    done = f"{tracker.num_finished} of {len(STAGES)} stages in {duration(time.monotonic() - started)}"
    screen.show(f"{done}; log: {folder / LOG}", Style.DIM)
    return exit_code


def _show_expected(expected: Sequence[expectation.Expectation], screen: Screen, *, every: bool) -> None:
    """Show the expectation of every stage, or only of the first that is computed."""
    computed = [each for each in expected if not each.reused_from]
    for each in expected if every else computed[:1]:
        screen.show(f"[{expected.index(each) + 1}/{len(expected)}] {each.stage:<14}{each}")
    if every:
        seconds = [each.seconds for each in computed]
        known = "no estimate: no run like it" if None in seconds else f"about {duration(sum(filter(None, seconds)))}"
        screen.show(f"{len(computed)} of {len(expected)} stages would run ({known}); nothing was run", Style.DIM)


def _end_of(folder: Path, params: Params) -> str:
    """Return where a run without a report ended, its last saved step, and the command that resumes it."""
    run = read_run(folder)
    stage = run.unfinished if run else None
    done = list(run.stages) if run else []
    end = f"{stage.end} at {stage.name}" if stage else f"stopped after {done[-1]}" if done else "stopped"
    step = last_step(stage.work) if stage and stage.work else None
    total = getattr(getattr(params, stage.name), "num_steps", None) if stage else None
    saved = "" if step is None else f", step {step}{f' of {total}' if total else ''} is saved"
    return f"{end}{saved}; resume with: grpo-pipeline run --resume {folder.name}"


def _new_folder(about: About, name: str) -> Path:
    """Make the folder of a run; runs started in the same second get different folders."""
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


def _execute(folder: Path, tracker: Tracker, screen: Screen, grace_s: float, request: Request) -> None:
    """Run all stages in another process until it ends, and show their messages."""
    fresh = f"--fresh-from={request.fresh_from}"
    command = [sys.executable, "-m", "pipelines.run.stages", str(folder.resolve()), fresh]
    environment = {**os.environ, JOURNAL_VARIABLE: str(folder.resolve() / JOURNAL)}
    with (
        # The temporary folders of killed stages are removed with this one.
        tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as scratch,
        (folder / LOG).open("wb") as log,
        process(command, {**environment, "TMPDIR": scratch}, grace_s=grace_s, log=log) as stages,
    ):
        try:
            for _ in _moments(stages):
                tracker.read()
        except SystemExit:
            screen.draw([])
            if tracker.running and tracker.running.startswith("train"):
                limit = f"at most {grace_s:g} s"
                screen.show(f"stopping: {tracker.running} ends its step and saves a checkpoint ({limit})", Style.DIM)
            raise


def _moments(process: Popen[bytes]) -> Iterator[None]:
    """Yield at intervals while a process runs, and once after its end."""
    while process.poll() is None:
        yield
        with suppress(TimeoutExpired):
            process.wait(_POLL_S)
    yield


def _exit_code(tracker: Tracker, folder: Path, screen: Screen) -> int:
    """Return the exit code of the run, and show where to find the cause of a failure."""
    if not folder.is_dir():
        raise PipelineError(f"{folder}: was removed during the run")
    name, run = tracker.running, read_run(folder)
    if name is None:
        return 0
    if tracker.exit_code is not None:
        outputs = run.stages[name].outputs if run else {}
        for page in (output / "report.html" for output in outputs.values()):
            if page.is_file():
                screen.detail(f"see {os.path.relpath(page)}")
        return tracker.exit_code
    last = durable.tail(folder / LOG, max_bytes=_TAIL_BYTES).rpartition(f"{header(name)}\n")[2].splitlines()
    what = f"{name} stopped unexpectedly; the last lines of {folder / LOG}:"
    screen.error(what, *[line for line in map(str.rstrip, last) if line][-_LINES_SHOWN:])
    return 1


def _make_latest(folder: Path) -> None:
    """Point outputs/latest to a run, atomically."""
    link = OUTPUTS / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(OUTPUTS))
    link.replace(OUTPUTS / "latest")
