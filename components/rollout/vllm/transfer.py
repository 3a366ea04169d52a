"""Weights from the memory of a trainer's process into that of vLLM's, by vLLM's own transfer: no file between them.

vLLM has the backends `nccl`, a group of the trainer's GPU and those of a server, and `ipc`, by which an engine reads
the memory of a trainer on the same GPU. For machines without GPUs `components/rollout/gloo_transfer.py` adds `gloo`.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from components.rollout.vllm.config import WeightsBy

Weights = Mapping[str, Tensor]


class Receiver(Protocol):
    """vLLM's end of the transfer; the methods are those of its `VLLMWeightSyncClient`, which raise what goes wrong."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group that `init_info` names."""
        ...

    def start_weight_update(self) -> None:
        """Get ready for weights."""
        ...

    def update_weights(self, update_info: Any) -> None:
        """Receive what is being sent, which `update_info` lists."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Compute with the weights that have come."""
        ...


class TransferError(Exception):
    """The weights did not get through; a new transfer may."""


class Transfer:
    """The way of a process's weights to one vLLM; it is laid when they are first sent."""

    def __init__(self, backend: WeightsBy, receiver: Receiver, *, deadline_s: float) -> None:
        self._backend, self._receiver, self._deadline_s = backend, receiver, deadline_s
        on_gpu = backend != "gloo" and torch.cuda.is_available()
        # Of the rank, in whichever thread this is: each thread has a current device of its own.
        self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        self._source = _source(self._device)
        self._engine: Any = None

    def send(self, weights: Weights, *, trainer_address: str, num_receivers: int) -> None:
        """Have vLLM take the weights, each under the name that its Hugging Face folder gives it.

        `trainer_address` is this process's, as vLLM's `num_receivers` processes reach it. TransferError where it fails
        or takes longer than the deadline: what waits for a peer that is gone cannot be called back.
        """
        self._source.weights = weights

        def send() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if self._engine is None:
                self._engine = self._connect(trainer_address, num_receivers)
            self._engine.send_weights()

        try:
            _within(self._deadline_s, send)
        finally:
            self._source.weights = {}  # whole weights, of which this may be the only holder

    def _connect(self, trainer_address: str, num_receivers: int) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        info = _init_info(self._backend, trainer_address, num_receivers)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._receiver, source=self._source)


def address_towards(url: str) -> str:
    """Return the address of this host on the way to the one in `url`."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # nothing is sent: the kernel picks the way
        return str(probe.getsockname()[0])


def _source(device: torch.device) -> Any:
    """A source as vLLM wants it, whose `weights` can be replaced before each round; they are sent from `device`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vLLM's classes have no types here
        weights: Weights

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.weights.items():
                yield name, tensor.detach().to(device)

    return Source()


def _init_info(backend: WeightsBy, trainer_address: str, num_receivers: int) -> Any:
    """How a trainer that sends alone introduces itself: it is the first of its group."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    rendezvous: dict[str, Any] = {
        "master_address": trainer_address,
        "master_port": _free_port(),
        "world_size": 1 + num_receivers,
        "rank": 0,
    }
    if backend == "gloo":
        from components.rollout.vllm.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(**rendezvous)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(**rendezvous)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _within(deadline_s: float, work: Callable[[], None]) -> None:
    """Do the work in a thread that is left behind when it takes longer."""
    errors: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if errors:
        raise TransferError(str(errors[0])) from errors[0]
    if thread.is_alive():
        raise TransferError(f"the weights were not received within {deadline_s:g} s")
