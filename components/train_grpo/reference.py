"""The reference of the KL penalty, and the placement of its weights."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.policy.engine import Policy, import_deepspeed
from components.policy.logprobs import LogprobModel
from components.policy.lora import adapters_disabled
from components.policy.output_layer import TokenLogprobs
from components.policy.packing import MicroBatch
from components.policy.parallel import set_group_timeouts
from components.train_grpo.config import ReferencePlacement


class Reference:
    """A frozen copy of a model. If its weights are sharded, all processes make each call together."""

    def __init__(self, model: PreTrainedModel, placement: ReferencePlacement, *, temperature: float) -> None:
        """Copy a model whose weights are not sharded, after the process group was initialised."""
        self._placement = placement
        self._is_replaced = False
        self._device = model.device
        scorer = LogprobModel(copy.deepcopy(model), temperature=temperature, with_entropy=False)
        self.scorer = scorer.requires_grad_(False)
        """The frozen model."""
        self._score: Any = _sharded(self.scorer) if placement == "sharded" else self.scorer
        if placement == "offloaded":
            self.scorer.to("cpu")

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the reference's scores of a micro-batch."""
        scores: TokenLogprobs = self._score(batch)
        return scores

    @contextmanager
    def onloaded(self) -> Iterator["Reference"]:
        """Move offloaded weights to the device of the model while the block runs."""
        if self._placement != "offloaded":
            yield self
            return
        self.scorer.to(self._device)
        try:
            yield self
        finally:
            self.scorer.to("cpu")

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights by `weights`, which are not sharded."""
        with self._gathered(keep_changes=True):
            self.scorer.model.load_state_dict(weights)
        self._is_replaced = True

    def state(self, *, main: bool) -> dict[str, Tensor] | None:
        """Return the weights on the CPU for a checkpoint, {} if not `main`; None if `load` never replaced them."""
        if not self._is_replaced:
            return None
        with self._gathered(keep_changes=False):
            weights = self.scorer.model.state_dict() if main else {}
            return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}

    def _gathered(self, *, keep_changes: bool) -> AbstractContextManager[None]:
        """Gather sharded weights in every process while the block runs; changes are kept only with `keep_changes`."""
        from deepspeed.runtime.zero import GatheredParameters

        parameters, enabled = list(self.scorer.parameters()), self._placement == "sharded"
        gathered: AbstractContextManager[None] = GatheredParameters(
            parameters, modifier_rank=0 if keep_changes else None, enabled=enabled
        )
        return gathered


class AdapterReference:
    """The policy with its adapters disabled: a `Reference` without extra memory, if only adapters are trained."""

    def __init__(self, policy: Policy, model: PreTrainedModel) -> None:
        """Take the model that `policy` trains."""
        self._policy, self._model = policy, model

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        """See `Reference`."""
        with adapters_disabled(self._model):
            return self._policy(batch)

    def onloaded(self) -> AbstractContextManager["AdapterReference"]:
        """Do nothing; see `Reference`."""
        return nullcontext(self)

    def state(self, *, main: bool) -> None:
        """Return None: the base weights never change."""


def _sharded(scorer: LogprobModel) -> Any:
    """Return DeepSpeed's engine around a frozen module; it shards the weights over the processes."""
    is_bf16 = scorer.model.dtype == torch.bfloat16
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": is_bf16}}
    engine, *_ = import_deepspeed().initialize(model=scorer, config=config)
    set_group_timeouts()
    return engine
