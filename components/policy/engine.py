"""Training through DeepSpeed: gradients of a whole optimizer step, then the step itself.

The loss of a micro-batch is its part of a sum over the whole optimizer step, so gradients do not depend on the split.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from components.policy.config import EngineConfig
from components.policy.optimizer_state import OptimizerState, load_parameters, trained
from components.policy.output_layer import TeacherTerm, TokenLogprobs, TokenLoss
from components.policy.packing import MicroBatch
from components.policy.parallel import init_ranks, set_group_timeouts
from components.shared.errors import PipelineError
from components.shared.imports import without_packages

_MAX_BUCKET_SIZE = 500_000_000
"""Elements that DeepSpeed reduces or gathers at once (its own default)."""
_Batch = TypeVar("_Batch")
_Output = TypeVar("_Output")


class NonFiniteError(PipelineError):
    """The loss or its gradient is not finite."""


class _Recomputed:
    """Mixin for the class of a layer: its activations are not stored, but recomputed in the backward pass."""

    recomputes = True

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        forward: Any = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def recompute_layers(model: nn.Module) -> None:
    """Make the layers of a transformers model recompute activations; by itself it does so only in training mode."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        problem = "the layers of this model cannot be recomputed; set it to false"
        raise PipelineError(f"engine.gradient_checkpointing: {problem}")
    for layer in layers:
        if not isinstance(layer, _Recomputed):  # else it is done already
            layer.__class__ = type(type(layer).__name__, (_Recomputed, type(layer)), {})


class Engine(Generic[_Batch, _Output]):
    """A model in training: computes the outputs of micro-batches, accumulates gradients, and updates the weights.

    Under ZeRO 2 and 3 processes wait for one another in each pass, so all need the same number of passes.
    """

    def __init__(self, model: nn.Module, config: EngineConfig, saved: Path | None = None) -> None:
        """Train a module that contains a transformers model, from the `state` in the file `saved` if there is one.

        A state has only the trained parameters, so adapters and frozen weights must already be in place. PipelineError
        if it is of another model.
        """
        if saved:
            load_parameters(model, saved)
        # In training mode, dropout or noise would give other log-probabilities than in sampling.
        model.eval()
        if config.gradient_checkpointing:
            recompute_layers(model)
        self.ranks = init_ranks(config)
        self.config = config
        # For a single process, stages 1 and 2 serve only bf16 weights and offloading.
        needs_zero = config.precision == "bf16" or config.offload != "none" or config.zero_stage == 3
        self._zero_stage = config.zero_stage if needs_zero or self.ranks.world_size > 1 else 0
        self._loss, self._norm = 0.0, math.nan
        parameters = [parameter for _, parameter in trained(model)]
        self._engine, self._optimizer, _, _ = import_deepspeed().initialize(
            model=model,
            model_parameters=[
                {"params": [each for each in parameters if each.dim() > 1], "weight_decay": config.weight_decay},
                {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},  # biases, norms
            ],
            config=_deepspeed_config(model, config, self._zero_stage),
        )
        set_group_timeouts()
        if self._zero_stage == 0:
            # Without ZeRO, DeepSpeed clips but does not report the norm, so the gradient is clipped here.
            self._optimizer.register_step_pre_hook(self._clip_gradient)
            # A single process would copy all gradients to average them over itself.
            self._engine.enable_backward_allreduce = self.ranks.world_size > 1
        self._state = OptimizerState(self._engine.module, self._optimizer, self._zero_stage, self.ranks)
        if saved:
            self._state.load(saved)

    def __call__(self, batch: _Batch) -> _Output:
        """Return the model's output for a micro-batch, with gradients if they are enabled."""
        output: _Output = self._engine(batch)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's part of the loss, which is summed over micro-batches and processes."""
        self._loss += loss.item()
        # DeepSpeed averages over processes; the factor makes it a sum.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Update the weights with the accumulated gradient; return the metrics of the step.

        NonFiniteError if the loss is not finite, before the update, or if the norm of the gradient is not, which is
        known only after the update: the weights must not be saved then.
        """
        # The loss of all processes, so that they stop together or not at all.
        loss = sum(self.ranks.all_gather(self._loss, "the end of the backward pass"))
        self._loss = 0.0
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}; stopped before the optimizer step")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()  # None without ZeRO
        gradient_norm = self._norm if norm is None else float(norm)
        if not math.isfinite(gradient_norm):
            raise NonFiniteError(f"the norm of the gradient is {gradient_norm}, though the loss is {loss:.4g}")
        return {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": learning_rate}

    @contextmanager
    def gather_full_parameters(self, *, only_trained: bool = False) -> Iterator[None]:
        """Gather the full weights in every process for the block, such as to save them: ZeRO 3 keeps only shards."""
        from deepspeed.runtime.zero import GatheredParameters

        gathered = [each for each in self._engine.module.parameters() if each.requires_grad or not only_trained]
        with GatheredParameters(gathered, enabled=self._zero_stage == 3):
            yield

    def state(self) -> dict[str, Tensor]:
        """Return the full trained weights and optimizer state (optimizer_state.py); all processes call it together."""
        return self._state.full()

    def load_weights(self, file: Path) -> None:
        """Set the weights to those of a saved `state`, within `gather_full_parameters`; keep the optimizer state."""
        load_parameters(self._engine.module, file)

    def _clip_gradient(self, *_: object) -> None:
        """Clip the gradient to `max_gradient_norm`, and store its norm before."""
        parameters = [each for _, each in trained(self._engine.module)]
        for parameter in parameters:
            # Parameters without a gradient, such as those for images, get an optimizer state too, as under ZeRO.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        self._norm = float(norm)
        if not self._norm <= self.config.max_gradient_norm:  # not `>`, which NaN would pass
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_gradient_norm, norm)


class Policy(Engine[MicroBatch, TokenLogprobs]):
    """A language model in training."""

    def learn(
        self, batch: MicroBatch, token_loss: TokenLoss, *, is_sum: bool = True, term: TeacherTerm | None = None
    ) -> None:
        """Add the gradient of a micro-batch's part of the loss: see `LogprobModel.forward` for the arguments."""
        self.backward(self._engine(batch, token_loss, is_sum=is_sum, term=term))


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the type of weights and activations."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def import_deepspeed() -> Any:
    """Import DeepSpeed so that it compiles nothing and logs only errors."""
    with without_packages("mlflow"):  # which only DeepSpeed's autotuner uses; with PyArrow it takes a second and 130 MB
        import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Shared-memory collectives for CPUs are compiled when first used: gloo needs no compiler on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_config(model: nn.Module, config: EngineConfig, zero_stage: int) -> dict[str, Any]:
    """Return the configuration with which DeepSpeed trains the model."""
    # Buffers are no larger than the model: DeepSpeed allocates each at this size, a gigabyte by default.
    bucket_size = min(sum(parameter.numel() for _, parameter in trained(model)), _MAX_BUCKET_SIZE)
    offloaded = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    return {
        # DeepSpeed insists on a batch size; micro-batches here are counted in tokens.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        # Without ZeRO, Engine clips the gradient.
        "gradient_clipping": config.max_gradient_norm if zero_stage else 0.0,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": bucket_size,
            "allgather_bucket_size": bucket_size,
            **{part: {"device": "cpu"} for part in offloaded[config.offload]},
        },
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU optimizer would have to be compiled on the machine
        "bf16": {"enabled": config.precision == "bf16"},
        # Sum micro-batches in fp32 even for bf16 weights: rounding would lose the gradients of many small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.0,  # set by each step
                "betas": list(config.betas),
                "eps": config.epsilon,
                "torch_adam": True,
                # One pass over the weights instead of ten; on GPUs torch's default is fast.
                **({"fused": True} if next(model.parameters()).device.type == "cpu" else {}),
            },
        },
    }
