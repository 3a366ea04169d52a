"""The state of an optimizer as whole tensors by the name of their parameter, whatever DeepSpeed has made of it.

So a checkpoint can be gone on from with another number of processes, or another stage of ZeRO. Every function here is
called by all processes together.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from components.shared.errors import PipelineError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUM_STEPS = "num_steps"


class WholeTensors(Mapping[str, Tensor]):
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


def whole_state(module: nn.Module, optimizer: Any, *, zero_stage: int, kept: bool) -> dict[str, Tensor]:
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
def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module that no engine holds yet the weights of `state`; PipelineError where that is of another model."""
    if isinstance(state, WholeTensors):
        _refuse_other(module, state)
    for name, parameter in _trained(module):
        parameter.copy_(state[f"{name}/weight"])


def restore(module: nn.Module, optimizer: Any, state: Mapping[str, Tensor], *, zero_stage: int) -> None:
    """Go on from what `whole_state` returned; the module's weights are set by whoever made it."""
    started = bool(state[_NUM_STEPS])
    if started:
        for kept in _optimised(optimizer, zero_stage):
            moments = {key: torch.zeros_like(kept) for key in _MOMENTS}
            _base(optimizer).state[kept] = {"step": state[_NUM_STEPS].clone(), **moments}
        _link(optimizer, zero_stage)
    for name, parameter in _trained(module):
        for key in ("weight", *_MOMENTS) if started else ("weight",):
            _set(parameter, optimizer, key, state[f"{name}/{key}"], zero_stage)


def _refuse_other(module: nn.Module, state: WholeTensors) -> None:
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
