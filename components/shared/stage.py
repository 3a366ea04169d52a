"""The step contract: how every stage is declared and run, from the command line, by DVC and by Kubeflow.

A stage is a function from folders to folders, `(config, *, <input>=..., <output>=..., work=...) -> metrics`, declared
as a `Stage` next to it. Outputs are written to hidden folders and renamed when the stage is done, so a killed or failed
stage leaves no incomplete result. A stage that takes hours also has a `work` folder for checkpoints, from which the
next run of the same work resumes.

A task in a pod of Kubeflow Pipelines retries temporary failures: Kubeflow 2.16 retries all, 2.17 only lost pods.
"""

import argparse
import inspect
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar

from components.shared import durable, lineage, live
from components.shared.config import Config, load_section
from components.shared.environment import CLUSTER_VARIABLE, POD_VARIABLE, WORK_VARIABLE, limit_spin
from components.shared.errors import PipelineError, RetryableError, explain, raise_if_disk_is_full
from components.shared.execution import current_environment
from components.shared.images import LIGHT
from components.shared.journal import log_event, run_name
from components.shared.lineage import Lineage, Material
from components.shared.model import require_unchanged, resolve_reference
from components.shared.progress import say, say_error, say_line
from components.shared.results import Record, Result, external_change, other_settings
from components.shared.work import OvertakenError, WorkFolder, locked_work

PAUSES_S = (30.0, 120.0)
"""Pauses between attempts of a task."""
WORK = Path("outputs/work")
"""Folder for unfinished work and for records of finished work."""
_Result = TypeVar("_Result")


class Reuse(StrEnum):
    """Which earlier results of the same work a run may reuse, and whether its own result is recorded for reuse."""

    NONE = "none"
    """No result; its own is recorded only with a work folder, for runs that wait for it."""
    FRESH = "fresh"
    """No result; its own is recorded."""
    IN_PLACE = "in place"
    """A result in its own output folders, from an earlier attempt; its own is recorded."""
    ANY = "any"
    """Any result; its own is recorded."""


@dataclass(frozen=True)
class Stage:
    """A stage, as a local run, DVC's graph and the Kubeflow component run it."""

    name: str
    """Its section in the params file, and its package: `python -m components.<name>`."""
    function: Callable[..., dict[str, float]]
    """Takes the config and each folder as a keyword argument, fills the outputs and returns the stage's metrics."""
    config: type[Config]
    inputs: Mapping[str, str]
    """Folders that the function reads, and the stage and output that each comes from: `train_sft/reference`."""
    outputs: tuple[str, ...]
    """Folders, empty at first, that the function fills."""
    image: str = LIGHT
    """Container image that it runs in."""
    never_reused: str = ""
    """Why it runs even if nothing has changed; empty if its results can be reused."""
    has_work: bool = False
    """Whether the function takes a folder `work` for checkpoints, which outlives a failed or killed run."""
    materials: Callable[[Any, Mapping[str, Path]], Mapping[str, Material]] = lambda config, outputs: {}
    """Takes the config and the filled outputs, and returns what the function read from outside the graph."""
    sources: Callable[[Any], Mapping[str, Material]] = lambda config: {}
    """Like `materials`, for those that the config alone determines; if one changes, unfinished work is not resumed."""


def main(stage: Stage) -> None:
    """Run a stage from the command line: `--params FILE` and one option per input and output folder."""
    summary = (inspect.getdoc(stage.function) or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog=f"python -m components.{stage.name}", description=summary)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="params file (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="compute even what an earlier run has finished")
    for kind, names in (("input", stage.inputs), ("output", stage.outputs)):
        for name in names:
            parser.add_argument(f"--{name.replace('_', '-')}", type=Path, required=True, help=f"{kind} folder")
    options = vars(parser.parse_args())
    params = options.pop("params")
    reuse = Reuse.FRESH if options.pop("fresh") else Reuse.ANY
    with exit_on_error(stage.name):
        run(stage, load_section(params, stage.name, stage.config), options, reuse=reuse)


def keep_files_in_group() -> None:
    """Make new files writable for the group, which is 0 in all pods of a run, but not for others: Argo's umask is 0."""
    os.umask(0o002)


def with_retries(name: str, attempt: Callable[[], _Result], sleep: Callable[[float], None] = time.sleep) -> _Result:
    """Return the result of `attempt`; in a pod of Kubeflow, retry twice after a temporary failure."""
    pauses_s = PAUSES_S if POD_VARIABLE in os.environ else ()
    for pause_s in pauses_s:
        try:
            return attempt()
        except Exception as error:
            explained = explain(error)
            if not isinstance(explained, RetryableError) or explained.is_final:
                raise
            say(name, f"{explained}; trying again in {pause_s:g} s")
        sleep(pause_s)
    return attempt()


def run(
    stage: Stage,
    config: Config,
    folders: Mapping[str, Path],
    *,
    work_root: Path | None = None,
    owner: str = "",
    reuse: Reuse = Reuse.NONE,
    known: Sequence[Result] | None = None,
) -> dict[str, float]:
    """Run a stage and move its outputs, with their lineage, to their folders; return its metrics.

    An input that is a reference to a model is replaced by that model. Unfinished work and records of finished work are
    below `work_root`, by default outputs/work. If another run is doing the same work, this one waits and takes its
    result; `owner` names this run to others. If another run overtakes this one in a queue, this one starts again;
    `known` are then the results that were recorded before its first start.
    """
    limit_spin()
    outputs = {name: folders[name] for name in stage.outputs}
    inputs = _checked_inputs(stage, folders)
    started, started_at = time.monotonic(), datetime.now(UTC)
    current_environment()  # cached: before the stage imports libraries, which change it
    log_event(stage.name, "started", outputs=outputs)
    described = _describe(stage, config, folders, inputs)
    digests = {name: each.digest for name, each in described.work.inputs.items()}
    sources = stage.sources(config)
    fingerprint = lineage.fingerprint(stage.name, config, digests, sources)
    root = work_root or Path(os.environ.get(WORK_VARIABLE) or WORK)
    record = Record(root, stage.name, fingerprint)
    was_overtaken = known is not None
    known = record.results() if known is None else known
    if reuse in (Reuse.IN_PLACE, Reuse.ANY) and not stage.never_reused:
        is_in_place = reuse is Reuse.IN_PLACE
        earlier = record.find(lambda each: each.is_in(outputs) if is_in_place else not external_change(each))
        if earlier:
            return _reuse(earlier, record, outputs, described)
    try:
        with locked_work(root, stage.name, fingerprint, owner) if stage.has_work else nullcontext() as work:
            may_be_finished = work is not None and (work.has_waited or was_overtaken)
            concurrent = record.find(lambda each: each not in known) if may_be_finished else None
            if concurrent:
                return _reuse(concurrent, record, outputs, described)
            work_folder = {"work": _begin(work, described)} if work else {}
            with _partial_outputs(outputs, *work_folder.values()) as partial:
                metrics, verdict = _call(stage, config, {**inputs, **partial, **work_folder})
                materials = {**sources, **stage.materials(config, partial)}
                made_by = lineage.complete(described, materials, started_at, work_folder.get("work"))
                for folder in partial.values():
                    lineage.write(folder, made_by)
            seconds = round(time.monotonic() - started, 3)
            is_recorded = stage.has_work or (reuse is not Reuse.NONE and not stage.never_reused)
            if is_recorded and not verdict:
                name = owner or run_name() or os.path.relpath(next(iter(outputs.values())).parent)
                record.add(Result.of(name, outputs, seconds=seconds, metrics=metrics))
    except OvertakenError:
        say(stage.name, "another run of the same work was admitted first: this one leaves the queue for its result")
        return run(stage, config, folders, work_root=work_root, owner=owner, reuse=reuse, known=known)
    if verdict:  # the work is done: raised inside the block it would keep the folder of unfinished work
        raise verdict
    log_event(stage.name, "finished", seconds=seconds, metrics=metrics)
    return metrics


def _call(stage: Stage, config: Config, folders: Mapping[str, Path]) -> tuple[dict[str, float], PipelineError | None]:
    """Return the metrics of a stage, or no metrics and the error of a stage that has done all its work."""
    try:
        return stage.function(config, **folders), None
    except PipelineError as error:
        if not error.keeps_outputs:
            raise
        return {}, error


def _begin(work: WorkFolder, described: Lineage) -> Path:
    """Prepare and return a folder of unfinished work; log its path, so that `grpo-pipeline` can watch the run."""

    def begin() -> None:
        lineage.write(work.folder, described)
        live.begin(work.folder, work.stage)

    begin()
    work.begin = begin
    log_event(work.stage, "work", folder=work.folder.resolve())
    return work.folder


def _reuse(earlier: Result, record: Record, outputs: Mapping[str, Path], described: Lineage) -> dict[str, float]:
    """Fill `outputs` with those of an earlier result, unless they are the same folders, and return its metrics."""
    if not earlier.is_in(outputs):
        with _partial_outputs(outputs) as partial:
            for name, path in partial.items():
                source = earlier.outputs[name]
                shutil.copytree(source, path, copy_function=durable.link_or_copy, dirs_exist_ok=True)
                before = lineage.read(path)
                assert before is not None
                after = lineage.of_reused_outputs(before, described)
                if after != before:
                    (path / lineage.FILE_NAME).unlink()  # a hard link to the original
                    lineage.write(path, after)
        record.add(earlier.model_copy(update={"outputs": {name: path.resolve() for name, path in outputs.items()}}))
    say_line(f"{record.stage}: unchanged: from {earlier.run}")
    if changed := other_settings(earlier, record.stage, described.work.config):
        say(record.stage, f"warning: {', '.join(changed[:5])} changed, which has no effect on a reused result")
    log_event(record.stage, "finished", reused_from=earlier.run, seconds=earlier.seconds, metrics=earlier.metrics)
    return earlier.metrics


def _checked_inputs(stage: Stage, folders: Mapping[str, Path]) -> dict[str, Path]:
    """Return the inputs with references to models resolved; PipelineError if an input or an output cannot be used."""
    for key in stage.inputs:
        if not folders[key].is_dir():
            where = f"{stage.name}: input `{key}`: {folders[key]}"
            raise PipelineError(f"{where} is not a folder; run the stage that makes it first")
    inputs = {key: resolve_reference(folders[key]) for key in stage.inputs}
    for key in stage.outputs:
        path = folders[key]
        where = f"{stage.name}: output `{key}`: {path}"
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise PipelineError(f"{where} is not a folder; name a new one")
        if path.is_dir() and any(path.iterdir()) and not (path / lineage.FILE_NAME).is_file():
            raise PipelineError(f"{where} has files that no stage made; name a new folder")
        for other in inputs.values():
            output, source = path.resolve(), other.resolve()
            if output.is_relative_to(source) or source.is_relative_to(output):
                raise PipelineError(f"{where} overlaps with the input {other}; name another folder")
    return inputs


def _describe(stage: Stage, config: Config, folders: Mapping[str, Path], inputs: Mapping[str, Path]) -> Lineage:
    """Return the lineage of the outputs to be made; PipelineError if an input refers to a model that has changed."""
    described = lineage.describe(stage.name, config.model_dump(mode="json"), inputs)
    for name in stage.inputs:
        require_unchanged(folders[name], described.work.inputs[name].digest)
    return described


@contextmanager
def _partial_outputs(outputs: Mapping[str, Path], *work: Path) -> Iterator[dict[str, Path]]:
    """Yield an empty folder for each output, which replaces the output on success and is removed on failure.

    An error about a full disk without a file names `work`, the folder of unfinished work, unless another is fuller.
    """
    partial = {name: path.with_name(f".{path.name}.partial") for name, path in outputs.items()}
    try:
        for folder in partial.values():
            durable.remove(folder)
            folder.mkdir(parents=True)
        yield partial
        for folder in partial.values():
            durable.sync_tree(folder)
        for name, path in outputs.items():
            durable.replace(path, partial[name])
    except Exception as error:
        folders = filter(Path.is_dir, [*work, *partial.values(), Path(gettempdir())])  # any of them may be full
        fullest = min(folders, key=lambda folder: shutil.disk_usage(folder).free)
        path = Path(getattr(error, "filename", None) or fullest)
        raise_if_disk_is_full(error, path, f"{durable.size(fullest):,} bytes are in {fullest} so far")
        raise
    finally:
        for folder in partial.values():
            durable.remove(folder)


@contextmanager
def exit_on_error(name: str) -> Iterator[None]:
    """Print an error for people as one line on standard error, and exit with its exit code.

    In a pod, whose log is all that people see, other errors are printed like this after their traceback.
    """
    try:
        yield
    except Exception as error:
        explained = explain(error)
        if explained is None:
            if CLUSTER_VARIABLE in os.environ:
                say_line(traceback.format_exc().rstrip(), sys.stderr)
                say_error(name, f"{type(error).__name__}: {error}; this looks like a bug: its traceback is above")
                sys.exit(1)
            raise
        message = str(explained).removeprefix(f"{name}: ")
        say_error(name, message)
        log_event(name, "failed", error=message, exit_code=explained.exit_code)
        sys.exit(explained.exit_code)
