"""vLLM's transfer of weights by broadcast over gloo: what `nccl` does between GPUs, between processes without.

Handshake, lists of tensors and loading are those of vLLM's `nccl` backend; only the process group is another.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from components.rollout.vllm.loaded_weights import renew_output_layer

_TIMEOUT = timedelta(seconds=60)


class GlooGroup:
    """A process group of the trainer's process, which is rank 0, and vLLM's."""

    def __init__(self, info: Any, rank: int) -> None:
        self._store = TCPStore(
            info.master_address,
            info.master_port,
            info.world_size,
            is_master=rank == 0,
            timeout=_TIMEOUT,
            use_libuv=False,
        )
        self._group: Any = ProcessGroupGloo(PrefixStore("weights", self._store), rank, info.world_size, _TIMEOUT)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the tensor of every process with that of rank 0."""
        self._group.broadcast([tensor], BroadcastOptions()).wait()

    def destroy(self) -> None:
        """Leave the group."""
        del self._group, self._store


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):  # type: ignore[misc]  # vLLM's classes have no types here
    """How the trainer introduces itself."""

    backend: ClassVar[str] = "gloo"
    packed: bool = False


class GlooWorkerEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's end."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = GlooGroup(init_info, rank)

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


class GlooTrainerEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> "GlooTrainerEngine":
        """Open the group while vLLM joins it."""
        engine = cls(client=client, source=source, packed=False)
        worker_info = NCCLWeightTransferInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(client.init_weight_transfer_engine, worker_init_payload(worker_info))
            engine.model_update_group = GlooGroup(init_info, rank=0)
            joining.result()
        return engine

    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous())

    def _post_send_sync(self) -> None:
        """Nothing is left to wait for: gloo's broadcast has waited."""


WeightTransferEngineFactory.register_engine("gloo", GlooWorkerEngine)
WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerEngine)
