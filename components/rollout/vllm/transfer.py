"""Weights from the memory of a trainer's process into that of vLLM's, by vLLM's own transfer: no file between them.

vLLM has the backends `nccl`, between the GPUs of trainer and server, and `ipc`, by which an engine reads the memory of
a trainer on the same GPU.
"""

import logging
import os
import pickle
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from components.rollout.vllm.config import WeightsBy


class TransferError(Exception):
    """The weights did not get through; a new transfer may."""


class Transfer:
    """The connection that carries a process's weights to one vLLM; made when weights are first sent."""

    def __init__(self, backend: WeightsBy, call: Callable[[str, dict[str, Any]], None], *, deadline_s: float) -> None:
        """`call` takes the name of one of vLLM's functions of the transfer and its arguments."""
        self._backend, self._call, self._deadline_s = backend, call, deadline_s
        logging.getLogger("vllm").setLevel(logging.WARNING)  # in this process: what vLLM itself does is in its log
        # Of the rank, in whichever thread this is: each thread has a current device of its own.
        self._source = _Source(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
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
                torch.cuda.set_device(self._source.device)
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
        """Return vLLM's end of this process, which sends alone and so is the first of its group."""
        receiver = SimpleNamespace(  # vLLM's `VLLMWeightSyncClient`
            init_weight_transfer_engine=lambda info: self._call("init_weight_transfer_engine", {"init_info": info}),
            start_weight_update=lambda: self._call("start_weight_update", {}),
            update_weights=lambda info: self._call("update_weights", {"update_info": _without_handles(info)}),
            finish_weight_update=lambda: self._call("finish_weight_update", {}),
        )
        ends: dict[str, Any] = {"client": receiver, "source": self._source}
        if self._backend == "ipc":
            return WeightTransferTrainerFactory.trainer_init(IPCTrainerInitInfo(rank=0), **ends)
        with socket.socket() as probe:
            probe.bind((trainer_address, 0))
            port = int(probe.getsockname()[1])
        info = NCCLTrainerInitInfo(
            rank=0, master_address=trainer_address, master_port=port, world_size=1 + num_receivers
        )
        return WeightTransferTrainerFactory.trainer_init(info, **ends)


def _without_handles(info: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's update info with its IPC handles pickled in base64, which JSON can carry."""
    if info.get("ipc_handles") is None:
        return info
    return {**info, "ipc_handles": None, "ipc_handles_pickled": b64encode(pickle.dumps(info["ipc_handles"])).decode()}


def address_towards(url: str) -> str:
    """Return the address of this host on the way to the one in `url`."""
    parts = urlsplit(url)
    if parts.hostname is None:  # a Unix socket
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # nothing is sent: the kernel picks the way
        return str(probe.getsockname()[0])


class _Source(WeightSource):  # type: ignore[misc]  # vLLM's classes have no types here
    """The weights of a round, which are sent from `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.detach().to(self.device)
