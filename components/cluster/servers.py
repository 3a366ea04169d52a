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
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import urllib3

from components.policy.config import Dtype
from components.rollout.vllm.client import INITIAL_VERSION, ServerLostError, VllmClient
from components.rollout.vllm.config import (
    ServersConfig,
    engine_arguments,
    environment,
    refuse_memory_of_vllm,
)
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say

_HOST = "127.0.0.1"
_POLL_S = 0.2
_LOOK_S = 0.5
"""Between looks at whether the servers still answer."""
_HEALTH_S = 2.0
"""For an answer to /health, which computes nothing."""
_SAY_EVERY_S = 10.0
_MAX_RESTARTS = 3
"""Of one server that does not answer in between: what fails as often will fail again."""
_TAIL_BYTES = 3000
_END_S = 15.0
_SWEEP_S = 5.0
_GUARD = Path(__file__).with_name("guard.py")


class Health(Enum):
    """What a server answers when it is asked whether it can work."""

    READY = auto()
    BROKEN = auto()
    """It says that its engine is dead, or nobody listens at its address any more."""
    SILENT = auto()
    """No answer in time; it may be busy."""


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
        self._begin = 0
        """Where in the log the output of the last start begins."""

    def start(self) -> None:
        """Start the server; it takes a while until it answers."""
        folder = Path(tempfile.mkdtemp(prefix="vllm-"))
        with self.log.open("ab") as log:
            self._begin = log.tell()
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

    def health(self) -> Health:
        """Ask the server whether it is ready for requests."""
        try:
            # Not by way of a proxy, whatever the environment says: it is on this machine.
            status = urllib3.request("GET", f"{self.url}/health", timeout=_HEALTH_S, retries=False).status
        except urllib3.exceptions.HTTPError as error:
            return Health.BROKEN if isinstance(error.__cause__, ConnectionRefusedError) else Health.SILENT
        return Health.READY if status == 200 else Health.BROKEN

    def answers(self) -> bool:
        """Tell whether the server is ready for requests."""
        return self.health() is Health.READY

    def printed(self) -> str:
        """Return what the server has printed since its last start."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def tail(self) -> str:
        """Return the end of what the server printed."""
        text = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        return f"the end of {self.log}:\n{text}"

    def stop(self) -> None:
        """End the server and all that it started, and let go of its port."""
        self.end()
        self._port.close()

    def end(self) -> None:
        """End the server and all that it started: SIGTERM, then SIGKILL of the whole group. It can be started again."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard ends the server, in good order if it can
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._sweep()

    def _sweep(self) -> None:
        """End what is left of the server's group, should its guard have been killed, and see it gone."""
        assert self._process is not None
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

    What each prints goes to a file of its own in `logs`. One that ends meanwhile, or can work no more, is started
    again, at the same address and with the weights of `checkpoint`. PipelineError where one does not start,
    RetryableError where it takes longer than `start_deadline_s`; both hold the end of what it printed.
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
    with running(servers, config.start_deadline_s, config.health_deadline_s):
        for server in servers:
            _rehearse(server, config.request_deadline_s)
        yield [server.url for server in servers]


@contextmanager
def running(servers: Sequence[ServerProcess], start_deadline_s: float, health_deadline_s: float) -> Iterator[None]:
    """Start the servers, and have them answer for as long as the block runs."""
    ending = threading.Event()
    thread: threading.Thread | None = None
    try:
        for server in servers:
            server.start()
        _await(servers, start_deadline_s)
        keeper = Keeper(servers, start_deadline_s=start_deadline_s, health_deadline_s=health_deadline_s)
        thread = threading.Thread(target=keeper.run, args=(ending,), daemon=True)
        thread.start()
        yield
    finally:
        ending.set()
        if thread is not None:
            thread.join()
        for server in servers:
            server.stop()


def _rehearse(server: ServerProcess, deadline_s: float) -> None:
    """Have one token drawn: some models are loaded, and only then found to be none that vLLM can compute here."""
    connection = VllmClient(server.url, deadline_s)
    try:
        connection.generate((0,), {"max_tokens": 1, "logprobs": 0, "detokenize": False}, INITIAL_VERSION)
    except ServerLostError as error:
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
                refuse_memory_of_vllm(server.printed(), server.log, "train_grpo.sampler.servers")
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


@dataclass(eq=False)
class _Watched:
    """What is known of a server that is to be kept running."""

    server: ServerProcess
    started: float
    """When it was last started, by the keeper's clock."""
    answered: float | None
    """When it last answered; None where it has not since its start."""
    restarts: int = 0
    """Since it last answered."""


class Keeper:
    """Keeps servers running: ends those that can work no more, and starts again what has ended."""

    def __init__(
        self,
        servers: Sequence[ServerProcess],
        *,
        start_deadline_s: float,
        health_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take servers that answer."""
        self._watched = [_Watched(server, clock(), clock()) for server in servers]
        self._start_deadline_s, self._health_deadline_s = start_deadline_s, health_deadline_s
        self._clock = clock

    def run(self, ending: threading.Event) -> None:
        """Look after the servers until `ending` is set."""
        while not ending.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Look at each server once, and start those again that have failed."""
        for watched in self._watched:
            if watched.restarts > _MAX_RESTARTS:
                continue
            failure = self._failure(watched)
            if failure is not None:
                self._restart(watched, failure)

    def _failure(self, watched: _Watched) -> str | None:
        """Say why a server has to be started again; None where it works, is busy, or is about to answer."""
        if watched.server.ended:
            return "has ended"
        health, now = watched.server.health(), self._clock()
        if health is Health.READY:
            watched.answered, watched.restarts = now, 0
        elif watched.answered is None:
            late = now - watched.started > self._start_deadline_s
            return f"does not answer {self._start_deadline_s:g} s after its start" if late else None
        elif health is Health.BROKEN:
            return "is no longer serving (its engine is dead or its port closed)"
        elif now - watched.answered > self._health_deadline_s:
            return f"has not answered for {self._health_deadline_s:g} s"
        return None

    def _restart(self, watched: _Watched, failure: str) -> None:
        server = watched.server
        server.end()
        watched.restarts += 1
        if watched.restarts > _MAX_RESTARTS:
            say("vllm", f"{server.url} {failure}, {watched.restarts} times in a row: giving up on it; {server.tail()}")
            return
        say("vllm", f"{server.url} {failure}; starting it again (its output: {server.log})")
        watched.started, watched.answered = self._clock(), None
        try:
            server.start()
        except OSError as error:
            say("vllm", f"{server.url} cannot be started: {error}")
