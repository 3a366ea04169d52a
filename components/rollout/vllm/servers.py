"""Sampling from vLLM servers: requests are spread over the servers that hold the current weights.

`VllmClient` talks to one server: each call has a deadline, and either returns the answer or raises the reason.
"""

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import urllib3
from torch import Tensor

from components.policy.packing import TokenSequence
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.verification import shapes, verify_weights, weights_in
from components.shared.environment import KEY_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say

_CONNECT_S = 5.0
_CONTROL_S = 30.0
"""For calls that compute nothing."""
_MAX_REQUESTS = 256
"""Requests in flight at once; vLLM itself decides how many of them it computes together."""
_RETRY_S = 1.0
_MAX_TRIES = 4
"""Tries of one request, after which it is the likely reason why servers were lost."""
_T = TypeVar("_T")
UNIX = "unix:"
"""Beginning of the URLs of Unix sockets."""
INITIAL_VERSION = "default"
"""vLLM's name of the weights that it started with."""


class Request(NamedTuple):
    """A prompt, and how to sample from it."""

    prompt_ids: tuple[int, ...]
    params: dict[str, Any]
    """vLLM's `SamplingParams`."""


class SampledTokens(NamedTuple):
    """A completion as vLLM returns it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


Submit = Callable[[Request], "Future[list[SampledTokens]]"]
"""Begins to complete a request, at the same time as those begun before; returns the future completions."""


def scoring_requests(sequence: TokenSequence, temperature: float) -> list[Request]:
    """Return the requests for the log-probabilities of the completion tokens of a sequence, in their order.

    The answer to a request has the log-probability of one token, `logprob_token_ids`, after the prompt. At temperature
    1 vLLM also returns those of prompt tokens: then one request is enough. Otherwise each token needs a request.
    """
    ids = sequence.prompt_ids + sequence.completion_ids
    params = {"max_tokens": 1, "temperature": temperature, "seed": 0, "detokenize": False, "ignore_eos": True}
    places: Sequence[int] = range(len(sequence.prompt_ids), len(ids))
    if temperature in (0, 1):  # the log-probabilities of greedy decoding are at temperature 1
        places = places[-1:]
        params["prompt_logprobs"] = 0
    # vLLM returns `logprobs` log-probabilities: first that of the sampled token, then those of `logprob_token_ids`.
    return [Request(ids[:place], {**params, "logprobs": 2, "logprob_token_ids": [ids[place]] * 2}) for place in places]


class _UnixConnection(urllib3.connection.HTTPConnection):
    """A connection to a server of this user behind a Unix socket."""

    def __init__(self, host: str, *, socket_path: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = socket_path

    def _new_conn(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self._path)
            # During a restart of the server, another user could create a socket at this path.
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                raise PermissionError(f"{self._path} is a socket of another user ({user})")
        except OSError as error:
            connection.close()
            raise urllib3.exceptions.NewConnectionError(self, f"{self._path}: {error}") from error
        return connection


class _UnixPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _UnixConnection


def connections(url: str) -> urllib3.HTTPConnectionPool:
    """Return a pool of connections, without a proxy, to the server at http://HOST:PORT or unix:PATH."""
    key = os.environ.get(KEY_VARIABLE)  # of this process's job on a cluster
    headers = {"Authorization": f"Bearer {key}"} if key else None
    options: dict[str, Any] = {"maxsize": _MAX_REQUESTS, "retries": False, "headers": headers}
    if url.startswith(UNIX):
        return _UnixPool("localhost", socket_path=url.removeprefix(UNIX), **options)
    return urllib3.connection_from_url(url, **options)


class RequireKey:
    """Middleware of vLLM's server in a pod: it refuses requests without the key of the job.

    vLLM's own --api-key does not protect the endpoints that replace weights and write files.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request (ASGI). /health is open: the probes of the cluster have no key."""
        is_open = scope["type"] == "lifespan" or scope["path"] == "/health"
        if is_open or hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":  # other connections are closed when this returns
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the key of the job is missing or wrong"})


class ServerLostError(Exception):
    """The server does not answer, or has wrong weights: it gets no requests until it has the current weights."""


class VllmClient:
    """The calls of one server, and the state of the connection to it."""

    def __init__(self, url: str, request_deadline_s: float, *, uses_adapters: bool = False) -> None:
        """With `uses_adapters`, vLLM knows the adapters of each version by the name of the version."""
        self.url, self._request_deadline_s, self._uses_adapters = url, request_deadline_s, uses_adapters
        self._pool = connections(url)
        self.in_flight = 0
        """Completion requests that the server has not answered yet."""
        self.lost: str | None = None
        """Why the server is not used; None while it is used."""
        self.retry_at = 0.0
        """The time, by `time.monotonic`, after which a lost server is tried again."""
        self.transfer: Any = None
        """The `Transfer` that sends it weights from this process; None before the first, and after it was lost."""

    def complete(self, request: Request, version: str) -> list[SampledTokens]:
        """Return the completions of a prompt, all sampled from the weights of that version."""
        choices = self._generate(request.prompt_ids, request.params, version)["choices"]
        return [
            SampledTokens(tuple(choice["token_ids"]), tuple(each["logprob"] for each in choice["logprobs"]["content"]))
            for choice in sorted(choices, key=lambda choice: int(choice["index"]))
        ]

    def score(self, sequence: TokenSequence, temperature: float, version: str) -> list[float]:
        """Return the log-probability of each completion token under the weights of that version."""
        start = len(sequence.prompt_ids)
        logprobs: list[float] = []
        for request in scoring_requests(sequence, temperature):
            answer = self._generate(request.prompt_ids, request.params, version)
            if answer["prompt_logprobs"]:  # at temperature 1: all completion tokens but the last are in the prompt
                pairs = zip(answer["prompt_logprobs"][start:], request.prompt_ids[start:], strict=True)
                logprobs += [by_token[str(token)]["logprob"] for by_token, token in pairs]
            candidates = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            last_token = request.params["logprob_token_ids"][0]
            logprobs.append(next(each["logprob"] for each in candidates if each["token_id"] == last_token))
        return logprobs

    def version(self) -> str:
        """Return the version of the weights that the server samples from."""
        return str(self._call("GET", "/weight_info", None, _CONTROL_S)["weight_version"])

    @contextmanager
    def changing_weights(self, version: str, expected: Mapping[str, Tensor]) -> Iterator[None]:
        """Pause the server while the block loads weights; then verify that it has the `expected`, and set the version.

        Requests in flight are finished before; requests that arrive meanwhile wait for the new weights.
        """
        self.post("pause?mode=wait&clear_cache=true", {})
        yield
        loaded = self.call_workers("loaded_weights", shapes=shapes(expected))
        verify_weights(expected, loaded, name=self.url)
        self._call("POST", "/update_weight_version", {"new_version": version}, _CONTROL_S)
        self._call("POST", "/resume", {}, _CONTROL_S)

    def load_adapters(self, version: str, folder: Path) -> None:
        """Load the adapters of a version, unless another client has loaded them."""
        try:
            self.post("v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
        except PipelineError as error:
            if "already been loaded" not in str(error):
                raise

    def num_workers(self) -> int:
        """Return the number of the server's processes that hold the weights, or a part of them."""
        return int(self._call("GET", "/get_world_size", None, _CONTROL_S)["world_size"])

    def post(self, endpoint: str, body: dict[str, Any]) -> Any:
        """Return the answer of an endpoint, within the deadline of requests."""
        return self._call("POST", f"/{endpoint}", body, self._request_deadline_s)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of `WeightLoading` in each of the server's processes; return the results."""
        results: list[Any] = self.post("collective_rpc", {"method": method, "kwargs": arguments})["results"]
        return results

    def _generate(self, token_ids: tuple[int, ...], params: dict[str, Any], version: str) -> Any:
        """Return vLLM's answer to a prompt; ServerLostError if it used weights of another version."""
        body = {"token_ids": token_ids, "sampling_params": params}
        if self._uses_adapters and version != INITIAL_VERSION:
            body["model"] = version
        answer = self.post("inference/v1/generate", body)
        versions = {span["version"] for choice in answer["choices"] for span in choice["weight_versions"]}
        if versions != {version}:
            raise ServerLostError(f"it sampled from weights {', '.join(sorted(versions))}, not {version}")
        return answer

    def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        """Return the answer; PipelineError if the server refuses the request, ServerLostError if it fails otherwise."""
        timeout = urllib3.Timeout(connect=min(_CONNECT_S, deadline_s), total=deadline_s)
        try:
            answer = self._pool.request(method, path, json=body, timeout=timeout)
            content = answer.json() if answer.data.startswith((b"{", b"[")) else answer.data.decode()
        except urllib3.exceptions.ReadTimeoutError:
            raise ServerLostError(f"no answer to {path} within {deadline_s:g} s") from None
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ServerLostError(str(error)) from None
        if answer.status == 404 and isinstance(body, dict) and "model" in body:
            raise ServerLostError(f"it does not have the adapters {body['model']}")  # it was restarted
        if 400 <= answer.status < 500:
            raise PipelineError(f"vLLM server {self.url} refuses {path}: {_reported_error(content)}")
        if answer.status != 200:
            raise ServerLostError(f"{path} failed ({answer.status}): {_reported_error(content)}")
        return content


def _reported_error(content: Any) -> str:
    """Return the first line of an error, which is a text or {"message"}, {"error"} or {"error": {"message"}}."""
    for key in ("error", "message"):
        content = content.get(key, content) if isinstance(content, dict) else content
    return str(content).strip().split("\n", 1)[0][:500]


class VllmServers:
    """vLLM servers with one copy each of a model's weights, for this process alone or shared by all ranks of a run.

    Methods raise RetryableError if no server has answered for `lost_deadline_s`.
    """

    def __init__(
        self, urls: Sequence[str], config: VllmConfig, *, base: Path | None = None, owned: ExitStack | None = None
    ) -> None:
        """`base` is the model folder that the servers have started with, to which adapters are added.

        `owned` ends servers that belong to this process alone, and share its GPU, when it is closed; None for others.
        """
        self.shared = owned is None
        """Whether all ranks of a run use these servers, so that only one of them sends the weights."""
        self._owned, self._is_asleep = owned, False
        self._config, self.weights_by, self.synchronise = config, config.weights_by, config.synchronise
        self.max_tokens, self._base = config.max_tokens, base
        uses_adapters = config.synchronise == "adapters"
        self._servers = [VllmClient(url, config.request_deadline_s, uses_adapters=uses_adapters) for url in urls]
        self._lock = threading.Lock()
        self._folder: Path | None = None
        """The folder of the current weights; None for the initial ones, and for those sent from memory."""
        self._version = INITIAL_VERSION

    @contextmanager
    def submitting(self) -> Iterator[Submit]:
        """Yield a function that begins requests; at the end of the block, those not sent yet are cancelled."""
        self._wake()
        threads = ThreadPoolExecutor(_MAX_REQUESTS)
        try:
            yield lambda request: threads.submit(self._complete, request)
        finally:
            threads.shutdown(cancel_futures=True)

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """Return the log-probabilities of completions by URL: each server has its own copy of the weights."""
        self._wake()

        def score(server: VllmClient) -> list[list[float]]:
            if server.lost is not None:  # it may have been restarted
                self._load_current_weights(server)
            with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
                return list(threads.map(lambda each: server.score(each, temperature, self._version), sequences))

        return self._on_each(score)

    def set_weights(self, version: int, weights: Path | Mapping[str, Tensor] | None) -> None:
        """Sample from these weights from now on, and drop the KV cache of earlier ones.

        `weights` is a Hugging Face folder (of PEFT if adapters are synchronised), which must exist until the next call,
        as a server that restarts reads it again; or tensors in this process's memory, with the names in such a folder;
        or None if another process sends them. Each call has a new version. Several clients of the same servers may each
        call this, with the same arguments. A server that is lost while tensors are sent is used again after the next
        call. StaleWeightsError if a server does not compute with these weights, in its precision, afterwards.
        """
        self._wake()
        self._version = str(version)
        self._folder = weights.resolve() if isinstance(weights, Path) else None
        if isinstance(weights, Mapping):
            self._on_each(lambda server: self._send(server, weights))
        else:
            self._on_each(self._load_current_weights)

    def sleep(self) -> None:
        """See `Sampler`; servers that do not share the GPU of a rank keep their memory."""
        if self._owned is not None and torch.cuda.is_available():
            self._on_each(lambda server: server.post("sleep?level=1", {}))
            self._is_asleep = True

    def close(self) -> None:
        """Close the connections, and end the servers that belong to this process."""
        for server in self._servers:
            server.close()
        if self._owned is not None:
            self._owned.close()

    def _wake(self) -> None:
        """Load the weights of servers that sleep into GPU memory again."""
        if self._is_asleep:
            torch.cuda.empty_cache()  # returns memory that the update has freed, which vLLM needs
            self._on_each(lambda server: server.post("wake_up", {}))
            self._is_asleep = False

    def _complete(self, request: Request) -> list[SampledTokens]:
        """Return the completions by the least busy server, or by another one if that is lost meanwhile."""
        for _ in range(_MAX_TRIES):
            server = self._acquire()
            try:
                return server.complete(request, self._version)
            except ServerLostError as error:
                self._mark_lost(server, error)
            finally:
                with self._lock:
                    server.in_flight -= 1
        raise RetryableError(f"vLLM was lost over the same request {_MAX_TRIES} times ({self._reasons()})")

    def _acquire(self) -> VllmClient:
        """Return the server with the fewest requests, and count one more; wait if all servers are lost."""
        deadline = time.monotonic() + self._config.lost_deadline_s
        while True:
            self._retry_lost()
            with self._lock:
                usable = [server for server in self._servers if server.lost is None]
                if usable:
                    server = min(usable, key=lambda server: server.in_flight)
                    server.in_flight += 1
                    return server
            self._pause(_RETRY_S / 10, deadline)

    def _retry_lost(self) -> None:
        """Make a lost server load the current weights and use it again, if it is time to try one."""
        with self._lock:
            now = time.monotonic()
            server = next((each for each in self._servers if each.lost is not None and each.retry_at < now), None)
            if server is None:
                return
            server.retry_at = float("inf")  # no other thread tries it meanwhile
        try:
            self._attempt(server, self._load_current_weights)
        except BaseException:
            server.retry_at = 0.0  # another request may try it
            raise

    def _load_current_weights(self, server: VllmClient) -> None:
        """Make a server load the current weights from their folder and verify them, unless it has them already."""
        version = server.version()
        if version == self._version:
            return
        if self._folder is None:
            raise ServerLostError(f"it has weights {version}, not {self._version}")
        expected, adapters_only = weights_in(self._folder), self.synchronise == "adapters"
        if adapters_only and version == INITIAL_VERSION:
            assert self._base is not None, "adapters are added to known weights"
            expected |= weights_in(self._base)  # the server has started with these, which were never verified
        with server.changing_weights(self._version, expected):
            if adapters_only:
                server.load_adapters(self._version, self._folder)
            else:
                server.call_workers("load_folder", folder=str(self._folder), version=self._version)

    def _send(self, server: VllmClient, weights: Mapping[str, Tensor]) -> None:
        """Send a server the weights from memory; one that was restarted is connected again."""
        from components.rollout.vllm.transfer import Transfer, address_towards  # imports vLLM

        if server.version() == INITIAL_VERSION or server.transfer is None:
            server.transfer = Transfer(self.weights_by, server.post, deadline_s=self._config.request_deadline_s)
        with server.changing_weights(self._version, weights):
            address, num_workers = address_towards(server.url), server.num_workers()
            try:
                server.transfer.send(weights, trainer_address=address, num_receivers=num_workers)
            except ConnectionError as error:
                raise ServerLostError(str(error)) from None

    def _attempt(self, server: VllmClient, work: Callable[[VllmClient], _T]) -> list[_T]:
        """Return a list of the result of `work`, and use the server from now on; an empty list if it is lost."""
        try:
            result = work(server)
        except ServerLostError as error:
            self._mark_lost(server, error)
            return []
        if server.lost is not None:
            say("vllm", f"{server.url} answers again, with the current weights")
            server.lost = None
        return [result]

    def _mark_lost(self, server: VllmClient, error: ServerLostError) -> None:
        """Stop using a server until it has loaded the current weights, which is tried after `_RETRY_S`."""
        with self._lock:
            if server.lost is None:
                say("vllm", f"{server.url} is lost: {error}")
            server.lost, server.transfer = str(error), None
            server.retry_at = time.monotonic() + _RETRY_S

    def _on_each(self, work: Callable[[VllmClient], _T]) -> dict[str, _T]:
        """Do `work` on all servers at once; return by URL the results of those that answer, once one does."""
        deadline = time.monotonic() + self._config.lost_deadline_s
        while True:
            with ThreadPoolExecutor(len(self._servers)) as threads:
                attempts = list(threads.map(lambda server: self._attempt(server, work), self._servers))
            if any(attempts):
                pairs = zip(self._servers, attempts, strict=True)
                return {server.url: result for server, results in pairs for result in results}
            self._pause(_RETRY_S, deadline)

    def _pause(self, pause_s: float, deadline: float) -> None:
        """Sleep before another try; RetryableError after the deadline."""
        if time.monotonic() > deadline:
            raise RetryableError(f"no vLLM server for {self._config.lost_deadline_s:g} s ({self._reasons()})")
        time.sleep(pause_s)

    def _reasons(self) -> str:
        """Return why each server is lost."""
        return "; ".join(f"{server.url}: {server.lost or 'answers'}" for server in self._servers)
