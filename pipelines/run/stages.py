"""The stages of a run, one after the other: `python -m pipelines.run.stages FOLDER`, a process of its own.

Each stage is a process, as from the command line. What trains and evaluates is forked from a process that imports what
it needs while the first stages run (preloaded.py), where the machine allows it.
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
from pipelines.run.history import ARTIFACTS, JOURNAL, PARAMS

_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices whose drivers libraries ask while they are imported, and which no fork can use after that."""
_stops: list[int] = []


def declared(name: str) -> Stage:
    """Return a stage by its name."""
    stage: Stage = import_module(f"components.{name}.__main__").STAGE
    return stage


def header(name: str) -> str:
    """Return the line of the log after which the output of a stage begins."""
    return f"--- {name}"


def arguments(stage: Stage, folder: Path, *, fresh: bool) -> list[str]:
    """Return the options of a stage's command in the folder of a run."""
    places = {**stage.inputs, **{name: f"{stage.name}/{name}" for name in stage.outputs}}
    folders = ((f"--{name.replace('_', '-')}", str(folder / ARTIFACTS / place)) for name, place in places.items())
    options = [word for pair in folders for word in pair]
    return ["--params", str(folder / PARAMS), *options, *(["--fresh"] if fresh else [])]


def run_stages(folder: Path, *, fresh_from: str, containers: bool) -> int:
    """Run all stages of a run in its folder until one fails; return the exit code of the last one.

    Ctrl-C is for the stage at work, which ends in good order. It may miss it while it starts, or be done with its work:
    no other stage is started after that.
    """
    signal.signal(signal.SIGINT, lambda number, _: _stops.append(number))
    if sys.platform == "linux" and not containers:
        forkserver.set_forkserver_preload(["pipelines.run.preloaded"])
        if not _has_accelerator():
            forkserver.ensure_running()
    fresh = STAGES[STAGES.index(fresh_from) :] if fresh_from else ()
    for name in STAGES:
        if _stops:
            return 128 + _stops[0]
        print(header(name), flush=True)
        stage = declared(name)
        options = arguments(stage, folder, fresh=name in fresh)
        exit_code = _in_container(stage, options, folder) if containers else _in_process(stage, options)
        if exit_code < 0:
            print(signal.strsignal(-exit_code), flush=True)  # as a shell does
        if exit_code:
            return exit_code
    return 0


def _in_container(stage: Stage, options: list[str], folder: Path) -> int:
    from pipelines.run import containers

    return containers.run(stage.image, ["python", "-m", f"components.{stage.name}", *options], folder, folder / JOURNAL)


def _in_process(stage: Stage, options: list[str]) -> int:
    process = _context(stage).Process(target=_run_stage, args=(stage.name, options))
    process.start()  # this waits for what it is forked from
    if _stops:
        process.terminate()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _context(stage: Stage) -> ForkContext | ForkServerContext | SpawnContext:
    """How the process of a stage is started: libraries that use an accelerator, or other systems, survive no fork."""
    if sys.platform != "linux" or (stage.image == GPU and _has_accelerator()):
        return get_context("spawn")
    return get_context("forkserver") if stage.image == GPU else get_context("fork")


def _has_accelerator() -> bool:
    return any(map(os.path.exists, _ACCELERATORS))


def _run_stage(name: str, options: list[str]) -> None:
    """Be the process of a stage."""
    if sys.platform == "linux":
        end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _stops:  # before this process, which is a fork, could hear of it
        sys.exit(128 + _stops[0])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [f"components.{name}", *options]
    try:
        main(declared(name))
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fresh-from", default="", choices=["", *STAGES])
    parser.add_argument("--containers", action="store_true")
    sys.exit(run_stages(**vars(parser.parse_args())))
