"""Training through DeepSpeed: gradients of a whole optimizer step, then the step itself.

The loss of a micro-batch is its part of a sum over the whole optimizer step: whoever computes it has divided by counts
of that step already, so gradients do not depend on the split into micro-batches.
"""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from components.policy.config import EngineConfig
from components.policy.logprobs import CompletionScorer, TokenScores
from components.policy.optimizer_state import restore, whole_state
from components.policy.ranks import join, limit_waits
from components.policy.sequences import MicroBatch
from components.shared.errors import PipelineError

_MAX_BUCKET_SIZE = 500_000_000
"""Elements that DeepSpeed reduces or gathers at once (its own default)."""


def dtype_of(config: EngineConfig) -> torch.dtype:
    """Return the torch type of weights and activations."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


class NonFiniteError(PipelineError):
    """The loss or its gradient is not a number."""


def quiet_deepspeed() -> Any:
    """Return DeepSpeed, which neither compiles anything nor says what no reader of a training log needs."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Shared-memory collectives for CPUs are compiled when first used: gloo needs no compiler on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class PolicyEngine:
    """A model under training."""

    def __init__(self, scorer: CompletionScorer, config: EngineConfig) -> None:
        if config.gradient_checkpointing:
            scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
            scorer.train()  # models checkpoint in training mode only; of dropout there is none
        self.ranks = join(config)
        deepspeed = quiet_deepspeed()
        self.config = config
        self._loss = 0.0
        self._clipped_norm = math.nan
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=scorer,
            model_parameters=_parameter_groups(scorer, config.weight_decay),
            config=_deepspeed(scorer, config),
        )
        limit_waits()
        if config.zero_stage == 0:
            # Without sharding DeepSpeed clips but does not say the norm: the same is done here, keeping it.
            self._optimizer.register_step_pre_hook(lambda *_: self._clip(scorer))

    def __call__(self, batch: MicroBatch) -> TokenScores:
        """Return the current policy's scores of a micro-batch, with gradients where they are enabled."""
        scores: TokenScores = self._engine(batch)
        return scores

    def accumulate(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's part of the loss, which is summed over micro-batches and processes.

        Where gradients are sharded (ZeRO 2 and 3) processes wait for one another here: all have to accumulate equally
        often.
        """
        self._loss += loss.item()
        # DeepSpeed averages over processes.
        self._engine.backward(loss * self.ranks.size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Update the weights from what was accumulated; a loss that is not finite stops before anything changes.

        The norm of the gradient is known only with the step: where that is not finite, the run stops right after it,
        and nothing of it is saved.
        """
        # The sum over all processes, so that they stop together or not at all.
        loss, self._loss = sum(self.ranks.gather(self._loss, "the end of the backward pass")), 0.0
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}; stopped before the optimizer step")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        gradient_norm = self._clipped_norm if norm is None else float(norm)
        if not math.isfinite(gradient_norm):
            raise NonFiniteError(f"the norm of the gradient is {gradient_norm}, though the loss is {loss:.4g}")
        return {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": learning_rate}

    def state(self) -> dict[str, Tensor]:
        """Return all that further steps depend on, as whole tensors on the CPU; nothing but in the first process.

        Called by all processes together (see optimizer_state.py).
        """
        stage = self.config.zero_stage
        return whole_state(self._engine.module, self._optimizer, zero_stage=stage, kept=self.ranks.first)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`, which may be of another number of processes; the model has its weights already."""
        restore(self._engine.module, self._optimizer, state, zero_stage=self.config.zero_stage)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Have every weight whole in this process while the block runs, as for saving: ZeRO 3 keeps only shards."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self._engine.module.parameters()), enabled=self.config.zero_stage == 3):
            yield

    def _clip(self, scorer: CompletionScorer) -> None:
        norm = torch.nn.utils.clip_grad_norm_(scorer.parameters(), self.config.max_gradient_norm)
        self._clipped_norm = float(norm)


def _parameter_groups(scorer: CompletionScorer, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def _offload(config: EngineConfig) -> dict[str, Any]:
    """What is kept in the memory of the host."""
    parts = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    return {part: {"device": "cpu"} for part in parts[config.offload]}


def _deepspeed(scorer: CompletionScorer, config: EngineConfig) -> dict[str, Any]:
    num_trained = sum(parameter.numel() for parameter in scorer.parameters() if parameter.requires_grad)
    return {
        # DeepSpeed insists on a batch size; micro-batches here are counted in tokens.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_gradient_norm if config.zero_stage else 0.0,
        # Buffers no larger than the model: by default a gigabyte is set aside for each, whatever its size.
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": min(num_trained, _MAX_BUCKET_SIZE),
            "allgather_bucket_size": min(num_trained, _MAX_BUCKET_SIZE),
            **_offload(config),
        },
        "zero_force_ds_cpu_optimizer": False,  # its own optimizer for the host has to be compiled there
        "bf16": {"enabled": config.precision == "bf16"},
        # Micro-batches are summed in fp32 whatever the weights are, or many small ones would be lost in rounding.
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "betas": [0.9, 0.95], "torch_adam": True}},
    }
