"""Weights from the memory of a trainer's process into that of vLLM's, by vLLM's own transfer: no file between them.

vLLM has the backends `nccl`, between the GPUs of trainer and server, and `ipc`, by which an engine reads the memory of
a trainer on the same GPU. For machines without GPUs there is `gloo` here: `nccl` with another process group.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from components.rollout.vllm.config import WeightsBy

_TIMEOUT = timedelta(seconds=60)


class TransferError(Exception):
    """The weights did not get through; a new transfer may."""


class Transfer:
    """The connection that carries a process's weights to one vLLM; made when weights are first sent."""

    def __init__(self, backend: WeightsBy, call: Callable[[str, dict[str, Any]], None], *, deadline_s: float) -> None:
        """`call` takes the name of one of vLLM's functions of the transfer and its arguments."""
        self._backend, self._call, self._deadline_s = backend, call, deadline_s
        logging.getLogger("vllm").setLevel(logging.WARNING)  # in this process: what vLLM itself does is in its log
        on_gpu = backend != "gloo" and torch.cuda.is_available()
        # Of the rank, in whichever thread this is: each thread has a current device of its own.
        self._source = _Source(torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu"))
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
                if self._source.device.type == "cuda":
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
            update_weights=lambda info: self._call("update_weights", {"update_info": info}),
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
        initialize = _GlooTrainerEngine if self._backend == "gloo" else WeightTransferTrainerFactory
        return initialize.trainer_init(info, **ends)


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


class _GlooGroup:
    """A process group of the trainer's process, which is rank 0, and vLLM's."""

    def __init__(self, info: Any, rank: int) -> None:
        address = (info.master_address, info.master_port)
        # A socket of torch's own listens on all interfaces.
        listener = socket.create_server(address).detach() if rank == 0 else None
        options: dict[str, Any] = {"use_libuv": False, "master_listen_fd": listener}
        self._store = TCPStore(*address, info.world_size, rank == 0, timeout=_TIMEOUT, **options)
        self._group: Any = ProcessGroupGloo(PrefixStore("weights", self._store), rank, info.world_size, _TIMEOUT)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the tensor of every process with that of rank 0."""
        self._group.broadcast([tensor], BroadcastOptions()).wait()

    def destroy(self) -> None:
        """Leave the group, when vLLM ends."""
        del self._group, self._store


class _GlooTrainerEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> "_GlooTrainerEngine":
        """Open the group while vLLM joins it."""
        engine = cls(client=client, source=source, packed=False)
        address = {"master_address": init_info.master_address, "master_port": init_info.master_port}
        worker_info = NCCLWeightTransferInitInfo(**address, rank_offset=1, world_size=init_info.world_size)
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(client.init_weight_transfer_engine, worker_init_payload(worker_info))
            engine.model_update_group = _GlooGroup(init_info, rank=0)
            joining.result()
        return engine

    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous())

    def _post_send_sync(self) -> None:
        """Nothing is left to wait for: gloo's broadcast has waited."""


class GlooWorkerEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's end."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = _GlooGroup(init_info, rank)

    def receive_weights(self, update_info: Any) -> None:
        """Load each tensor as it arrives."""
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(weight)
            self.model.load_weights([(name, weight)])

    def finish_weight_update(self) -> None:
        """Compute with the new weights, in the output layer too."""
        super().finish_weight_update()
        renew_output_layer(self.model)


def renew_output_layer(model: Any) -> None:
    """Make an output layer that shares the weights of the embeddings compute with the new ones.

    On CPUs it keeps a repacked copy of them, which loading weights does not renew. Some models, such as Gemma, have no
    output layer beside the embeddings, whose copy is renewed.
    """
    head = getattr(model, "lm_head", None)
    if model.config.tie_word_embeddings and head is not None:
        head.quant_method.process_weights_after_loading(head)


WeightTransferEngineFactory.register_engine("gloo", GlooWorkerEngine)
