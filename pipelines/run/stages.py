"""Runs the stages of a run, one after the other: `python -m pipelines.run.stages FOLDER --parent=PID`.

Each stage is a process, with the options that its command line takes. Training and evaluation are forked from a process
that imports their libraries while the first stages run (preloaded.py), unless the machine has an accelerator.
"""

import argparse
import atexit
import os
import signal
import sys
from importlib import import_module
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

from components.preflight.config import STAGES
from components.shared.errors import RetryableError
from components.shared.images import GPU
from components.shared.journal import log_event
from components.shared.stage import Stage, main
from components.workers.limits import end_with_parent
from pipelines.run.history import ARTIFACTS, PARAMS

_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices that libraries initialise while they are imported; a fork cannot use them afterwards."""
_MEMORY_KEYS = {
    "train_sft": ("train_sft.engine.micro_batch_tokens",),
    "train_grpo": ("train_grpo.engine.micro_batch_tokens", "train_grpo.sampling.max_batch_size"),
    "evaluate": ("evaluate.max_batch_size",),
}
"""Keys of a stage that reduce its memory if they are lower."""
_received_signals: list[int] = []  # SIGINTs that this process has received, from which forked stages inherit them


def load_stage(name: str) -> Stage:
    """Import a stage by its name, and return its declaration."""
    stage: Stage = import_module(f"components.{name}.__main__").STAGE
    return stage


def header(name: str) -> str:
    """Return the line that precedes the output of a stage in the log."""
    return f"--- {name}"


def arguments(stage: Stage, folder: Path, *, fresh: bool) -> list[str]:
    """Return the command-line options of a stage of the run in a folder; with `fresh` it reuses no earlier outputs."""
    options = ["--params", str(folder / PARAMS)]
    outputs = {name: f"{stage.name}/{name}" for name in stage.outputs}
    for name, path in {**stage.inputs, **outputs}.items():
        options += [f"--{name.replace('_', '-')}", str(folder / ARTIFACTS / path)]
    return [*options, "--fresh"] if fresh else options


def run_stages(folder: Path, *, fresh_from: str) -> int:
    """Run the stages of the run in a folder until one fails, and return the exit code of the last one.

    The stages from `fresh_from` on reuse no earlier outputs. Ctrl-C also reaches the running stage, which shuts down
    gracefully. A stage that is starting or ending may miss it: this process remembers it, and starts no other stage.
    """
    signal.signal(signal.SIGINT, lambda number, _: _received_signals.append(number))
    forkserver.set_forkserver_preload(["pipelines.run.preloaded"])
    if not _has_accelerator():
        forkserver.ensure_running()
    fresh = STAGES[STAGES.index(fresh_from) :] if fresh_from else ()
    for name in STAGES:
        if _received_signals:
            return 128 + _received_signals[0]
        print(header(name), flush=True)
        stage = load_stage(name)
        exit_code = _run_in_process(stage, arguments(stage, folder, fresh=name in fresh))
        if exit_code == -signal.SIGKILL:
            remedy = f"lower {' or '.join(_MEMORY_KEYS[name])}" if name in _MEMORY_KEYS else "close other programs"
            cause = "the stage was killed (SIGKILL), usually because the machine ran out of memory"
            log_event(name, "failed", error=f"{cause}; {remedy}", exit_code=RetryableError.exit_code)
            return RetryableError.exit_code
        if exit_code < 0:
            print(signal.strsignal(-exit_code), flush=True)  # as a shell does
        if exit_code:
            return exit_code
    return 0


def _run_in_process(stage: Stage, options: list[str]) -> int:
    """Run a stage in a new process, and return its exit code; a negative one is the signal that killed it."""
    context: Any = get_context("fork")
    if stage.image == GPU:  # the fork server has imported its libraries; with an accelerator, they cannot be forked
        context = get_context("spawn" if _has_accelerator() else "forkserver")
    process = context.Process(target=_run_stage, args=(stage.name, options))
    process.start()  # may wait until the fork server has imported its modules
    if _received_signals:  # while it started
        process.terminate()
    process.join()
    return int(process.exitcode)


def _has_accelerator() -> bool:
    return any(map(os.path.exists, _ACCELERATORS))


def _run_stage(name: str, options: list[str]) -> None:
    """Run a stage in this new process, as its command line does."""
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _received_signals:  # Ctrl-C came before this process could receive it
        sys.exit(128 + _received_signals[0])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [f"components.{name}", *options]
    try:
        main(load_stage(name))
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without calling them


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, lambda *_: os.killpg(0, signal.SIGINT))
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fresh-from", default="", choices=["", *STAGES])
    parser.add_argument("--parent", type=int, required=True)
    options = vars(parser.parse_args())
    # A killed `grpo-pipeline run` stops its run, as Ctrl-C does, even while this process was starting.
    end_with_parent(options.pop("parent"), signal.SIGHUP)
    sys.exit(run_stages(**options))
