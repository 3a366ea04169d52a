"""vLLM servers of a run: started together, started again when they end, and gone when the run is."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import urllib3

from components.rollout.vllm_config import Dtype, ServersConfig, engine_arguments, environment
from components.rollout.vllm_connection import INITIAL_VERSION, Connection, ServerGoneError
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say

_HOST = "127.0.0.1"
_POLL_S = 0.2
_SAY_EVERY_S = 10.0
_MAX_RESTARTS = 3
"""Of one server: what ends as often will end again."""
_TAIL_BYTES = 3000
_END_S = 15.0
_SWEEP_S = 5.0
_GUARD = Path(__file__).with_name("guard.py")


class ServerProcess:
    """One server and the port that is kept for it; its environment depends on the folder that it has for its files."""

    def __init__(self, command: Sequence[str], log: Path, environment: Callable[[str], dict[str, str]]) -> None:
        # Bound and never listening: the kernel gives the port to nobody else, and lets the server, which binds with
        # SO_REUSEADDR as well, have it each time it starts.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((_HOST, 0))
        self.url = f"http://{_HOST}:{self._port.getsockname()[1]}"
        self.log = log
        self._command = [*command, f"--host={_HOST}", f"--port={self._port.getsockname()[1]}"]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; it takes a while until it answers."""
        folder = Path(tempfile.mkdtemp(prefix="vllm-"))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_GUARD), str(folder), *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(str(folder)),
                start_new_session=True,  # a group of its own, which ends as one
            )

    @property
    def ended(self) -> bool:
        """Whether the server is gone."""
        return self._process is None or self._process.poll() is not None

    def answers(self) -> bool:
        """Tell whether the server is ready for requests."""
        try:
            # Not by way of a proxy, whatever the environment says: it is on this machine.
            return urllib3.request("GET", f"{self.url}/health", timeout=2, retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def tail(self) -> str:
        """Return the end of what the server printed."""
        text = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        return f"the end of {self.log}:\n{text}"

    def stop(self) -> None:
        """End the server and all that it started."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the guard ends it in good order
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self.sweep()
        self._port.close()

    def sweep(self) -> None:
        """End what is left of the server's group, should its guard have been killed, and see it gone."""
        if self._process is None:
            return
        deadline = time.monotonic() + _SWEEP_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.poll()  # until it is reaped it is in its group
                time.sleep(0.01)
        self._process = None  # its number may come to be another group's


@contextmanager
def vllm_servers(checkpoint: Path, config: ServersConfig, *, dtype: Dtype, logs: Path) -> Iterator[list[str]]:
    """Run servers of the policy in `checkpoint` while the block runs; give their addresses.

    What each prints goes to a file of its own in `logs`. One that ends meanwhile is started again, at the same address
    and with the weights of `checkpoint`. PipelineError where one does not start, RetryableError where it takes longer
    than `start_deadline_s`; both hold the end of what it printed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    servers = [
        ServerProcess(
            server_command(checkpoint, config, dtype, devices),
            logs / f"vllm-{number}.log",
            functools.partial(server_environment, config, devices),
        )
        for number, devices in enumerate(config.devices or [None] * config.num_servers)
    ]
    with running(servers, config.start_deadline_s):
        for server in servers:
            _rehearse(server, config.request_deadline_s)
        yield [server.url for server in servers]


@contextmanager
def running(servers: Sequence[ServerProcess], start_deadline_s: float) -> Iterator[None]:
    """Start the servers, and have them answer for as long as the block runs."""
    ending = threading.Event()
    keeper = threading.Thread(target=_keep_running, args=(servers, ending), daemon=True)
    try:
        for server in servers:
            server.start()
        _await(servers, start_deadline_s)
        keeper.start()
        yield
    finally:
        ending.set()
        if keeper.ident is not None:
            keeper.join()
        for server in servers:
            server.stop()


def _rehearse(server: ServerProcess, deadline_s: float) -> None:
    """Have one token drawn: some models are loaded, and only then found to be none that vLLM can compute here."""
    connection = Connection(server.url, deadline_s)
    try:
        connection.generate((0,), {"max_tokens": 1, "logprobs": 0, "detokenize": False}, INITIAL_VERSION)
    except ServerGoneError as error:
        raise PipelineError(f"a vLLM server cannot sample from the model: {error}; {server.tail()}") from None
    finally:
        connection.close()


def server_environment(config: ServersConfig, devices: str | None, folder: str) -> dict[str, str]:
    """Return the environment of a vLLM server that has its files in the folder."""
    visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    # The endpoints that load weights.
    return {**environment(config, folder), "VLLM_SERVER_DEV_MODE": "1", **visible}


def server_command(checkpoint: Path, config: ServersConfig, dtype: Dtype, devices: str | None) -> list[str]:
    """Return the command of a vLLM server, without its address."""
    arguments = {
        **engine_arguments(config, dtype),
        "model": str(checkpoint),
        "tensor_parallel_size": 1 if devices is None else len(devices.split(",")),
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True,  # the endpoint that takes and gives tokens
    }
    flags = {name.replace("_", "-"): value for name, value in arguments.items()}
    spelt = [_flag(name, value) for name, value in flags.items()]
    return [sys.executable, "-P", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *spelt]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"


def _await(servers: Sequence[ServerProcess], deadline_s: float) -> None:
    """Return when all servers answer."""
    started = said = time.monotonic()
    say("vllm", f"starting {len(servers)} server{'s' * (len(servers) > 1)}, whose output is in {servers[0].log.parent}")
    waiting = list(servers)
    while waiting:
        for server in waiting:
            if server.ended:
                raise PipelineError(f"a vLLM server has ended before it answered; {server.tail()}")
        waiting = [server for server in waiting if not server.answers()]
        now = time.monotonic()
        if waiting and now - started > deadline_s:
            raise RetryableError(f"a vLLM server does not answer after {deadline_s:g} s; {waiting[0].tail()}")
        if now - said > _SAY_EVERY_S:
            said = now
            say("vllm", f"{len(servers) - len(waiting)} of {len(servers)} servers answer after {now - started:.0f} s")
        time.sleep(_POLL_S)
    say("vllm", f"all servers answer after {time.monotonic() - started:.0f} s")


def _keep_running(servers: Sequence[ServerProcess], ending: threading.Event) -> None:
    """Start servers again that end, until `ending` is set."""
    restarts = dict.fromkeys(range(len(servers)), 0)
    while not ending.wait(_POLL_S):
        for number, server in enumerate(servers):
            if not server.ended or restarts[number] > _MAX_RESTARTS:
                continue
            server.sweep()
            restarts[number] += 1
            if restarts[number] > _MAX_RESTARTS:
                say("vllm", f"{server.url} has ended {_MAX_RESTARTS + 1} times and is left alone; {server.tail()}")
                continue
            say("vllm", f"{server.url} has ended; starting it again (its output: {server.log})")
            try:
                server.start()
            except OSError as error:
                say("vllm", f"{server.url} cannot be started: {error}")
