"""Processes that import what stages need while a local run begins: each stage is a fork of one of them.

`forked_stages` is for the process of the graph; `python -m pipelines.run.stage_server DESCRIPTOR MODULE ...` is such a
server. It imports the modules, and computes nothing: a fork gets no threads but its own, and one that waited for those
of OpenMP would hang. (The idle threads of OpenBLAS and jemalloc are ended and begun again around a fork by themselves.)
"""

import atexit
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from components.shared.execution import current_environment
from components.workers.limits import end_with_parent

# The lineage of a stage names torch's threads where torch is imported, so stages that do without it have a server too.
_LIGHT = {
    "prepare_data": ("components.prepare_data.prepare",),
    "validate_data": ("components.validate_data.validate", "components.validate_data.checking"),
    "report": ("components.report.report", "matplotlib.figure", "scipy.special"),
    "register": ("components.register.register",),
}
_WITH_TORCH = {
    # DeepSpeed imports the last when it makes an engine, and with it the whole compiler of torch.
    "train_sft": (
        *("components.cluster.task", "components.train_sft.train", "components.train_sft.worker", "deepspeed"),
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
    "train_grpo": ("components.train_grpo.train", "components.train_grpo.worker"),
    "evaluate": ("components.evaluate.worker",),
}
"""What each stage imports."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXECUTOR = "kfp.dsl.executor_main"
_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices whose drivers libraries ask while they are imported, and which no fork can use after that."""


@contextmanager
def forked_stages() -> Iterator[None]:
    """Have KFP's SubprocessRunner fork stages from servers in the block, as far as this machine allows it.

    Elsewhere, and where a server could not import everything, a stage is a process of its own as KFP starts it.
    """
    with ExitStack() as stack:
        servers: dict[str, StageServer] = {}
        if sys.platform == "linux":  # elsewhere libraries of the system do not survive a fork, or there is none
            kinds = [_LIGHT] if any(map(os.path.exists, _ACCELERATORS)) else [_WITH_TORCH, _LIGHT]
            for kind in kinds:  # the slowest first
                modules = [_EXECUTOR, *(name for names in kind.values() for name in names)]
                servers |= dict.fromkeys(kind, stack.enter_context(closing(StageServer(modules))))

        from kfp.local import subprocess_task_handler  # while they import

        fresh = subprocess_task_handler.run_local_subprocess

        def run(full_command: Sequence[str], env_vars: Mapping[str, str] | None = None) -> int:
            server = servers.get(full_command[full_command.index("--function_to_execute") + 1])
            if server and server.is_ready():
                # A shell, its options and its script, and then the code of the component.
                return server.run(full_command[3], full_command[4:], env_vars or {})
            exit_code: int = fresh(full_command=full_command, env_vars=env_vars)
            return exit_code

        subprocess_task_handler.run_local_subprocess = run
        try:
            yield
        finally:
            subprocess_task_handler.run_local_subprocess = fresh


class StageServer:
    """A server as the process of the graph sees it; it runs one stage at a time."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._is_ready: bool | None = None
        self._connection, theirs = Pipe()
        with theirs:
            # What libraries print while they are imported is no output of a stage.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "_KFP_RUNTIME": "true"},  # as for a stage; kfp then imports less
                pass_fds=[theirs.fileno()],
            )

    def is_ready(self) -> bool:
        """Wait until everything is imported; False where that failed or it died, but not where the run was stopped."""
        if self._is_ready is None:
            try:
                self._is_ready = bool(self._connection.recv())
            except (EOFError, ConnectionError):
                self._is_ready = False
                self._process.wait()
        if self._process.poll() is not None:
            self._is_ready = -self._process.returncode in _STOPS
        return self._is_ready

    def run(self, component: str, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run a stage, print its output line by line, and return its exit code, or minus the signal that ended it.

        Args:
            component: The code of the component.
            arguments: Of KFP's executor.
            variables: Environment variables beside those of the server.
        """
        reading, writing = os.pipe()
        with open(reading, encoding="utf-8", errors="replace") as output:  # noqa: PTH123  # a descriptor
            try:
                self._connection.send((component, list(arguments), dict(variables)))
                send_handle(self._connection, writing, self._process.pid)
            except ConnectionError:
                return 1
            finally:
                os.close(writing)
            for line in output:
                print(line, end="")
        try:
            exit_code: int = self._connection.recv()
        except (EOFError, ConnectionError):
            exit_code = -signal.SIGKILL
        if exit_code < 0:
            print(signal.strsignal(-exit_code))  # as a shell does
        elif exit_code > 0:
            print(f"exit code {exit_code}")
        print("\n")  # as KFP does
        return exit_code

    def close(self) -> None:
        """End the server, and with it a stage that still runs."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _serve(connection: Connection) -> None:
    """Run one stage after the other in forks of this process, until the other end is closed."""
    with suppress(EOFError):
        while True:
            request, output = connection.recv(), recv_handle(connection)
            stage = get_context("fork").Process(target=_run_stage, args=(os.getpid(), connection, output, *request))
            stage.start()
            for number in _STOPS:
                signal.signal(number, signal.SIG_IGN)  # it is for the stage, which may have a checkpoint to write
            os.close(output)
            stage.join()
            for number in _STOPS:
                signal.signal(number, signal.SIG_DFL)
            connection.send(stage.exitcode)


def _run_stage(
    server: int,
    connection: Connection,
    output: int,
    component: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
) -> None:
    """Do in this process, which was forked for it, what KFP's command does in a process of its own."""
    end_with_parent(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection.close()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.update(variables)
    module = Path(tempfile.mkdtemp()) / "ephemeral_component.py"
    module.write_text(component, encoding="utf-8")
    executor = sys.modules[_EXECUTOR]
    sys.argv = [str(executor.__file__), "--component_module_path", str(module), *arguments]
    try:
        executor.executor_main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _main(descriptor: str, *modules: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    current_environment()  # it is remembered: stages too ask for it before libraries add to it
    for module in modules:
        import_module(module)
    gc.freeze()  # a collection in a fork would copy the pages of all these objects
    with Connection(int(descriptor)) as connection:
        connection.send(True)
        _serve(connection)


if __name__ == "__main__":
    _main(*sys.argv[1:])
