"""Weights from the memory of a trainer's process into that of vLLM's, by vLLM's own transfer: no file between them.

vLLM has the backends `nccl`, a group of the trainer's GPU and those of a server, and `ipc`, by which an engine reads
the memory of a trainer on the same GPU. For machines without GPUs gloo.py adds `gloo`.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from components.rollout.vllm.config import WeightsBy


class TransferError(Exception):
    """The weights did not get through; a new transfer may."""


class Transfer:
    """The connection that carries a process's weights to one vLLM; made when weights are first sent."""

    def __init__(self, backend: WeightsBy, call: Callable[[str, dict[str, Any]], None], *, deadline_s: float) -> None:
        """`call` takes the name of one of vLLM's functions of the transfer and its arguments."""
        self._backend, self._call, self._deadline_s = backend, call, deadline_s
        on_gpu = backend != "gloo" and torch.cuda.is_available()
        # Of the rank, in whichever thread this is: each thread has a current device of its own.
        self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        self._source = _source(self._device)
        self._engine: Any = None

    def send(self, weights: Mapping[str, Tensor], *, trainer_address: str, num_receivers: int) -> None:
        """Make vLLM load the weights, each under the name that its Hugging Face folder gives it.

        `trainer_address` is this process's, as vLLM's `num_receivers` processes reach it. TransferError where it fails
        or takes longer than the deadline: a thread that waits for a lost peer cannot be ended, and is left behind.
        """
        self._source.weights = weights
        errors: list[Exception] = []

        def send() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                if self._engine is None:
                    self._engine = self._connect(trainer_address, num_receivers)
                self._engine.send_weights()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        self._source.weights = {}  # full weights, of which this may be the only holder
        if errors:
            raise TransferError(str(errors[0])) from errors[0]
        if thread.is_alive():
            raise TransferError(f"the weights were not received within {self._deadline_s:g} s")

    def _connect(self, trainer_address: str, num_receivers: int) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        info = _init_info(self._backend, trainer_address, num_receivers)
        return WeightTransferTrainerFactory.trainer_init(info, client=_Receiver(self._call), source=self._source)


class _Receiver:
    """vLLM's end of the transfer: see vLLM's `VLLMWeightSyncClient`."""

    def __init__(self, call: Callable[[str, dict[str, Any]], None]) -> None:
        self._call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert weight_version is None
        self._call("finish_weight_update", {})


def address_towards(url: str) -> str:
    """Return the address of this host on the way to the one in `url`."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # nothing is sent: the kernel picks the way
        return str(probe.getsockname()[0])


def _source(device: torch.device) -> Any:
    """Return a source of weights for vLLM, whose `weights` are set before each round; they are sent from `device`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vLLM's classes have no types here
        weights: Mapping[str, Tensor]

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.weights.items():
                yield name, tensor.detach().to(device)

    return Source()


def _init_info(backend: WeightsBy, trainer_address: str, num_receivers: int) -> Any:
    """Return how a trainer that sends alone introduces itself: it is the first of its group."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    with socket.socket() as probe:
        probe.bind(("", 0))
        free_port = int(probe.getsockname()[1])
    group: dict[str, Any] = {
        "master_address": trainer_address,
        "master_port": free_port,
        "world_size": 1 + num_receivers,
        "rank": 0,
    }
    if backend == "gloo":
        from components.rollout.vllm.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(**group)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(**group)
