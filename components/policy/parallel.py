"""The processes that train one model together: who they are, what they exchange, and how long they wait.

Every exchange begins with a meeting at a store that all of them reach: whoever does not come in time is known by name,
which no collective of torch tells. Between meetings only DeepSpeed's collectives wait, with the same deadline (see
`set_group_timeouts`).
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError, distributed_c10d
from torch.distributed.rendezvous import rendezvous

from components.policy.config import EngineConfig
from components.shared.errors import PipelineError, RetryableError

_JOIN_S = 300.0
"""Time for all processes to start: images are pulled and libraries imported at different speeds."""
_BEAT_S = 0.5
_SILENCE_S = 6 * _BEAT_S
_ANSWER_S = 5.0
"""Time for the store to answer. Torch keeps its own limits by asking it, so they do not hold where it is cut off."""
_Value = TypeVar("_Value")


class MissingRankError(RetryableError):
    """A process has not come to where the others wait for it."""


@dataclass
class Ranks:
    """The processes of a run as one of them sees them."""

    rank: int
    world_size: int
    deadline_s: float = 0.0
    """How long to wait for the others."""
    store: Store | None = None
    _barriers: int = field(default=0, init=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0

    def shard(self, items: Sequence[_Value]) -> Sequence[_Value]:
        """Return this process's part of what is divided among all: as even as can be, and in order."""
        start, stop = (len(items) * number // self.world_size for number in (self.rank, self.rank + 1))
        return items[start:stop]

    def all_gather(self, value: _Value, what: str) -> list[_Value]:
        """Return the values of all processes in their order; `what` says in an error where they meet for it."""
        if self.world_size == 1:
            return [value]
        self.barrier(what)
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def barrier(self, what: str) -> None:
        """Wait until every process has come here; MissingRankError with the names of those that have not in time."""
        if self.store is None:
            return
        self._barriers += 1
        _answered(lambda: self._come(what), what, within_s=self.deadline_s + _ANSWER_S)

    def _come(self, what: str) -> None:
        assert self.store is not None
        keys = [_at(self._barriers, number) for number in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], what)
            self.store.wait(keys, timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            missing = self._missing(keys)
            if not missing:
                raise RetryableError(f"the store of the processes is lost at {what}: {_first_line(error)}") from error
            raise MissingRankError(
                f"{', '.join(missing)} of {self.world_size} did not come to {what} within {self.deadline_s:g} s"
            ) from None
        # Whoever is here has left the meeting before the last: nobody waits for its key any more.
        if self._barriers > 2:
            self.store.delete_key(_at(self._barriers - 2, self.rank))

    @contextmanager
    def report_lost_ranks(self) -> Iterator[None]:
        """Have an error of a collective of torch name the processes that gave no sign of life when it came."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, DistError) and "gloo" not in str(error):
                raise
            silent = _answered(self._silent, "a collective", within_s=_SILENCE_S + _ANSWER_S)
            if silent:
                raise MissingRankError(f"{', '.join(silent)} of {self.world_size} gives no sign of life") from error
            raise RetryableError(f"the processes lost one another: {_first_line(error)}") from error

    def beat(self, store: Store) -> None:
        """Give a sign of life now and then, from a thread of its own."""

        def go_on() -> None:
            with suppress(RuntimeError):  # the store goes with the first process that ends
                while True:
                    store.add(f"beat/{self.rank}", 1)
                    time.sleep(_BEAT_S)

        threading.Thread(target=go_on, daemon=True).start()

    def _silent(self) -> list[str]:
        """The names of the processes that give no sign of life for some beats."""
        assert self.store is not None
        others = [number for number in range(self.world_size) if number != self.rank]
        try:
            before = [self.store.add(f"beat/{number}", 0) for number in others]
            time.sleep(_SILENCE_S)
            after = [self.store.add(f"beat/{number}", 0) for number in others]
            silent = [number for number, old, new in zip(others, before, after, strict=True) if old == new]
            return [self._name(number) for number in silent]
        except RuntimeError:
            return []

    def _name(self, number: int) -> str:
        assert self.store is not None
        key = f"name/{number}"  # one that never came has set none, and would be waited for
        return f"rank {number} ({self.store.get(key).decode()})" if self.store.check([key]) else f"rank {number}"

    def _missing(self, keys: Sequence[str]) -> list[str]:
        """The names of the processes that have not set their key."""
        assert self.store is not None
        try:
            absent = [number for number, key in enumerate(keys) if not self.store.check([key])]
            return [self._name(number) for number in absent]
        except RuntimeError:
            return []


SINGLE_PROCESS = Ranks(0, 1)
"""A process by itself."""


def _answered(ask: Callable[[], _Value], what: str, *, within_s: float) -> _Value:
    """Return what the store answers, or raise what asking it raises; RetryableError where it does not answer in time.

    A thread that waits for an answer cannot be ended: it is left behind.
    """
    answer: Future[_Value] = Future()

    def put_question() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=put_question, daemon=True).start()
    try:
        return answer.result(within_s)
    except TimeoutError:
        raise RetryableError(
            f"the store of the processes does not answer at {what}: is this host cut off from the first one?"
        ) from None


def _at(meeting: int, rank: int) -> str:
    return f"meeting/{meeting}/{rank}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def init_ranks(config: EngineConfig) -> Ranks:
    """Join the processes that were launched together, or stop unless there are as many as the config asks for.

    A process that was launched by itself forms the group of one that DeepSpeed wants.
    """
    global _joined  # noqa: PLW0603  # torch's group of processes is one for each process, too
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != config.num_processes:
        raise PipelineError(
            f"engine.num_processes is {config.num_processes}, but {size} {'was' if size == 1 else 'were'} launched "
            "(WORLD_SIZE)"
        )
    if _joined is None:
        _joined = _join(size, config.deadline_s)
    return _joined


_joined: Ranks | None = None


def _join(size: int, deadline_s: float) -> Ranks:
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # Objects are exchanged over the network of the hosts, tensors over that of the accelerators.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if size == 1:
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return SINGLE_PROCESS
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=_JOIN_S)))
        own, beats = PrefixStore("ranks", store), PrefixStore("ranks", store.clone())
        own.set(f"name/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        ranks = Ranks(rank, size, max(deadline_s, _JOIN_S), own)
        ranks.beat(beats)
        ranks.barrier("the start")
    except (RuntimeError, ValueError) as error:
        raise RetryableError(f"the processes did not find one another: {_first_line(error)}") from error
    distributed.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timedelta(seconds=deadline_s)
    )
    ranks.deadline_s = deadline_s
    return ranks


def set_group_timeouts() -> None:
    """Give all groups of processes the deadline of the run: those that DeepSpeed makes have torch's, half an hour.

    To be called after each `deepspeed.initialize`.
    """
    if _joined is None or _joined.world_size == 1:
        return
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=_joined.deadline_s), group)
