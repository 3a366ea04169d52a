"""Sampling from vLLM servers: a request per group, spread over the servers that hold the current weights."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from components.policy.packing import TokenSequence
from components.rollout.vllm.client import INITIAL_VERSION, ServerLostError, VllmClient
from components.rollout.vllm.config import ServersConfig
from components.rollout.vllm.sampler import Request, SampledTokens
from components.rollout.vllm.verification import weights_in
from components.shared.errors import RetryableError
from components.shared.progress import say

_MAX_REQUESTS = 256
"""Requests under way at once; vLLM itself decides how many of them it computes together."""
_RETRY_S = 1.0
_MAX_TRIES = 4
"""Of one request: one over which so many servers were lost would cost the next, too."""
_T = TypeVar("_T")


@dataclass(eq=False)
class _Server:
    """The state of a server as this client knows it."""

    client: VllmClient
    in_flight: int = 0
    lost: str | None = None
    """Why it is not used, if it is not."""
    retry_at: float = 0.0
    transfer: Any = None
    """The connection by which it received weights from this process."""


class VllmServers:
    """An `Engine` (see sampler.py) of vLLM servers.

    RetryableError where no server has answered for `lost_deadline_s`.
    """

    shared = True

    def __init__(self, urls: Sequence[str], config: ServersConfig) -> None:
        self._config, self.weights_by = config, config.weights_by
        self._servers = [_Server(VllmClient(url, config.request_deadline_s)) for url in urls]
        self._lock = threading.Lock()
        self._folder: Path | None = None
        """Where the current weights are; None for the initial ones, and for those that were sent."""
        self._version = INITIAL_VERSION

    def complete(self, requests: Sequence[Request]) -> list[list[SampledTokens]]:
        """See `Engine`."""
        with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
            return list(threads.map(self._complete, requests))

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `Engine`: those of each server that answers, by its address."""

        def score(server: _Server) -> list[list[float]]:
            if server.lost is not None:
                self._bring_up_to_date(server)
            with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
                return list(threads.map(lambda each: server.client.score(each, temperature, self._version), sequences))

        return self._on_each(score)

    def set_weights(self, version: int, weights: Path | Mapping[str, Tensor] | None) -> None:
        """See `Engine`; several clients of the same servers may each call this, with the same arguments.

        A server that is lost while weights are sent is used again once it has received the next.
        """
        self._folder, self._version = weights.resolve() if isinstance(weights, Path) else None, str(version)
        if isinstance(weights, Mapping):
            self._on_each(lambda server: self._send(server, weights))
        else:
            self._on_each(self._bring_up_to_date)

    def sleep(self) -> None:
        """Do nothing: the servers have GPUs of their own."""

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        for server in self._servers:
            server.client.close()

    def _complete(self, request: Request) -> list[SampledTokens]:
        """Return the answer of the server with the fewest requests; of another if that one is lost over it."""
        for _ in range(_MAX_TRIES):
            server = self._acquire()
            try:
                return server.client.complete(request, self._version)
            except ServerLostError as error:
                self._mark_lost(server, error)
            finally:
                with self._lock:
                    server.in_flight -= 1
        raise RetryableError(f"vLLM was lost over the same request {_MAX_TRIES} times ({self._reasons()})")

    def _acquire(self) -> _Server:
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
            self._bring_up_to_date(server)
        except ServerLostError as error:
            self._mark_lost(server, error)
        except BaseException:
            server.retry_at = 0.0
            raise

    def _bring_up_to_date(self, server: _Server) -> None:
        """Make a server sample from the current weights, and use it from then on."""
        version = server.client.version()
        if version != self._version:
            if self._folder is None:
                raise ServerLostError(f"it has weights {version}, not {self._version}")
            with server.client.changing_weights(self._version, weights_in(self._folder)):
                server.client.load(str(self._folder), self._version)
        self._mark_found(server)

    def _send(self, server: _Server, weights: Mapping[str, Tensor]) -> None:
        """Send a server the weights; one that was restarted is connected anew."""
        from components.rollout.vllm.transfer import Transfer, TransferError, address_towards  # vLLM itself

        client = server.client
        if client.version() == INITIAL_VERSION or server.transfer is None:
            server.transfer = Transfer(self.weights_by, client.post, deadline_s=self._config.request_deadline_s)
        with client.changing_weights(self._version, weights):
            try:
                server.transfer.send(
                    weights, trainer_address=address_towards(client.url), num_receivers=client.num_workers()
                )
            except TransferError as error:
                raise ServerLostError(str(error)) from None
        self._mark_found(server)

    def _mark_found(self, server: _Server) -> None:
        if server.lost is not None:
            say("vllm", f"{server.client.url} answers again, with the current weights")
            server.lost = None

    def _mark_lost(self, server: _Server, error: ServerLostError) -> None:
        with self._lock:
            if server.lost is None:
                say("vllm", f"{server.client.url} is lost: {error}")
            server.lost, server.transfer = str(error), None
            server.retry_at = time.monotonic() + _RETRY_S

    def _on_each(self, work: Callable[[_Server], _T]) -> dict[str, _T]:
        """Do something on all servers at once; return the results of those that answer, at least one, by address."""
        results: dict[str, _T] = {}

        def attempt(server: _Server) -> None:
            try:
                results[server.client.url] = work(server)
            except ServerLostError as error:
                self._mark_lost(server, error)

        deadline = time.monotonic() + self._config.lost_deadline_s
        while True:
            with ThreadPoolExecutor(len(self._servers)) as threads:
                list(threads.map(attempt, self._servers))
            if results:
                return results
            self._wait_until(deadline, _RETRY_S)

    def _wait_until(self, deadline: float, pause_s: float) -> None:
        if time.monotonic() > deadline:
            raise RetryableError(f"no vLLM server for {self._config.lost_deadline_s:g} s ({self._reasons()})")
        time.sleep(pause_s)

    def _reasons(self) -> str:
        return "; ".join(f"{server.client.url}: {server.lost or 'answers'}" for server in self._servers)
