"""Training through DeepSpeed: gradients of a whole optimizer step, then the step itself, and the state to resume from.

The loss of a micro-batch is its part of a sum over the whole optimizer step, so gradients do not depend on the split.
The state consists of full tensors by the name of their parameter, so that training can be resumed with another number
of processes, or another stage of ZeRO.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from components.policy.config import EngineConfig
from components.policy.logprobs import TeacherTerm, TokenLogprobs, TokenLoss
from components.policy.packing import MicroBatch
from components.policy.parallel import init_ranks, set_group_timeouts
from components.shared.errors import PipelineError
from components.shared.imports import without_packages

_MAX_BUCKET_SIZE = 500_000_000
"""Elements that DeepSpeed reduces or gathers at once (its own default)."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUM_STEPS = "num_steps"
_Batch = TypeVar("_Batch")
_Output = TypeVar("_Output")


class NonFiniteError(PipelineError):
    """The loss or its gradient is not finite."""


class _Recomputed:
    """Mixed into the class of a layer: its activations are computed again in the backward pass, and not kept."""

    recomputes = True

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        forward: Any = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def recompute_layers(model: nn.Module) -> None:
    """Have the layers of a transformers model recompute; its own checkpointing does so in training mode alone."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        problem = "the layers of this model cannot be recomputed; set it to false"
        raise PipelineError(f"engine.gradient_checkpointing: {problem}")
    for layer in layers:
        if not isinstance(layer, _Recomputed):
            layer.__class__ = type(type(layer).__name__, (_Recomputed, type(layer)), {})


class Engine(Generic[_Batch, _Output]):
    """A model under training, which turns a micro-batch into what the loss is computed from.

    Under ZeRO 2 and 3 processes wait for one another in each pass: all have to make as many.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        """Take over a module around a transformers model; adapters and frozen weights are as they should be already."""
        # Evaluation computes what is trained, whatever a model keeps its dropout, jitter or noise in.
        model.eval()
        if config.gradient_checkpointing:
            recompute_layers(model)
        self.ranks = init_ranks(config)
        self.config = config
        self._zero_stage = _useful_zero_stage(config, self.ranks.world_size)
        self._loss, self._norm = 0.0, math.nan
        parameters = [parameter for _, parameter in _trained(model)]
        self._engine, self._optimizer, _, _ = import_deepspeed().initialize(
            model=model,
            model_parameters=[
                {"params": [each for each in parameters if each.dim() > 1], "weight_decay": config.weight_decay},
                {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
            ],
            config=_deepspeed_config(model, config, self._zero_stage),
        )
        set_group_timeouts()
        if self._zero_stage == 0:
            # Without sharding DeepSpeed clips but does not return the norm: the same is done here, keeping it.
            self._optimizer.register_step_pre_hook(self._clip_gradient)
            # It would copy all gradients to average them over one process.
            self._engine.enable_backward_allreduce = self.ranks.world_size > 1

    def __call__(self, batch: _Batch) -> _Output:
        """Return what the model computes of a micro-batch, with gradients where they are enabled."""
        output: _Output = self._engine(batch)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's part of the loss, which is summed over micro-batches and processes."""
        self._loss += loss.item()
        # DeepSpeed averages over processes.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Update the weights with the accumulated gradient; return the metrics of the step.

        NonFiniteError where the loss is not finite, before anything changes; or where the norm of the gradient is not,
        which is known only after the step: nothing of it must be saved then.
        """
        # Of all processes, so that they stop together or not at all.
        loss, self._loss = sum(self.ranks.all_gather(self._loss, "the end of the backward pass")), 0.0
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}; stopped before the optimizer step")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        gradient_norm = self._norm if norm is None else float(norm)
        if not math.isfinite(gradient_norm):
            raise NonFiniteError(f"the norm of the gradient is {gradient_norm}, though the loss is {loss:.4g}")
        return {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": learning_rate}

    @contextmanager
    def gather_full_parameters(self, *, only_trained: bool = False) -> Iterator[None]:
        """Hold the full weights in every process while the block runs, as for saving: ZeRO 3 keeps only shards."""
        from deepspeed.runtime.zero import GatheredParameters

        gathered = [each for each in self._engine.module.parameters() if each.requires_grad or not only_trained]
        with GatheredParameters(gathered, enabled=self._zero_stage == 3):
            yield

    def state(self) -> dict[str, Tensor]:
        """Return all that further steps depend on, as full tensors on the CPU, in the main process; nothing in others.

        These are `NAME/weight` (fp32, as the optimizer keeps it), `NAME/exp_avg` and `NAME/exp_avg_sq`, and
        `num_steps`. Before the first step there are no moments. Called by all processes together.
        """
        (num_steps,) = {float(each["step"]) for each in self._base_optimizer.state.values()} or {0.0}
        if num_steps:
            self._link_optimizer_state()
        state: dict[str, Tensor] = {}
        for name, parameter in _trained(self._engine.module):
            for key in _keys(num_steps):
                full = self._full(parameter, key)
                if self.ranks.is_main:
                    state[f"{name}/{key}"] = full.detach().to("cpu", torch.float32, copy=True)
        return {**state, _NUM_STEPS: torch.tensor(num_steps)}

    def load_state(self, file: Path) -> None:
        """Resume from a `state` that was saved in a file; `load_parameters` has set the weights of the model before."""
        with safe_open(file, framework="pt") as saved:
            num_steps = saved.get_tensor(_NUM_STEPS)
            if num_steps:
                groups = [group["params"] for group in self._base_optimizer.param_groups]
                if self._zero_stage == 3:  # it sees this process's part of the parameters, end to end
                    groups = [self._optimizer.fp32_partitioned_groups_flat]
                for tensor in chain(*groups):
                    moments = {key: torch.zeros_like(tensor) for key in _MOMENTS}
                    self._base_optimizer.state[tensor] = {"step": num_steps.clone(), **moments}
                self._link_optimizer_state()
            for name, parameter in _trained(self._engine.module):
                for key in _keys(num_steps):
                    self._set(parameter, key, saved.get_tensor(f"{name}/{key}"))

    def load_weights(self, file: Path) -> None:
        """Set the full weights, which `gather_full_parameters` holds, to a `state`; the optimizer keeps its own."""
        load_parameters(self._engine.module, file)

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed has wrapped."""
        base: torch.optim.Optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
        return base

    def _clip_gradient(self, *_: object) -> None:
        trained = [each for _, each in _trained(self._engine.module)]
        for parameter in trained:
            # Parts of a model that text does not reach have a state in the optimizer too, as with several processes.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None])
        self._norm = float(norm)
        if not self._norm <= self.config.max_gradient_norm:
            torch.nn.utils.clip_grads_with_norm_(trained, self.config.max_gradient_norm, norm)

    def _link_optimizer_state(self) -> None:
        """Have DeepSpeed find each parameter's part of the optimizer's state.

        It does so by itself right after the first step on the first group of parameters, when the others have none yet.
        """
        if self._zero_stage in (1, 2):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _full(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed import utils

        full: Tensor
        if self._zero_stage == 0:
            full = parameter if key == "weight" else self._optimizer.state[parameter][key]
        elif key == "weight":
            full = utils.safe_get_full_fp32_param(parameter)
        else:
            full = utils.safe_get_full_optimizer_state(parameter, key)
        return full

    def _set(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed import utils

        if self._zero_stage == 0:
            if key != "weight":
                self._optimizer.state[parameter][key].copy_(value)
        elif self._zero_stage == 3:
            # Parameters are cut into equal parts, the last of them filled up with zeros.
            size = parameter.ds_tensor.numel()
            part = value.flatten()[size * self.ranks.rank : size * (self.ranks.rank + 1)]
            part = nn.functional.pad(part, (0, size - part.numel()))
            if key == "weight":
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, key)
        elif key == "weight":
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)


class Policy(Engine[MicroBatch, TokenLogprobs]):
    """A language model under training."""

    def learn(
        self, batch: MicroBatch, token_loss: TokenLoss, *, is_sum: bool = True, term: TeacherTerm | None = None
    ) -> None:
        """Add the gradient of a micro-batch's part of the loss, which LogprobModel computes."""
        self.backward(self._engine(batch, token_loss, is_sum=is_sum, term=term))


@torch.no_grad()
def load_parameters(module: nn.Module, file: Path) -> None:
    """Set the full weights of a module to those of a `state`; PipelineError where it is of another model."""
    with safe_open(file, framework="pt") as saved:
        names = set(saved.keys())
        keys = _keys(any(name.endswith(_MOMENTS) for name in names))
        shapes = {f"{name}/{key}": list(parameter.shape) for name, parameter in _trained(module) for key in keys}
        for name in sorted({*shapes, _NUM_STEPS} ^ names):
            has = "has" if name in names else "lacks"
            raise PipelineError(f"{file}: {has} the tensor `{name}`, so it is of another model")
        for name, shape in shapes.items():
            if (saved_shape := saved.get_slice(name).get_shape()) != shape:
                sizes = ["x".join(map(str, each)) for each in (saved_shape, shape)]
                raise PipelineError(f"{file}: the tensor `{name}` is {sizes[0]}, where the model's is {sizes[1]}")
        for name, parameter in _trained(module):
            parameter.copy_(saved.get_tensor(f"{name}/weight"))


def _keys(has_moments: object) -> tuple[str, ...]:
    """Return what is saved of a parameter."""
    return ("weight", *_MOMENTS) if has_moments else ("weight",)


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the type of weights and activations."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def import_deepspeed() -> Any:
    """Return DeepSpeed, set up to compile nothing and to log errors only."""
    with without_packages("mlflow"):  # with PyArrow a second and 130 MB, for DeepSpeed's search for settings
        import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Shared-memory collectives for CPUs are compiled when first used: gloo needs no compiler on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _useful_zero_stage(config: EngineConfig, num_processes: int) -> int:
    """Return the stage of ZeRO; 0 where one process has nothing to shard and its copies of gradients only take time.

    Weights in bf16 need ZeRO for their copy in fp32, and offloading needs it too.
    """
    is_idle = num_processes == 1 and config.precision == "fp32" and config.offload == "none"
    return 0 if is_idle and config.zero_stage < 3 else config.zero_stage


def _deepspeed_config(model: nn.Module, config: EngineConfig, zero_stage: int) -> dict[str, Any]:
    # Buffers no larger than the model: by default a gigabyte is set aside for each, however small the model.
    bucket_size = min(sum(parameter.numel() for _, parameter in _trained(model)), _MAX_BUCKET_SIZE)
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
        "zero_force_ds_cpu_optimizer": False,  # its own optimizer for the host has to be compiled there
        "bf16": {"enabled": config.precision == "bf16"},
        # Micro-batches are summed in fp32 whatever the weights are, or many small ones would be lost in rounding.
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.0,  # set by each step
                "betas": list(config.betas),
                "eps": config.epsilon,
                "torch_adam": True,
                # One pass over the weights in place of ten; torch chooses by itself on GPUs.
                **({"fused": True} if next(model.parameters()).device.type == "cpu" else {}),
            },
        },
    }
