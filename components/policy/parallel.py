"""The processes (ranks) that train one model together: how they exchange values and wait for one another.

Every exchange begins with a barrier through a key-value store (torch's rendezvous store), so that an error can name the
missing ranks; torch's collectives do not. Between barriers only DeepSpeed's collectives wait, with the same deadline.
"""

import hmac
import os
import pickle
import secrets
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
from components.shared.environment import STORE_VARIABLE
from components.shared.errors import PipelineError, RetryableError

_START_S = 300.0
"""Time for all processes to start: images are pulled and libraries imported at different speeds."""
_HEARTBEAT_S = 0.5
"""Time between two heartbeats of a rank."""
_SILENCE_S = 6 * _HEARTBEAT_S
"""Time without a heartbeat after which a rank counts as lost."""
_ANSWER_S = 5.0
"""Time for the store to answer. Torch's own timeouts do not help: they too are enforced by requests to the store."""
_SIGNATURE_BYTES = 32
_Value = TypeVar("_Value")


@dataclass
class Ranks:
    """The processes of a run, as seen by one of them."""

    rank: int
    world_size: int
    deadline_s: float = 0.0
    """Time to wait for the others."""
    store: Store = field(default_factory=HashStore)
    key: bytes = b""
    """Secret that signs messages; known only to processes that can read the store."""
    _num_barriers: int = field(default=0, init=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def shard(self, items: Sequence[_Value]) -> Sequence[_Value]:
        """Return this process's contiguous part of items that are divided among all as evenly as possible."""
        start = len(items) * self.rank // self.world_size
        stop = len(items) * (self.rank + 1) // self.world_size
        return items[start:stop]

    def all_gather(self, value: _Value, what: str) -> list[_Value]:
        """Return the values of all processes, by rank; `what` names this point of the program, as in `barrier`.

        Unlike torch's all_gather_object, it unpickles only values that are signed with the key: gloo accepts whoever
        connects first as a rank.
        """
        if self.world_size == 1:
            return [value]
        self.barrier(what)
        content = pickle.dumps(value)
        message = torch.frombuffer(bytearray(self._signature(self.rank, content) + content), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        distributed.all_gather(sizes, torch.tensor([len(message)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)  # torch's all_gather takes tensors of equal size
        padded[: len(message)] = message
        received = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(received, padded)
        messages = [each[: int(size)].numpy().tobytes() for each, size in zip(received, sizes, strict=True)]
        return [self._verified_value(rank, each) for rank, each in enumerate(messages)]

    def _signature(self, rank: int, content: bytes) -> bytes:
        """Return the signature of what a rank sends at this barrier: no one else can send it, nor send it again."""
        return hmac.digest(self.key, f"{self._num_barriers}/{rank}/".encode() + content, "sha256")

    def _verified_value(self, rank: int, message: bytes) -> Any:
        """Return the value in a message of a rank; PipelineError if its signature is wrong."""
        signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(rank, content)):
            raise PipelineError(f"what came from rank {rank} was sent by a process that is not part of this run")
        return pickle.loads(content)

    def barrier(self, what: str) -> None:
        """Wait until every process is at the point that `what` names; RetryableError names those that are late."""
        if self.world_size > 1:
            self._num_barriers += 1
            _ask_store(lambda: self._wait_at_barrier(what), what, within_s=self.deadline_s + _ANSWER_S)

    def _wait_at_barrier(self, what: str) -> None:
        """Tell the store that this rank is here, and wait for the others there; errors as in `barrier`."""
        keys = [f"barrier/{self._num_barriers}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], what)
            self.store.wait(keys, timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            missing = self._describe(lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])])
            if not missing:
                raise RetryableError(f"the rendezvous store was lost at {what}: {_first_line(error)}") from error
            raise RetryableError(f"{missing} did not reach {what} within {self.deadline_s:g} s") from None
        # All processes have reached this barrier, so none still needs the keys of the barrier before the last one.
        if self._num_barriers > 2:
            self.store.delete_key(f"barrier/{self._num_barriers - 2}/{self.rank}")

    @contextmanager
    def report_lost_ranks(self) -> Iterator[None]:
        """Turn an error of torch's collectives in the block into a RetryableError that names the lost processes."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, DistError) and "gloo" not in str(error):  # gloo raises RuntimeError itself
                raise
            lost = _ask_store(lambda: self._describe(self._find_lost), "a collective", within_s=_SILENCE_S + _ANSWER_S)
            if lost:
                raise RetryableError(f"{lost} stopped responding") from error
            raise RetryableError(f"the processes lost their connection: {_first_line(error)}") from error

    def _find_lost(self) -> list[int]:
        """Return the ranks whose heartbeat has stopped; takes `_SILENCE_S`."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        before = [self.store.add(f"beat/{rank}", 0) for rank in others]  # adding 0 reads the counter
        time.sleep(_SILENCE_S)
        return [rank for rank, beat in zip(others, before, strict=True) if self.store.add(f"beat/{rank}", 0) == beat]

    def _describe(self, find: Callable[[], list[int]]) -> str:
        """Return the ranks that `find` finds, such as "rank 1 (host, process 7) of 2"; empty if none."""
        descriptions = []
        with suppress(RuntimeError):  # of a store that is lost
            for rank in find():
                key = f"name/{rank}"  # missing for a rank that never started: `get` would wait for it
                where = f" ({self.store.get(key).decode()})" if self.store.check([key]) else ""
                descriptions.append(f"rank {rank}{where}")
        return f"{', '.join(descriptions)} of {self.world_size}" if descriptions else ""


SINGLE_PROCESS = Ranks(0, 1)
_ranks: Ranks | None = None


def init_ranks(config: EngineConfig) -> Ranks:
    """Join torch's process group, which DeepSpeed needs even for one process, and return the processes in it.

    PipelineError unless as many processes were launched as the config says.
    """
    global _ranks  # noqa: PLW0603  # torch's process group is global, too
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != config.num_processes:
        launched = f"{size} {'was' if size == 1 else 'were'} launched (WORLD_SIZE)"
        raise PipelineError(f"engine.num_processes is {config.num_processes}, but {launched}")
    if _ranks is None:
        _ranks = _init_process_group(size, config.deadline_s)
    return _ranks


def set_group_timeouts() -> None:
    """Apply the deadline to all process groups, after `deepspeed.initialize`, which creates them with half an hour."""
    if _ranks is None or _ranks.world_size == 1:
        return
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=_ranks.deadline_s), group)


def _init_process_group(size: int, deadline_s: float) -> Ranks:
    """Join the process group, and return its processes; RetryableError if they cannot connect to one another."""
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # Objects are exchanged by gloo between hosts, tensors by NCCL between GPUs.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if size == 1:
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return SINGLE_PROCESS
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        url = os.environ.get(STORE_VARIABLE, "env://")
        store, rank, size = next(rendezvous(url, int(os.environ["RANK"]), size, timeout=timedelta(seconds=_START_S)))
        ranks = Ranks(rank, size, max(deadline_s, _START_S), PrefixStore("ranks", store))
        ranks.store.set(f"name/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        heartbeat_store = PrefixStore("ranks", store.clone())
        threading.Thread(target=_send_heartbeats, args=(heartbeat_store, rank), daemon=True).start()
        if rank == 0:
            ranks.store.set("key", secrets.token_hex())
        ranks.barrier("the start")
        ranks.key = ranks.store.get("key")
    except (RuntimeError, ValueError) as error:
        raise RetryableError(f"the processes could not connect to one another: {_first_line(error)}") from error
    group_store, timeout = PrefixStore("group", store), timedelta(seconds=deadline_s)
    distributed.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=timeout)
    ranks.deadline_s = deadline_s  # the longer one was for the start
    return ranks


def _send_heartbeats(store: Store, rank: int) -> None:
    """Increase this rank's counter in the store regularly."""
    with suppress(RuntimeError):  # the store ends with the process that serves it
        while True:
            store.add(f"beat/{rank}", 1)
            time.sleep(_HEARTBEAT_S)


def _ask_store(ask: Callable[[], _Value], what: str, *, within_s: float) -> _Value:
    """Return the result of `ask`, or raise its error; RetryableError after `within_s`, while its thread still waits."""
    answer: Future[_Value] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(within_s)
    except TimeoutError:
        lost = f"the rendezvous store does not answer at {what}"
        raise RetryableError(f"{lost}: is this host disconnected from the first one?") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
