"""Training through DeepSpeed: gradients of a whole optimizer step, then the step itself.

The loss of a micro-batch is its part of a sum over the whole optimizer step: whoever computes it has divided by counts
of that step already, so gradients do not depend on the split into micro-batches.
"""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from components.policy.config import EngineConfig
from components.policy.logprobs import LogprobModel, TokenLogprobs
from components.policy.packing import MicroBatch
from components.policy.parallel import init_ranks, set_group_timeouts
from components.shared.errors import PipelineError

_MAX_BUCKET_SIZE = 500_000_000
"""Elements that DeepSpeed reduces or gathers at once (its own default)."""


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the torch type of weights and activations."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


class NonFiniteError(PipelineError):
    """The loss or its gradient is not a number."""


def import_deepspeed() -> Any:
    """Return DeepSpeed, which neither compiles anything nor says what no reader of a training log needs."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Shared-memory collectives for CPUs are compiled when first used: gloo needs no compiler on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Policy:
    """A model under training."""

    def __init__(self, scorer: LogprobModel, config: EngineConfig) -> None:
        if config.gradient_checkpointing:
            scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
            scorer.train()  # models checkpoint in training mode only; of dropout there is none
        self.ranks = init_ranks(config)
        deepspeed = import_deepspeed()
        self.config = config
        self._loss = 0.0
        self._clipped_norm = math.nan
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=scorer,
            model_parameters=_parameter_groups(scorer, config.weight_decay),
            config=_deepspeed(scorer, config),
        )
        set_group_timeouts()
        if config.zero_stage == 0:
            # Without sharding DeepSpeed clips but does not say the norm: the same is done here, keeping it.
            self._optimizer.register_step_pre_hook(lambda *_: self._clip(scorer))

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the current policy's scores of a micro-batch, with gradients where they are enabled."""
        scores: TokenLogprobs = self._engine(batch)
        return scores

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's part of the loss, which is summed over micro-batches and processes.

        Where gradients are sharded (ZeRO 2 and 3) processes wait for one another here: all have to accumulate equally
        often.
        """
        self._loss += loss.item()
        # DeepSpeed averages over processes.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Update the weights from what was accumulated; a loss that is not finite stops before anything changes.

        The norm of the gradient is known only with the step: where that is not finite, the run stops right after it,
        and nothing of it is saved.
        """
        # The sum over all processes, so that they stop together or not at all.
        loss, self._loss = sum(self.ranks.all_gather(self._loss, "the end of the backward pass")), 0.0
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
        return _full_state(self._engine.module, self._optimizer, zero_stage=stage, kept=self.ranks.is_main)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`, which may be of another number of processes; the model has its weights already."""
        _load_full_state(self._engine.module, self._optimizer, state, zero_stage=self.config.zero_stage)

    @contextmanager
    def gather_full_parameters(self) -> Iterator[None]:
        """Have every weight whole in this process while the block runs, as for saving: ZeRO 3 keeps only shards."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self._engine.module.parameters()), enabled=self.config.zero_stage == 3):
            yield

    def _clip(self, scorer: LogprobModel) -> None:
        norm = torch.nn.utils.clip_grad_norm_(scorer.parameters(), self.config.max_gradient_norm)
        self._clipped_norm = float(norm)


def _parameter_groups(scorer: LogprobModel, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def _offload(config: EngineConfig) -> dict[str, Any]:
    """What is kept in the memory of the host."""
    parts = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    return {part: {"device": "cpu"} for part in parts[config.offload]}


def _deepspeed(scorer: LogprobModel, config: EngineConfig) -> dict[str, Any]:
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


_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUM_STEPS = "num_steps"


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, read one by one: all at once may be more than there is room for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = safe_open(path, framework="pt")

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read for it."""
        return tuple(self._file.get_slice(name).get_shape())


def _full_state(module: nn.Module, optimizer: Any, *, zero_stage: int, kept: bool) -> dict[str, Tensor]:
    """Return `NAME/weight` (fp32, as the optimizer keeps it), `NAME/exp_avg` and `NAME/exp_avg_sq`, and `num_steps`.

    Before the first step there are no moments.
    A process for which it is not `kept` gives its part, and gets nothing: there is room for the whole in one.
    """
    state: dict[str, Tensor] = {}
    steps = {float(each["step"]) for each in _base(optimizer).state.values()} or {0.0}
    assert len(steps) == 1, f"parameters differ in their number of steps: {steps}"
    started = steps != {0.0}
    if started:
        _link(optimizer, zero_stage)
    for name, parameter in _trained(module):
        for key in ("weight", *_MOMENTS) if started else ("weight",):
            whole = _whole(parameter, optimizer, key, zero_stage)
            if kept:
                state[f"{name}/{key}"] = whole.detach().to("cpu", torch.float32, copy=True)
    return {**state, _NUM_STEPS: torch.tensor(steps.pop())}


@torch.no_grad()
def load_parameters(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module that no engine holds yet the weights of `state`; PipelineError where that is of another model."""
    if isinstance(state, TensorFile):
        _refuse_other(module, state)
    for name, parameter in _trained(module):
        parameter.copy_(state[f"{name}/weight"])


def _load_full_state(module: nn.Module, optimizer: Any, state: Mapping[str, Tensor], *, zero_stage: int) -> None:
    """Go on from what `_full_state` returned; the module's weights are set by whoever made it."""
    started = bool(state[_NUM_STEPS])
    if started:
        for kept in _optimised(optimizer, zero_stage):
            moments = {key: torch.zeros_like(kept) for key in _MOMENTS}
            _base(optimizer).state[kept] = {"step": state[_NUM_STEPS].clone(), **moments}
        _link(optimizer, zero_stage)
    for name, parameter in _trained(module):
        for key in ("weight", *_MOMENTS) if started else ("weight",):
            _set(parameter, optimizer, key, state[f"{name}/{key}"], zero_stage)


def _refuse_other(module: nn.Module, state: TensorFile) -> None:
    """Raise PipelineError unless a file holds the tensors of a module and its optimizer, and no others."""
    keys = ("weight", *_MOMENTS) if any(name.endswith(_MOMENTS) for name in state) else ("weight",)
    shapes = {f"{name}/{key}": tuple(parameter.shape) for name, parameter in _trained(module) for key in keys}
    for name in sorted({*shapes, _NUM_STEPS} ^ set(state)):
        does = "holds" if name in set(state) else "lacks"
        raise PipelineError(f"{state.path}: {does} the tensor `{name}`, so it is of another model")
    for name, shape in shapes.items():
        if state.shape(name) != shape:
            found, expected = ("x".join(map(str, each)) for each in (state.shape(name), shape))
            raise PipelineError(f"{state.path}: the tensor `{name}` is {found}, where the model's is {expected}")


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _base(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed has wrapped."""
    base: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return base


def _link(optimizer: Any, zero_stage: int) -> None:
    """Have DeepSpeed find each parameter's part of the optimizer's state.

    It does so by itself right after the first step on the first group of parameters, when the others have none yet.
    """
    if zero_stage in (1, 2):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _optimised(optimizer: Any, zero_stage: int) -> list[Tensor]:
    """The tensors that the optimizer sees: the parameters, or this process's part of them end to end."""
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return [tensor for group in _base(optimizer).param_groups for tensor in group["params"]]


def _whole(parameter: nn.Parameter, optimizer: Any, key: str, zero_stage: int) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    whole: Tensor
    if zero_stage == 0:
        whole = parameter if key == "weight" else optimizer.state[parameter][key]
    elif key == "weight":
        whole = safe_get_full_fp32_param(parameter)
    else:
        whole = safe_get_full_optimizer_state(parameter, key)
    return whole


def _set(parameter: nn.Parameter, optimizer: Any, key: str, value: Tensor, zero_stage: int) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if zero_stage == 0:
        if key != "weight":
            optimizer.state[parameter][key].copy_(value)
    elif zero_stage == 3:
        _set_partition(parameter, key, value)
    elif key == "weight":
        safe_set_full_fp32_param(parameter, value)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


def _set_partition(parameter: Any, key: str, value: Tensor) -> None:
    """Set this process's part of a parameter that is cut into equal parts, the last of them filled up with zeros."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    part = value.flatten()[start : start + size]
    part = torch.nn.functional.pad(part, (0, size - part.numel()))
    if key == "weight":
        safe_set_local_fp32_param(parameter, part)
    else:
        safe_set_local_optimizer_state(parameter, part, key)
