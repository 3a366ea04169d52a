"""How a stage is run: one step function behind `python -m components.<stage>`, DVC and Kubeflow.

A step function is `(config, *, <inputs>: In, <outputs>: Out) -> dict[str, float]`: a frozen config, folders to read,
folders to fill, and the stage's metrics back. Outputs are filled aside and renamed when the stage is done, so a
killed or failed stage leaves nothing that could be taken for a result. A stage of hours may take a `Work` folder too,
for checkpoints: the next run of the same thing finds there what an unfinished one has left.
"""

import argparse
import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Any, get_type_hints

from components.shared import durable, lineage
from components.shared.config import Config, load_section, validate
from components.shared.errors import PipelineError, RetryableError
from components.shared.made_from import made_from
from components.shared.memory import described, refused_memory
from components.shared.model_reference import followed, refuse_changed
from components.shared.pod import in_task, keep_files_in_group
from components.shared.retries import PASSING_FAULTS, with_retries
from components.shared.work import HeldWork, held

In = Annotated[Path, "input"]
Out = Annotated[Path, "output"]
Work = Annotated[Path, "work"]
"""A folder that outlives a failed or killed run, and goes away when the stage has finished; `run` supplies it."""
Step = Callable[..., dict[str, float]]

JOURNAL_VARIABLE = "GRPO_PIPELINE_JOURNAL"
"""Names a file to which each stage appends when it started, finished or failed (see `_record`)."""
WORK_VARIABLE = "GRPO_PIPELINE_WORK"
"""Names the folder for unfinished work, where that is not outputs/work."""


def main(step: Step, section: str) -> None:
    """Run `step` from the command line: `--params FILE` and one option per input and output folder."""
    parser = argparse.ArgumentParser(prog=f"python -m components.{section}", description=_summary(step))
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="params file (default: %(default)s)")
    for name, kind in kinds_of(step).items():
        if kind != "work":
            parser.add_argument(f"--{name.replace('_', '-')}", type=Path, required=True, help=f"{kind} folder")
    options = vars(parser.parse_args())
    params = options.pop("params")
    with errors_in_one_line(section):
        run(step, section, load_section(params, section, config_type(step)), options)


def run_task(step: Step, section: str, config: Mapping[str, Any], **folders: str) -> dict[str, float]:
    """Run `step` as a Kubeflow task: plain values in, metrics out, the exit code as from the command line."""
    with errors_in_one_line(section):
        paths = {name: Path(folder) for name, folder in folders.items()}
        settings = validate(config_type(step), dict(config), name=section)
        if in_task():
            keep_files_in_group()
        return with_retries(section, lambda: run(step, section, settings, paths))


def run(
    step: Step,
    section: str,
    config: Config,
    folders: Mapping[str, Path],
    *,
    work_root: Path | None = None,
    before_outputs_stand: Callable[[dict[str, float]], object] = lambda metrics: None,
) -> dict[str, float]:
    """Run `step` with every output aside, then move all outputs into place with their lineage.

    An input that is but a reference to a model is that model. Unfinished work is in `work_root`, by default in
    outputs/work. Where another run does the same work already, its result is waited for and taken.
    """
    kinds = kinds_of(step)
    given = {name: path for name, path in folders.items() if kinds[name] == "input"}
    outputs = {name: path for name, path in folders.items() if kinds[name] == "output"}
    _check_inputs(section, given)
    inputs = {name: followed(path) for name, path in given.items()}
    _check_outputs(section, inputs, outputs)
    started = time.monotonic()
    _record(section, "started", outputs=outputs)
    made_by = lineage.describe(section, config.model_dump(mode="json"), inputs)
    for name, path in given.items():
        refuse_changed(path, made_by["inputs"][name]["digest"])
    verdict = None
    with _held(step, config, made_by, work_root) as work:
        with _aside(outputs, work) as aside:
            metrics = work.take(aside) if work else None
            taken = metrics is not None
            if metrics is None:
                metrics, verdict = _filled(step, config, made_by, {**inputs, **aside}, aside, work)
            before_outputs_stand(metrics)
        if work and not taken and not verdict:
            work.finish(outputs, made_by, metrics)
    if verdict:
        raise verdict
    _record(section, "finished", seconds=round(time.monotonic() - started, 3), metrics=metrics)
    return metrics


def _filled(
    step: Step,
    config: Config,
    made_by: Mapping[str, Any],
    folders: Mapping[str, Path],
    aside: Mapping[str, Path],
    work: HeldWork | None,
) -> tuple[dict[str, float], PipelineError | None]:
    """Have a step fill its outputs; return its metrics, and its verdict where it raises one."""
    metrics: dict[str, float] = {}
    verdict: PipelineError | None = None
    if work:
        work.begin(made_from(config, made_by))
        folders = {**folders, **dict.fromkeys(_work_names(step), work.folder)}
    try:
        metrics = step(config, **folders)
    except PipelineError as error:
        if not error.outputs_stand:
            raise
        verdict = error
    for folder in aside.values():
        lineage.write(folder, dict(made_by))
    return metrics, verdict


@contextmanager
def _held(step: Step, config: Config, made_by: Mapping[str, Any], root: Path | None) -> Iterator[HeldWork | None]:
    """The unfinished work of a step that takes a folder for it."""
    if not _work_names(step):
        yield None
        return
    root = root or Path(os.environ.get(WORK_VARIABLE) or "outputs/work")
    with held(root, made_by["stage"], made_from(config, made_by)) as work:
        yield work


def _work_names(step: Step) -> list[str]:
    return [name for name, kind in kinds_of(step).items() if kind == "work"]


def _check_inputs(section: str, inputs: Mapping[str, Path]) -> None:
    for name, path in inputs.items():
        if not path.is_dir():
            raise PipelineError(f"{section}: input `{name}`: {path} is not a folder; run the stage that makes it first")


def _check_outputs(section: str, inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> None:
    """Refuse what could not be replaced once the work is done, or would cost somebody what a mistyped path names."""
    for name, path in outputs.items():
        where = f"{section}: output `{name}`: {path}"
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise PipelineError(f"{where} is not a folder; name a new one")
        if path.is_dir() and any(path.iterdir()) and not (path / lineage.FILE_NAME).is_file():
            raise PipelineError(f"{where} holds something else than a stage's output; name a new folder")
        for other in inputs.values():
            if _overlap(path.resolve(), other.resolve()):
                raise PipelineError(f"{where} overlaps with the input {other}; name another folder")


def _overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def config_type(step: Step) -> type[Config]:
    """The type of the config that a step function takes."""
    hints = get_type_hints(step)
    config: type[Config] = hints["config"]
    return config


def kinds_of(step: Step) -> dict[str, str]:
    """Return each folder parameter of a step function with its kind: "input", "output" or "work"."""
    hints = get_type_hints(step, include_extras=True)
    names = [name for name in inspect.signature(step).parameters if name != "config"]
    return {name: hints[name].__metadata__[0] for name in names}


def _summary(step: Step) -> str:
    return (inspect.getdoc(step) or "").split("\n", 1)[0]


@contextmanager
def _aside(outputs: Mapping[str, Path], work: HeldWork | None) -> Iterator[dict[str, Path]]:
    """Empty folders beside the outputs; renamed into place on success, removed on failure."""
    aside = {name: path.with_name(f".{path.name}.partial") for name, path in outputs.items()}
    try:
        for folder in aside.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        yield aside
        for folder in aside.values():
            durable.sync_tree(folder)
        for name, path in outputs.items():
            _replace(path, aside[name])
    except Exception as error:
        full = durable.full_disk(error, [*aside.values(), *([work.folder] if work else []), Path(gettempdir())])
        if full is None:
            raise
        raise PipelineError(full) from error
    finally:
        for folder in aside.values():
            shutil.rmtree(folder, ignore_errors=True)


def _replace(path: Path, new: Path) -> None:
    """Put `new` in the place of `path`; whenever this is interrupted, what stands there is whole or nothing."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    durable.sync(path.parent)  # before anything is removed that it could be made from again
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def errors_in_one_line(section: str) -> Iterator[None]:
    """Turn errors meant for people into one line on standard error and their exit code."""
    try:
        yield
    except PipelineError as error:
        _fail(section, str(error), error.exit_code)
    except Exception as error:
        memory = refused_memory(error)
        refused = _refused_by_system(error) if memory is None else described(memory, "this stage")
        if refused is None:
            raise
        passing = isinstance(error, OSError) and error.errno in PASSING_FAULTS
        _fail(section, refused, RetryableError.exit_code if passing else PipelineError.exit_code)


def _refused_by_system(error: Exception) -> str | None:
    """What the operating system refused, such as space on a disk; None for any other error, which is a bug."""
    number = durable.errno_of(error)
    if number is None:
        return None
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    return f"{where}{os.strerror(number).lower()}"


def _fail(section: str, message: str, exit_code: int) -> None:
    print(f"error: {section}: {message.removeprefix(f'{section}: ')}", file=sys.stderr, flush=True)
    with suppress(OSError):  # the journal may lie on the disk that is full
        _record(section, "failed", error=message, exit_code=exit_code)
    sys.exit(exit_code)


def _record(section: str, event: str, **details: Any) -> None:
    """Append one JSON line to the journal of the run, if there is one."""
    journal = os.environ.get(JOURNAL_VARIABLE)
    if journal:
        line = {"stage": section, "event": event, **details}
        with Path(journal).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
