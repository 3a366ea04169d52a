"""Sampling from vLLM servers: a request per group, spread over the servers that hold the current weights."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.rollout.vllm.client import INITIAL_VERSION, ServerLostError, VllmClient
from components.rollout.vllm.config import ServersConfig
from components.rollout.vllm.requests import Drawn, Tokens, completion, group_seeds, sampling_params
from components.rollout.vllm.transfer import Transfer, TransferError, address_towards
from components.rollout.vllm.verification import refuse_other_weights, shapes, weights_in
from components.shared.errors import RetryableError
from components.shared.progress import say

_MAX_REQUESTS = 256
"""Requests under way at once; vLLM itself decides how many of them it computes together."""
_TRY_AGAIN_S = 1.0
_MAX_TRIES = 4
"""Of one request: what has taken so many servers with it would take the next."""
_T = TypeVar("_T")


@dataclass(eq=False)
class _Server:
    """What is known of a server."""

    connection: VllmClient
    in_flight: int = 0
    gone: str | None = None
    """Why it is not asked, where it is not."""
    try_again_at: float = 0.0
    transfer: Transfer | None = None
    """The way by which it has got weights from this process."""


class VllmServers:
    """An `Engine` (see sampler.py) of vLLM servers.

    RetryableError where no server has answered for `lost_deadline_s`.
    """

    shared = True

    def __init__(self, tokens: Tokens, urls: Sequence[str], config: ServersConfig) -> None:
        self._tokens = tokens
        self._servers = [_Server(VllmClient(url, config.request_deadline_s)) for url in urls]
        self._lost_deadline_s, self._request_deadline_s = config.lost_deadline_s, config.request_deadline_s
        self.weights_by = config.weights_by
        self._lock = threading.Lock()
        self._folder: Path | None = None
        """Where the current weights lie; None for those that the servers started with, and for what was sent."""
        self._version = INITIAL_VERSION

    def generate(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """See `Sampler`."""
        prompts = [self._tokens.prompt_ids(question) for question in questions]

        def draw(prompt: tuple[int, ...], group_seed: int) -> list[Drawn]:
            params = sampling_params(
                self._tokens,
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=group_seed,
            )
            return self._ask(lambda connection: connection.generate(prompt, params, self._version))

        with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
            groups = list(threads.map(draw, prompts, group_seeds(seed, len(prompts))))
        return [
            [completion(self._tokens, prompt, drawn) for drawn in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def load_weights(self, folder: Path, version: int) -> None:
        """See `Sampler`; several clients of the same servers may each call this, with the same arguments."""
        self._folder, self._version = folder.resolve(), str(version)
        self._on_each(self._bring_up_to_date)

    def receive_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Sampler`. A server that is lost meanwhile is asked again when it has got the next ones."""
        self._folder, self._version = None, str(version)
        self._on_each(lambda server: self._send(server, weights))

    def expect_weights(self, version: int) -> None:
        """See `Sampler`."""
        self._folder, self._version = None, str(version)
        self._on_each(self._bring_up_to_date)

    def prompt_logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `Sampler`: what each server says that answers, by its address."""

        def score(server: _Server) -> list[list[float]]:
            if server.gone is not None:
                self._bring_up_to_date(server)
            with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
                return list(
                    threads.map(
                        lambda sequence: server.connection.score(sequence, temperature, self._version), sequences
                    )
                )

        return self._on_each(score)

    def sleep(self) -> None:
        """Do nothing: the servers have GPUs of their own."""

    def close(self) -> None:
        """Close the connections; the servers go on."""
        for server in self._servers:
            server.connection.close()

    def _ask(self, request: Callable[[VllmClient], _T]) -> _T:
        """Return the answer of the server that has the least to do; of another where that one is lost over it."""
        for _ in range(_MAX_TRIES):
            server = self._take()
            try:
                return request(server.connection)
            except ServerLostError as error:
                self._give_up(server, error)
            finally:
                with self._lock:
                    server.in_flight -= 1
        raise RetryableError(f"vLLM was lost over the same request {_MAX_TRIES} times ({self._losses()})")

    def _take(self) -> _Server:
        """Return the server with the fewest requests, with one more; wait for one where there is none."""
        deadline = time.monotonic() + self._lost_deadline_s
        while True:
            self._revive()
            with self._lock:
                usable = [server for server in self._servers if server.gone is None]
                if usable:
                    chosen = min(usable, key=lambda server: server.in_flight)
                    chosen.in_flight += 1
                    return chosen
            if time.monotonic() > deadline:
                raise RetryableError(f"no vLLM server for {self._lost_deadline_s:g} s ({self._losses()})")
            time.sleep(_TRY_AGAIN_S / 10)

    def _revive(self) -> None:
        """Try one of the servers that were lost, if it is time to."""
        now = time.monotonic()
        with self._lock:
            due = [server for server in self._servers if server.gone is not None and server.try_again_at < now]
            if not due:
                return
            due[0].try_again_at = float("inf")  # no other thread tries it meanwhile
        try:
            self._bring_up_to_date(due[0])
        except ServerLostError as error:
            self._give_up(due[0], error)
        except BaseException:
            due[0].try_again_at = 0.0
            raise

    def _bring_up_to_date(self, server: _Server) -> None:
        """Have a server sample from the current weights; from here on it is asked."""
        found = server.connection.version()
        if found != self._version:
            if self._folder is None:
                raise ServerLostError(f"it holds weights {found}, and is to have {self._version}")
            with server.connection.changing_weights(self._version):
                server.connection.load(str(self._folder), self._version)
                _verify(server.connection, weights_in(self._folder))
        self._take_back(server)

    def _send(self, server: _Server, weights: Mapping[str, Tensor]) -> None:
        """Send a server the weights; one that was started again is connected anew."""
        assert self.weights_by != "folder"
        connection = server.connection
        if connection.version() == INITIAL_VERSION or server.transfer is None:
            server.transfer = Transfer(self.weights_by, connection, deadline_s=self._request_deadline_s)
        with connection.changing_weights(self._version):
            address = address_towards(connection.url)
            try:
                server.transfer.send(weights, trainer_address=address, num_receivers=connection.num_workers())
            except TransferError as error:
                raise ServerLostError(str(error)) from None
            _verify(connection, weights)
        self._take_back(server)

    def _take_back(self, server: _Server) -> None:
        if server.gone is not None:
            say("vllm", f"{server.connection.url} answers again, with the current weights")
            server.gone = None

    def _give_up(self, server: _Server, error: ServerLostError) -> None:
        with self._lock:
            if server.gone is None:
                say("vllm", f"{server.connection.url} is lost: {error}")
            server.gone = str(error)
            server.transfer = None
            server.try_again_at = time.monotonic() + _TRY_AGAIN_S

    def _on_each(self, work: Callable[[_Server], _T]) -> dict[str, _T]:
        """Do something on all servers at once; return the results of those that answer, at least one, by address."""
        deadline = time.monotonic() + self._lost_deadline_s
        while True:
            with ThreadPoolExecutor(len(self._servers)) as threads:
                results = dict(
                    zip(self._servers, threads.map(lambda server: self._try(server, work), self._servers), strict=True)
                )
            found = {server.connection.url: result[0] for server, result in results.items() if result}
            if found:
                return found
            if time.monotonic() > deadline:
                raise RetryableError(f"no vLLM server for {self._lost_deadline_s:g} s ({self._losses()})")
            time.sleep(_TRY_AGAIN_S)

    def _try(self, server: _Server, work: Callable[[_Server], _T]) -> tuple[_T] | None:
        try:
            return (work(server),)
        except ServerLostError as error:
            self._give_up(server, error)
            return None

    def _losses(self) -> str:
        return "; ".join(f"{server.connection.url}: {server.gone or 'answers'}" for server in self._servers)


def _verify(connection: VllmClient, sent: Mapping[str, Tensor]) -> None:
    refuse_other_weights(sent, connection.held_weights(shapes(sent)), name=connection.url)
