"""The stages of a run, one after the other: `python -m pipelines.run.stages FOLDER`.

Each stage is a process, as from the command line. Training and evaluation are forked, if the machine allows it, from a
process that imports their libraries while the first stages run (preloaded.py).
"""

import argparse
import atexit
import os
import signal
import sys
from importlib import import_module
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from pathlib import Path

from components.preflight.config import STAGES
from components.shared.images import GPU
from components.shared.stage import Stage, main
from components.workers.limits import end_with_parent
from pipelines.run.history import ARTIFACTS, PARAMS

_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices that libraries initialise while they are imported; a fork cannot use them afterwards."""
_stops: list[int] = []


def declared(name: str) -> Stage:
    """Return a stage by its name."""
    stage: Stage = import_module(f"components.{name}.__main__").STAGE
    return stage


def header(name: str) -> str:
    """Return the line of the log before the output of a stage."""
    return f"--- {name}"


def arguments(stage: Stage, folder: Path, *, fresh: bool) -> list[str]:
    """Return the command-line options of a stage in the folder of a run."""
    places = {**stage.inputs, **{name: f"{stage.name}/{name}" for name in stage.outputs}}
    folders = ((f"--{name.replace('_', '-')}", str(folder / ARTIFACTS / place)) for name, place in places.items())
    options = [word for pair in folders for word in pair]
    return ["--params", str(folder / PARAMS), *options, *(["--fresh"] if fresh else [])]


def run_stages(folder: Path, *, fresh_from: str) -> int:
    """Run all stages of a run in its folder until one fails; return the exit code of the last one.

    Ctrl-C also reaches the running stage, which shuts down gracefully. A stage that is starting or ending may miss it,
    so no other stage is started after that.
    """
    signal.signal(signal.SIGINT, lambda number, _: _stops.append(number))
    forkserver.set_forkserver_preload(["pipelines.run.preloaded"])
    if not _has_accelerator():
        forkserver.ensure_running()
    fresh = STAGES[STAGES.index(fresh_from) :] if fresh_from else ()
    for name in STAGES:
        if _stops:
            return 128 + _stops[0]
        print(header(name), flush=True)
        stage = declared(name)
        exit_code = _in_process(stage, arguments(stage, folder, fresh=name in fresh))
        if exit_code < 0:
            print(signal.strsignal(-exit_code), flush=True)  # as a shell does
        if exit_code:
            return exit_code
    return 0


def _in_process(stage: Stage, options: list[str]) -> int:
    process = _context(stage).Process(target=_run_stage, args=(stage.name, options))
    process.start()  # waits for the fork server
    if _stops:
        process.terminate()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _context(stage: Stage) -> ForkContext | ForkServerContext | SpawnContext:
    """Return how to start the process of a stage: libraries that use an accelerator do not survive a fork."""
    if stage.image == GPU and _has_accelerator():
        return get_context("spawn")
    return get_context("forkserver") if stage.image == GPU else get_context("fork")


def _has_accelerator() -> bool:
    return any(map(os.path.exists, _ACCELERATORS))


def _run_stage(name: str, options: list[str]) -> None:
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _stops:  # Ctrl-C came before this fork could receive it
        sys.exit(128 + _stops[0])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [f"components.{name}", *options]
    try:
        main(declared(name))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call them


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fresh-from", default="", choices=["", *STAGES])
    sys.exit(run_stages(**vars(parser.parse_args())))
