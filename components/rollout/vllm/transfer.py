"""Transfer of weights from a trainer's memory to vLLM's, without files, by vLLM's own backends.

`nccl` sends between the GPUs of trainer and server; with `ipc` an engine reads the memory of a trainer on the same GPU.
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


class Transfer:
    """The connection that sends a process's weights to one vLLM server; opened by the first `send`."""

    def __init__(self, backend: WeightsBy, call: Callable[[str, dict[str, Any]], None], *, deadline_s: float) -> None:
        """`call` posts arguments to the server's endpoint of a name, such as `start_weight_update`."""
        self._backend, self._call, self._deadline_s = backend, call, deadline_s
        logging.getLogger("vllm").setLevel(logging.WARNING)  # only in this process; the server has its own log
        # The GPU of the rank: the current device differs in each thread.
        self._source = _Source(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        self._engine: Any = None

    def send(self, weights: Mapping[str, Tensor], *, trainer_address: str, num_receivers: int) -> None:
        """Make the server load weights, which have the names of a Hugging Face folder.

        The server's `num_receivers` processes reach this process at `trainer_address`. ConnectionError if this fails or
        takes longer than the deadline; the thread that sends is then left behind, as nothing can end its wait.
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
        self._source.weights = {}  # frees them if nothing else refers to them
        if errors:
            raise ConnectionError(str(errors[0])) from errors[0]
        if thread.is_alive():
            raise ConnectionError(f"the weights were not received within {self._deadline_s:g} s")

    def _connect(self, trainer_address: str, num_receivers: int) -> Any:
        """Return vLLM's sender for this process, which is rank 0 of its group with the receivers."""
        client = SimpleNamespace(  # has the methods of vLLM's `VLLMWeightSyncClient`
            init_weight_transfer_engine=lambda info: self._call("init_weight_transfer_engine", {"init_info": info}),
            start_weight_update=lambda: self._call("start_weight_update", {}),
            update_weights=lambda info: self._call("update_weights", {"update_info": _with_pickled_handles(info)}),
            finish_weight_update=lambda: self._call("finish_weight_update", {}),
        )
        if self._backend == "ipc":
            info = IPCTrainerInitInfo(rank=0)
        else:
            with socket.socket() as probe:
                probe.bind((trainer_address, 0))
                port = int(probe.getsockname()[1])
            info = NCCLTrainerInitInfo(
                rank=0, master_address=trainer_address, master_port=port, world_size=1 + num_receivers
            )
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)


def _with_pickled_handles(info: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's update info with its IPC handles pickled and in base64, as JSON cannot represent them."""
    if info.get("ipc_handles") is None:
        return info
    return {**info, "ipc_handles": None, "ipc_handles_pickled": b64encode(pickle.dumps(info["ipc_handles"])).decode()}


def address_towards(url: str) -> str:
    """Return this host's address in the network through which it reaches the host of `url`."""
    parts = urlsplit(url)
    if parts.hostname is None:  # a Unix socket
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing: the kernel only chooses the route
        return str(probe.getsockname()[0])


class _Source(WeightSource):  # type: ignore[misc]  # vLLM's classes have no types here
    """The weights that vLLM's sender sends, from `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.detach().to(self.device)
