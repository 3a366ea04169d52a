"""Stages as forks of a server that has imported what they need."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from pipelines.run import stage_server
from pipelines.run.stage_server import StageServer
from tests.presets import ROOT

pytestmark = pytest.mark.slow

Run = Callable[..., int]


@pytest.fixture(scope="module")
def server() -> Iterator[StageServer]:
    """A server that has imported KFP's executor and a library with threads."""
    with closing(StageServer(["kfp.dsl.executor_main", "numpy"])) as server:
        assert server.is_ready()
        yield server


@pytest.fixture
def run_in(tmp_path: Path) -> Callable[..., int]:
    """Run a body of a component in a fork of a server, and return its exit code."""

    def run_in(server: StageServer, body: str, **variables: str) -> int:
        executor_input = {"inputs": {}, "outputs": {"outputFile": str(tmp_path / "output.json")}}
        arguments = ["--executor_input", json.dumps(executor_input), "--function_to_execute", "stage"]
        return server.run(f"def stage():\n    {body}\n", arguments, variables)

    return run_in


@pytest.fixture
def run(server: StageServer, run_in: Callable[..., int]) -> Run:
    """Run a body of a component in a fork of the server of this module, and return its exit code."""
    return partial(run_in, server)


def test_output_arrives_and_exit_codes_are_those_of_a_process(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """Of both streams and of processes that the stage starts; what is registered for the end is done."""
    assert (
        run("import atexit, os; atexit.register(print, 'at the end'); print('begun'); os.system('echo child >&2')") == 0
    )
    lines = capfd.readouterr().out.splitlines()
    assert {"begun", "child", "at the end"} <= set(lines)
    assert any("KFP Executor" in line for line in lines)
    assert run("raise SystemExit(3)") == 3
    assert run("raise ValueError('no')") == 1
    assert "ValueError: no" in capfd.readouterr().out


def test_a_killed_stage_is_named_and_the_next_one_runs(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """As a shell says it, whose last line the screen shows."""
    assert run("import os; os.kill(os.getpid(), 9)") == -signal.SIGKILL
    assert capfd.readouterr().out.split()[-1] == "Killed"
    assert run("pass") == 0


def test_a_stage_does_not_outlive_its_server(run_in: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody would hear of it; what it prints last does not arrive."""
    with closing(StageServer(["kfp.dsl.executor_main"])) as server:
        assert server.is_ready()
        body = "import os, time; os.kill(os.getppid(), 9); time.sleep(20); print('outlived')"
        assert run_in(server, body) == -signal.SIGKILL
    assert "outlived" not in capfd.readouterr().out


def test_a_stage_hears_a_request_to_end_before_its_server(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """A signal to all processes of a group is for the stage, which ends in good order."""
    body = (
        "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5); print('ended in good order')"
    )
    assert run(body) == 0
    assert "ended in good order" in capfd.readouterr().out


def test_a_stage_changes_its_own_process_alone(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """It begins with one thread, the imports and the variables of the server and its own, and hears Ctrl-C."""
    body = (
        "import os, sys; from signal import default_int_handler, getsignal; "
        "print('has', 'numpy' in sys.modules, os.environ.pop('GIVEN', None), os.environ.get('SET'), "
        "len(os.listdir('/proc/self/task')), getsignal(2) is default_int_handler); "
        "os.environ['SET'] = 'by an earlier stage'"
    )
    for given in ("one", "other"):
        assert run(body, GIVEN=given) == 0
        assert f"has True {given} None 1 True" in capfd.readouterr().out.splitlines()


def test_a_server_that_cannot_import_is_not_used() -> None:
    """Stages are then processes of their own, which say what is wrong."""
    with closing(StageServer(["no_module_has_this_name"])) as server:
        assert not server.is_ready()


def test_a_server_that_has_died_is_not_used() -> None:
    """A stage is then a process of its own, too."""
    with closing(StageServer([])) as server:
        assert server.is_ready()
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        assert not server.is_ready()


def test_a_server_that_was_stopped_starts_nothing() -> None:
    """Ctrl-C while it imports ends the run: no stage is begun in its place."""
    with closing(StageServer(["torch"])) as server:
        os.kill(server._process.pid, signal.SIGINT)
        assert server.is_ready()
        assert server.run("def stage():\n    pass\n", [], {}) != 0


@pytest.mark.parametrize("kind", ["_LIGHT", "_WITH_TORCH"])
def test_all_that_stages_import_can_be_imported(kind: str) -> None:
    """A server that lacks a module would leave stages slow; without need for torch there is no trace of it."""
    modules = [name for names in getattr(stage_server, kind).values() for name in names]
    code = (
        f"import sys, importlib; [importlib.import_module(name) for name in {modules}]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split()[-1] == str(kind == "_WITH_TORCH")
