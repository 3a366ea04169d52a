"""One run of the graph on this machine, under KFP's local runner: progress on the screen, everything else in a log."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from components.preflight.config import Params, as_yaml, contradictions, load_params
from components.preflight.inputs import missing_here
from components.shared.environment import JOURNAL_VARIABLE, TERMINAL_VARIABLE
from components.shared.errors import PipelineError, raise_all
from pipelines.run import summary
from pipelines.run.journal import Journal, Tracker, duration
from pipelines.run.process import lines, process
from pipelines.run.screen import Screen, Style

OUTPUTS = Path("outputs")
PARAMS, JOURNAL, LOG, ARTIFACTS = "params.yaml", "journal.jsonl", "kfp.log", "artifacts"
"""What the folder of a run holds, beside the summary."""
_LINES_SHOWN = 20
_MARGIN_S = 5.0
_KFP_INDENT = " " * 4


def run(params_path: Path, *, containers: bool = False) -> int:
    """Run the whole graph with a params file and return 0, or the exit code of the stage that failed.

    With `containers` each stage runs in a container of its image.

    Raises:
        PipelineError: Keys contradict one another, or data, a model, a reward or the registry is missing. All of it is
            named, and nothing was run.
    """
    params = load_params(params_path)
    wrong = contradictions(params) + missing_here(params, containers=containers)
    raise_all([f"{params_path}: {line}" for line in wrong])
    if containers:
        _containers().check()
    started = time.monotonic()
    folder = _new_folder(params_path.stem)
    (folder / PARAMS).write_text(f"# {params_path} with all defaults\n{as_yaml(params)}", encoding="utf-8")
    screen = Screen(sys.stdout, sys.stderr)
    screen.show(f"{params_path} -> {folder}/", Style.DIM)
    with closing(Journal(folder / JOURNAL)) as journal:
        tracker = Tracker(screen, journal)
        try:
            status = _execute(folder, tracker, screen, grace_s=_grace_s(params), containers=containers)
        except SystemExit:
            screen.error(f"stopped, and no stage is left running; log: {folder / LOG}")
            raise
    exit_code = _exit_code(tracker, status, folder, screen)
    _summarize(folder, tracker, exit_code, screen)
    took = duration(time.monotonic() - started)
    done = f"{len(tracker.finished)} of {len(tracker.tasks)} stages in {took}"
    screen.show(f"{done}; log: {folder / LOG}", Style.DIM)
    return exit_code


def _containers() -> ModuleType:
    """Import what runs stages in containers: it needs a package that nothing else does."""
    try:
        from pipelines.run import containers
    except ModuleNotFoundError as error:
        raise PipelineError(f"--containers needs the Python package {error.name}: pip install docker") from None
    return containers


def _new_folder(name: str) -> Path:
    """Make the folder of a run; two runs begun in the same second get folders of their own."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = OUTPUTS / "runs" / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("a hundred runs within one second")


def _grace_s(params: Params) -> float:
    """The time for a graceful shutdown: the longest that a stage may need to write a checkpoint."""
    return _MARGIN_S + max(params.train_sft.checkpoint.grace_s, params.train_grpo.checkpoint.grace_s)


def _execute(folder: Path, tracker: Tracker, screen: Screen, *, grace_s: float, containers: bool) -> int:
    """Run the graph in a process of its own until it ends, and return that process's exit status."""
    paths = [str(folder.resolve() / name) for name in (PARAMS, ARTIFACTS, JOURNAL)]
    command = [sys.executable, "-m", "pipelines.run.graph_process", *paths, *(["--containers"] if containers else [])]
    with (
        _containers().no_containers_left(folder.resolve()) if containers else nullcontext(),
        # KFP leaves temporary folders behind; they go away with this one.
        tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as scratch,
        (folder / LOG).open("wb") as log,
        process(command, _environment(folder, scratch, screen), grace_s=grace_s) as graph,
    ):
        try:
            _follow(graph, tracker, log)
        except SystemExit:
            screen.show(f"stopping: a stage that trains has {grace_s:g} s to write a checkpoint", Style.DIM)
            raise
        status = graph.wait()
    tracker.end()
    return status


def _follow(graph: "subprocess.Popen[bytes]", tracker: Tracker, log: BinaryIO) -> None:
    """Log and show what the graph prints, until it ends."""
    for line in lines(graph):
        if line is None:
            tracker.idle()
            continue
        log.write(line + b"\n")
        log.flush()
        tracker.line(line.decode("utf-8", errors="replace"))


def _environment(folder: Path, scratch: str, screen: Screen) -> dict[str, str]:
    environment = {**os.environ, JOURNAL_VARIABLE: str(folder.resolve() / JOURNAL), "TMPDIR": scratch}
    return {**environment, TERMINAL_VARIABLE: os.ttyname(sys.stdout.fileno())} if screen.live else environment


def _exit_code(tracker: Tracker, status: int, folder: Path, screen: Screen) -> int:
    """Return the exit code of the run, and show where to look if something went wrong."""
    task = tracker.running
    if tracker.tasks and task is None and status == 0:
        return 0
    if task is not None and tracker.exit_code is not None:
        for page in (output / "report.html" for output in task.outputs.values()):
            if page.is_file():
                screen.detail(f"see {os.path.relpath(page)}")
        return tracker.exit_code
    what = f"{task.title} stopped unexpectedly" if task else "the graph could not be run"
    screen.error(f"{what}; the last lines of {folder / LOG}:", *_last_lines(folder / LOG, of_stage=status == 0))
    return 1


def _last_lines(log: Path, *, of_stage: bool) -> list[str]:
    """The end of the log; with `of_stage`, of the output of the last stage, which KFP indents, without KFP's own."""
    text = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    if of_stage:
        text = [line.removeprefix(_KFP_INDENT) for line in text if line.startswith(_KFP_INDENT)]
        # A task begins by printing its inputs, as a JSON object.
        text = text[len(text) - text[::-1].index("}") :] if "}" in text else text
    return [line for line in text if line][-_LINES_SHOWN:]


def _summarize(folder: Path, tracker: Tracker, exit_code: int, screen: Screen) -> None:
    """Write and show the results of a run whose report is finished, and have outputs/latest point to them."""
    if not any(task.stage == "report" for task in tracker.finished):
        return
    summary.write(folder, tracker.tasks, exit_code)
    link = OUTPUTS / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(OUTPUTS))
    link.replace(OUTPUTS / "latest")  # there is no moment without it
    summary.show(folder, screen)
