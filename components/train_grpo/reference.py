"""The frozen reference that the policy is tethered to, and where its weights are when nobody asks for them."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.policy.engine import import_deepspeed
from components.policy.logprobs import LogprobModel, TokenLogprobs
from components.policy.packing import MicroBatch
from components.policy.parallel import set_group_timeouts
from components.train_grpo.config import ReferencePlacement


class Reference:
    """A frozen copy of a model. Under `sharded` every call is one that all processes make together."""

    def __init__(self, model: PreTrainedModel, placement: ReferencePlacement, *, temperature: float) -> None:
        """Copy a model whose weights are whole; a process group is there already."""
        self._placement = placement
        self._device = model.device
        self._scorer = LogprobModel(copy.deepcopy(model), temperature=temperature).requires_grad_(False)
        self._score: Any = _sharded(self._scorer) if placement is ReferencePlacement.SHARDED else self._scorer
        if placement is ReferencePlacement.OFFLOADED:
            self._scorer.to("cpu")

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the reference's scores of a micro-batch."""
        scores: TokenLogprobs = self._score(batch)
        return scores

    @contextmanager
    def at_hand(self) -> Iterator["Reference"]:
        """Have the weights where they can be used for as long as the block runs."""
        offloaded = self._placement is ReferencePlacement.OFFLOADED
        if offloaded:
            self._scorer.to(self._device)
        try:
            yield self
        finally:
            if offloaded:
                self._scorer.to("cpu")

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take other weights, whole ones."""
        with self._whole(written=True):
            self._scorer.model.load_state_dict(state)

    def state(self, *, kept: bool) -> dict[str, Tensor]:
        """Return the weights, whole and on the CPU; nothing where they are not `kept`."""
        with self._whole(written=False):
            weights = self._scorer.model.state_dict() if kept else {}
            return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}

    def _whole(self, *, written: bool) -> AbstractContextManager[None]:
        if self._placement is not ReferencePlacement.SHARDED:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        gathered: AbstractContextManager[None] = GatheredParameters(
            list(self._scorer.parameters()), modifier_rank=0 if written else None
        )
        return gathered


def _sharded(scorer: LogprobModel) -> Any:
    """DeepSpeed's engine around a frozen module whose weights are cut up among the processes."""
    engine, *_ = import_deepspeed().initialize(
        model=scorer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": scorer.model.dtype == torch.bfloat16},
        },
    )
    set_group_timeouts()
    return engine
