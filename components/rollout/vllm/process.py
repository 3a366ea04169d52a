"""vLLM servers as processes of this machine: restarted when they fail, and gone when the run is."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import urllib3

from components.policy.checkpoint import load_without_weights
from components.policy.config import LoraConfig
from components.policy.lora import with_named_targets
from components.rollout.vllm.config import VllmConfig, engine_arguments, environment, raise_if_out_of_memory
from components.rollout.vllm.servers import (
    INITIAL_VERSION,
    UNIX,
    Request,
    ServerLostError,
    VllmClient,
    VllmServers,
    connections,
)
from components.shared import durable
from components.shared.environment import ON_LOOPBACK
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.watchdog import watched

_START_POLL_S = 0.2
_CHECK_EVERY_S = 0.5
_HEALTH_TIMEOUT_S = 2.0
"""For an answer to /health, which computes nothing."""
_REPORT_EVERY_S = 10.0
_MAX_RESTARTS = 3
"""Restarts of one server without an answer in between."""
_TAIL_BYTES = 3000
_END_S = 15.0
"""For the watchdog to end a server."""
_KILL_S = 5.0
"""For the kernel to end the processes that the watchdog left."""


@contextmanager
def vllm_servers(
    checkpoint: Path,
    config: VllmConfig,
    devices: Mapping[int, str | None],
    *,
    dtype: str,
    logs: Path,
    lora: LoraConfig | None = None,
    has_tokenizer: bool = False,
    sleeps: bool = False,
) -> Iterator[list[str]]:
    """Run servers of the policy in `checkpoint` while the block runs; yield their URLs.

    `devices` maps the number of each server to its GPUs, such as "4,5", or to None on a machine without GPUs. The
    number names its log in `logs` and, on GPUs, is its seed. A server that ends or fails is restarted, at the same URL
    and with the weights of `checkpoint`. Stop texts need `has_tokenizer`; `VllmServers.sleep` needs `sleeps`.
    NotEnoughMemoryError if a server does not fit into memory, PipelineError if it does not start, RetryableError if it
    does not answer within `start_deadline_s`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    servers = []
    for number, gpus in devices.items():
        command = server_command(
            checkpoint, config, dtype, gpus, lora, number=number, has_tokenizer=has_tokenizer, sleeps=sleeps
        )
        variables = functools.partial(server_environment, config, gpus)
        servers.append(ServerProcess(command, logs / f"vllm-{number}.log", variables))
    with running(servers, config.start_deadline_s, config.health_deadline_s, config.section):
        for server in servers:
            _require_sampling(server, config.request_deadline_s)
        yield [server.url for server in servers]


def server_beside(
    checkpoint: Path, config: VllmConfig, *, dtype: str, logs: Path, lora: LoraConfig | None, has_tokenizer: bool
) -> VllmServers:
    """Return a server for this rank alone, on its GPU, that ends with this process or when it is closed."""
    rank = int(os.environ.get("RANK", "0"))
    device = gpu_names([torch.cuda.current_device()]) if torch.cuda.is_available() else None
    options: dict[str, Any] = {"lora": lora, "has_tokenizer": has_tokenizer, "sleeps": device is not None}
    with ExitStack() as stack:
        urls = stack.enter_context(vllm_servers(checkpoint, config, {rank: device}, dtype=dtype, logs=logs, **options))
        return VllmServers(urls, config, base=checkpoint, owned=stack.pop_all())


def gpu_names(numbers: Iterable[int]) -> str:
    """Return the names in CUDA_VISIBLE_DEVICES of the GPUs to which torch gives these numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return ",".join(names[number] for number in numbers)


@contextmanager
def running(
    servers: Sequence["ServerProcess"], start_deadline_s: float, health_deadline_s: float, section: str = ""
) -> Iterator[None]:
    """Start servers, and restart those that fail while the block runs; errors name keys of the params in `section`."""
    ending = threading.Event()

    def supervise() -> None:
        supervisors = [Supervisor(server, start_deadline_s, health_deadline_s) for server in servers]
        while not ending.wait(_CHECK_EVERY_S):
            for supervisor in supervisors:
                supervisor.check()

    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.start()
        _wait_until_ready(servers, start_deadline_s, section)
        thread = threading.Thread(target=supervise, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ending.set)
        yield


def _wait_until_ready(servers: Sequence["ServerProcess"], deadline_s: float, section: str) -> None:
    """Return once all servers answer; errors as in `vllm_servers`."""
    started = reported = time.monotonic()
    say("vllm", f"starting {len(servers)} server(s), whose output is in {servers[0].log.parent}")
    not_ready = list(servers)
    while not_ready:
        for server in not_ready:
            if server.has_ended:
                raise_if_out_of_memory(server.printed(), server.log, section)
                raise PipelineError(f"a vLLM server ended before it answered; {server.tail()}")
        not_ready = [server for server in not_ready if server.health() != "ready"]
        now = time.monotonic()
        if not_ready and now - started > deadline_s:
            raise RetryableError(f"a vLLM server does not answer after {deadline_s:g} s; {not_ready[0].tail()}")
        if now - reported > _REPORT_EVERY_S:
            reported = now
            say("vllm", f"{len(servers) - len(not_ready)} of {len(servers)} servers answer after {now - started:.0f} s")
        time.sleep(_START_POLL_S)
    say("vllm", f"all servers answer after {time.monotonic() - started:.0f} s")


def _require_sampling(server: "ServerProcess", deadline_s: float) -> None:
    """Raise PipelineError if the server cannot sample a token: with some models it starts, but cannot sample."""
    client = VllmClient(server.url, deadline_s)
    try:
        client.complete(Request((0,), {"max_tokens": 1, "logprobs": 0, "detokenize": False}), INITIAL_VERSION)
    except ServerLostError as error:
        raise PipelineError(f"a vLLM server cannot sample from the model: {error}; {server.tail()}") from None
    finally:
        client.close()


Health = Literal["ready", "broken", "silent"]
"""`broken` if the engine is dead or the socket closed; `silent` without an answer in time, when it may be busy."""


class ServerProcess:
    """A vLLM server behind a Unix socket that no other user can open."""

    def __init__(self, command: Sequence[str], log: Path, environment: Callable[[str], dict[str, str]]) -> None:
        """`environment` returns the environment variables, given the folder of the socket."""
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-"))
        self.url = f"{UNIX}{self._folder}/http"
        self.log = log
        self._command = [*command, f"--uds={self._folder}/http"]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        """Where the output of the last start begins in the log."""

    def start(self) -> None:
        """Start the server; it answers later (see `health`)."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)  # raises if another user has created it since
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                watched(self._folder, self._command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Without the key that a user may have set for `serve`: requests from here do not have it.
                env={**ON_LOOPBACK, **self._environment(str(self._folder)), "VLLM_API_KEY": ""},
                start_new_session=True,  # its own process group, which `end` kills
            )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or was not started."""
        return self._process is None or self._process.poll() is not None

    def health(self) -> Health:
        """Return whether the server is ready for requests."""
        try:
            status = connections(self.url).request("GET", "/health", timeout=_HEALTH_TIMEOUT_S).status
        except urllib3.exceptions.HTTPError as error:
            is_closed = isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError))
            return "broken" if is_closed else "silent"
        return "ready" if status == 200 else "broken"

    def printed(self) -> str:
        """Return what the server has printed since its last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def tail(self) -> str:
        """Return the end of the server's output, with the name of its log."""
        text = durable.tail(self.log, max_bytes=_TAIL_BYTES)
        return f"the end of {self.log}:\n{text}"

    def close(self) -> None:
        """End the server for good, and remove its socket."""
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> None:
        """End the server and all its children: SIGTERM, then SIGKILL of the whole group. It can be started again."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # tells its watchdog to end it
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        # The watchdog may have been killed: kill the rest of the group, until the group no longer exists.
        deadline = time.monotonic() + _KILL_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.poll()  # a process that nobody has waited for stays in its group
                time.sleep(0.01)
        self._process = None  # not to be signalled again: another process may get its number


@dataclass
class Supervisor:
    """Restarts a server that has failed; the server is ready when supervision begins."""

    server: ServerProcess
    start_deadline_s: float
    health_deadline_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._answered: float | None = self._started
        """When it last answered; None if it has not answered since its start."""
        self._restarts = 0
        """Restarts since it last answered."""

    def check(self) -> None:
        """Check the server, and restart it if it has failed; give up after too many restarts."""
        if self._restarts > _MAX_RESTARTS:  # it has given up
            return
        failure = self._failure()
        if failure is None:
            return
        server = self.server
        server.end()
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            say("vllm", f"{server.url} {failure}, {self._restarts} times in a row: giving up on it; {server.tail()}")
            return
        say("vllm", f"{server.url} {failure}; starting it again (its output: {server.log})")
        self._started, self._answered = self.clock(), None
        try:
            server.start()
        except OSError as error:
            say("vllm", f"{server.url} cannot be started: {error}")

    def _failure(self) -> str | None:
        """Return why the server has to be restarted; None if it works, is busy, or is still starting."""
        if self.server.has_ended:
            return "has ended"
        health, now = self.server.health(), self.clock()
        if health == "ready":
            self._answered, self._restarts = now, 0
        elif self._answered is None:
            if now - self._started > self.start_deadline_s:
                return f"does not answer {self.start_deadline_s:g} s after its start"
        elif health == "broken":
            return "no longer serves requests (its engine is dead or its socket closed)"
        elif now - self._answered > self.health_deadline_s:
            return f"has not answered for {self.health_deadline_s:g} s"
        return None


def server_environment(config: VllmConfig, devices: str | None, folder: str) -> dict[str, str]:
    """Return the environment variables of a vLLM server on some GPUs, whose socket is in `folder`."""
    # Only development mode has the endpoints that load weights.
    variables = {**environment(config, folder), "VLLM_SERVER_DEV_MODE": "1"}
    if config.synchronise == "adapters":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.weights_by == "ipc":
        # Handles of the trainer's memory are pickled; they come through a socket that no other user can open.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = devices
    return variables


def server_command(
    checkpoint: Path,
    config: VllmConfig,
    dtype: str,
    devices: str | None,
    lora: LoraConfig | None,
    *,
    number: int,
    has_tokenizer: bool,
    sleeps: bool = False,
) -> list[str]:
    """Return the command of the server with this number, without the option for its address."""
    if config.synchronise == "adapters" and lora is not None:
        lora = with_named_targets(lora, load_without_weights(checkpoint).model)  # vLLM does not know `all-linear`
    gpu_seed = None if devices is None else number  # so that servers sample differently
    arguments: dict[str, Any] = {
        **engine_arguments(config, dtype, lora, gpu_seed=gpu_seed, has_tokenizer=has_tokenizer),
        "model": str(checkpoint),
        "tensor_parallel_size": 1 if devices is None else len(devices.split(",")),
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True,  # the endpoint that takes and returns tokens
        "enable_sleep_mode": sleeps,
    }
    command = [sys.executable, "-P", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            command += [f"--{name}", *value]
        elif isinstance(value, dict):
            command.append(f"--{name}={json.dumps(value)}")
        else:
            command.append(f"--{name}={value}")
    return command
