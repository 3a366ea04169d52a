"""Sampling from vLLM servers: a request per group, spread over the servers that hold the current weights.

`VllmClient` talks to one server: each call has a deadline, and either answers or says why not.
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
"""Of one request: one over which so many servers were lost would cost the next, too."""
_T = TypeVar("_T")
UNIX = "unix:"
"""What URLs of Unix sockets begin with."""
INITIAL_VERSION = "default"
"""vLLM's version of the weights that it started with."""


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
"""Begins to complete a request, beside those in flight."""


def scoring_requests(sequence: TokenSequence, temperature: float) -> list[Request]:
    """Return the requests for the log-probabilities of the completion tokens of a sequence, in their order.

    An answer has that of the token in `logprob_token_ids`, as the next after the prompt. At temperature 1 vLLM returns
    those of the tokens of a prompt as well: one request for all. At any other temperature each token takes a request.
    """
    ids = sequence.prompt_ids + sequence.completion_ids
    one_pass = temperature in (0, 1)  # the log-probabilities of greedy decoding are at temperature 1
    places = [len(ids) - 1] if one_pass else range(len(sequence.prompt_ids), len(ids))
    params = {"max_tokens": 1, "temperature": temperature, "seed": 0, "detokenize": False, "ignore_eos": True}
    if one_pass:
        params["prompt_logprobs"] = 0
    # A server returns as many as `logprobs` says, beginning with the token it sampled: the requested one is the second.
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
            # While a server is started again, others may put a socket of theirs where its folder was.
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
    """Return a pool of connections to a server, without a proxy: at http://HOST:PORT, or behind a socket, unix:PATH.

    They give the key of this process's job, if it has one.
    """
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    options: dict[str, Any] = {"maxsize": _MAX_REQUESTS, "retries": False, "headers": headers}
    if url.startswith(UNIX):
        return _UnixPool("localhost", socket_path=url.removeprefix(UNIX), **options)
    return urllib3.connection_from_url(url, **options)


class RequireKey:
    """What vLLM's server passes each request through in a pod: it refuses those without the key of the job.

    vLLM's own --api-key leaves open what replaces weights and writes files.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request as ASGI has it; probes of the cluster, which know no key, ask for /health."""
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                if scope["type"] == "http":  # others are closed
                    await send({"type": "http.response.start", "status": 401, "headers": []})
                    await send({"type": "http.response.body", "body": b"the key of the job is missing or wrong"})
                return
        await self._app(scope, receive, send)


class ServerLostError(Exception):
    """The server does not answer, or cannot be trusted with the next request."""


class VllmClient:
    """The calls of one server, and what is known of it here."""

    def __init__(self, url: str, request_deadline_s: float, *, adapters: bool = False) -> None:
        """With `adapters`, each version but the initial one is a name of adapters, too."""
        self.url, self._request_deadline_s, self._adapters = url, request_deadline_s, adapters
        self._pool = connections(url)
        self.in_flight = 0
        self.lost: str | None = None
        """Why the server is not used, if it is not."""
        self.retry_at = 0.0
        self.transfer: Any = None
        """The connection by which it received weights from this process."""

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
            if answer["prompt_logprobs"]:
                pairs = zip(answer["prompt_logprobs"][start:], request.prompt_ids[start:], strict=True)
                logprobs += [place[str(token)]["logprob"] for place, token in pairs]
            tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            (token, _) = request.params["logprob_token_ids"]
            logprobs.append(next(top["logprob"] for top in tops if top["token_id"] == token))
        return logprobs

    def version(self) -> str:
        """Return the version of the weights it samples from."""
        return str(self._call("GET", "/weight_info", None, _CONTROL_S)["weight_version"])

    @contextmanager
    def changing_weights(self, version: str, sent: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the block replace the weights by those `sent` while nothing is computed, then verify and name them.

        Requests in flight are finished before; those that arrive meanwhile wait for the new weights.
        """
        self.post("pause?mode=wait&clear_cache=true", {})
        yield
        verify_weights(sent, self.call_workers("loaded_weights", shapes=shapes(sent)), name=self.url)
        self._call("POST", "/update_weight_version", {"new_version": version}, _CONTROL_S)
        self._call("POST", "/resume", {}, _CONTROL_S)

    def load_adapters(self, version: str, folder: Path) -> None:
        """Load the adapters of a version, unless they are loaded: several clients may ask for it."""
        try:
            self.post("v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
        except PipelineError as error:
            if "already been loaded" not in str(error):
                raise

    def num_workers(self) -> int:
        """Return how many processes hold the weights, or a part of them."""
        return int(self._call("GET", "/get_world_size", None, _CONTROL_S)["world_size"])

    def post(self, name: str, body: dict[str, Any]) -> Any:
        """Return the answer of the endpoint of this name."""
        return self._call("POST", f"/{name}", body, self._request_deadline_s)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Return what a method of worker.py returns in each of the server's processes."""
        results: list[Any] = self.post("collective_rpc", {"method": method, "kwargs": arguments})["results"]
        return results

    def _generate(self, token_ids: tuple[int, ...], params: dict[str, Any], version: str) -> Any:
        body = {"token_ids": token_ids, "sampling_params": params}
        if self._adapters and version != INITIAL_VERSION:
            body["model"] = version
        answer = self.post("inference/v1/generate", body)
        versions = {span["version"] for choice in answer["choices"] for span in choice["weight_versions"]}
        if versions != {version}:
            raise ServerLostError(f"it sampled from weights {', '.join(sorted(versions))}, not {version}")
        return answer

    def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        timeout = urllib3.Timeout(connect=min(_CONNECT_S, deadline_s), total=deadline_s)
        try:
            answer = self._pool.request(method, path, json=body, timeout=timeout)
            content = answer.json() if answer.data.startswith((b"{", b"[")) else answer.data.decode()
        except urllib3.exceptions.ReadTimeoutError:
            raise ServerLostError(f"no answer to {path} within {deadline_s:g} s") from None
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ServerLostError(str(error)) from None
        if answer.status == 404 and isinstance(body, dict) and "model" in body:
            raise ServerLostError(f"it does not have the adapters {body['model']}")  # it was started again
        if 400 <= answer.status < 500:
            raise PipelineError(f"vLLM server {self.url} refuses {path}: {_reported_error(content)}")
        if answer.status != 200:
            raise ServerLostError(f"{path} failed ({answer.status}): {_reported_error(content)}")
        return content


def _reported_error(content: Any) -> str:
    """Return the first line of an error: a text, {"message": ...}, {"error": ...} or {"error": {"message": ...}}."""
    for key in ("error", "message"):
        content = content.get(key, content) if isinstance(content, dict) else content
    return str(content).strip().split("\n", 1)[0][:500]


class VllmServers:
    """vLLM servers with one copy each of a model's weights, for this process alone or shared by all of a run.

    RetryableError where no server has answered for `lost_deadline_s`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: VllmConfig,
        *,
        base: Path | None = None,
        beside: ExitStack | None = None,
        sleeps: bool = False,
    ) -> None:
        """`base` is the folder that the servers have started with, to which adapters are added.

        `beside` ends servers that belong to this process alone; those that take turns with it on its GPU sleep.
        """
        self.shared = beside is None
        """Whether all processes of a run use these servers, so that only one of them sends the weights."""
        self._beside, self._sleeps, self._asleep = beside, sleeps, False
        self._config, self.weights_by, self.synchronise = config, config.weights_by, config.synchronise
        self.max_tokens, self._base = config.max_tokens, base
        adapters = config.synchronise == "adapters"
        self._servers = [VllmClient(url, config.request_deadline_s, adapters=adapters) for url in urls]
        self._lock = threading.Lock()
        self._folder: Path | None = None
        """Where the current weights are; None for the initial ones, and for those that were sent."""
        self._version = INITIAL_VERSION

    @contextmanager
    def submitting(self) -> Iterator[Submit]:
        """Let the block begin requests one by one; those in flight at its end are given up."""
        self._wake()
        threads = ThreadPoolExecutor(_MAX_REQUESTS)
        try:
            yield lambda request: threads.submit(self._complete, request)
        finally:
            threads.shutdown(cancel_futures=True)

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """Return the log-probability of each completion token at this temperature, by the address of each server."""
        self._wake()

        def score(server: VllmClient) -> list[list[float]]:
            if server.lost is not None:
                self._bring_up_to_date(server)
            with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
                return list(threads.map(lambda each: server.score(each, temperature, self._version), sequences))

        return self._on_each(score)

    def set_weights(self, version: int, weights: Path | Mapping[str, Tensor] | None) -> None:
        """Sample from these weights from now on, and reuse nothing that was computed with others.

        They are in a Hugging Face folder, or in one of PEFT where adapters are synchronised. It stays until the next
        call: a server that has to start again reads it once more. Or they are in this process's memory, under the
        names of a Hugging Face folder; None where another process has sent them. Each version has another number.
        Several clients of the same servers may each call this, with the same arguments. A server that is lost while
        weights are sent is used again once it has received the next.

        StaleWeightsError where a server does not compute with exactly these weights afterwards, rounded to its own
        precision.
        """
        self._wake()
        self._folder, self._version = weights.resolve() if isinstance(weights, Path) else None, str(version)
        if isinstance(weights, Mapping):
            self._on_each(lambda server: self._send(server, weights))
        else:
            self._on_each(self._bring_up_to_date)

    def sleep(self) -> None:
        """See `Sampler`; nothing is freed for servers that have GPUs of their own."""
        if self._sleeps:
            self._on_each(lambda server: server.post("sleep?level=1", {}))
            self._asleep = True

    def close(self) -> None:
        """Close the connections, and end the servers that belong to this process."""
        for server in self._servers:
            server.close()
        if self._beside is not None:
            self._beside.close()

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the update has freed, PyTorch would keep from vLLM
            self._on_each(lambda server: server.post("wake_up", {}))
            self._asleep = False

    def _complete(self, request: Request) -> list[SampledTokens]:
        """Return the completions by the server with the fewest requests; by another if that one is lost over it."""
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
        """Return the server with the fewest requests, with one more counted; wait for one if there is none."""
        deadline = time.monotonic() + self._config.lost_deadline_s
        while True:
            self._retry_lost()
            with self._lock:
                usable = [server for server in self._servers if server.lost is None]
                if usable:
                    server = min(usable, key=lambda server: server.in_flight)
                    server.in_flight += 1
                    return server
            self._wait_until(deadline, _RETRY_S / 10)

    def _retry_lost(self) -> None:
        """Try one of the lost servers, if it is time to."""
        with self._lock:
            now = time.monotonic()
            server = next((each for each in self._servers if each.lost is not None and each.retry_at < now), None)
            if server is None:
                return
            server.retry_at = float("inf")  # no other thread tries it meanwhile
        try:
            self._attempt(server, self._bring_up_to_date)
        except BaseException:
            server.retry_at = 0.0
            raise

    def _bring_up_to_date(self, server: VllmClient) -> None:
        """Make a server sample from the current weights."""
        version = server.version()
        if version != self._version:
            if self._folder is None:
                raise ServerLostError(f"it has weights {version}, not {self._version}")
            sent, adapters = weights_in(self._folder), self.synchronise == "adapters"
            if adapters and version == INITIAL_VERSION:
                assert self._base is not None, "adapters are added to known weights"
                sent |= weights_in(self._base)
            with server.changing_weights(self._version, sent):
                if adapters:
                    server.load_adapters(self._version, self._folder)
                else:
                    server.call_workers("load_folder", folder=str(self._folder), version=self._version)

    def _send(self, server: VllmClient, weights: Mapping[str, Tensor]) -> None:
        """Send a server the weights; one that was restarted is connected anew."""
        from components.rollout.vllm.transfer import Transfer, TransferError, address_towards  # vLLM itself

        if server.version() == INITIAL_VERSION or server.transfer is None:
            server.transfer = Transfer(self.weights_by, server.post, deadline_s=self._config.request_deadline_s)
        with server.changing_weights(self._version, weights):
            address, num_workers = address_towards(server.url), server.num_workers()
            try:
                server.transfer.send(weights, trainer_address=address, num_receivers=num_workers)
            except TransferError as error:
                raise ServerLostError(str(error)) from None

    def _attempt(self, server: VllmClient, work: Callable[[VllmClient], _T]) -> list[_T]:
        """Return what `work` returns, and use the server from then on; nothing if it is lost over it."""
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
        with self._lock:
            if server.lost is None:
                say("vllm", f"{server.url} is lost: {error}")
            server.lost, server.transfer = str(error), None
            server.retry_at = time.monotonic() + _RETRY_S

    def _on_each(self, work: Callable[[VllmClient], _T]) -> dict[str, _T]:
        """Do something on all servers at once; return the results of those that answer, at least one, by address."""
        deadline = time.monotonic() + self._config.lost_deadline_s
        while True:
            with ThreadPoolExecutor(len(self._servers)) as threads:
                attempts = list(threads.map(lambda server: self._attempt(server, work), self._servers))
            if any(attempts):
                pairs = zip(self._servers, attempts, strict=True)
                return {server.url: result for server, results in pairs for result in results}
            self._wait_until(deadline, _RETRY_S)

    def _wait_until(self, deadline: float, pause_s: float) -> None:
        if time.monotonic() > deadline:
            raise RetryableError(f"no vLLM server for {self._config.lost_deadline_s:g} s ({self._reasons()})")
        time.sleep(pause_s)

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.lost or 'answers'}" for server in self._servers)
