"""The state that training resumes from: weights and moments of DeepSpeed's optimizer, for any ZeRO stage.

They are full tensors, so that training can be resumed with another number of processes or another ZeRO stage:
`NAME/weight` (fp32, as the optimizer keeps it), `NAME/exp_avg` and `NAME/exp_avg_sq` for each parameter, and
`num_steps`. Before the first step there are no moments.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from components.policy.parallel import Ranks
from components.shared.errors import PipelineError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUM_STEPS = "num_steps"


class OptimizerState:
    """The optimizer state of all processes, which make each call together."""

    def __init__(self, module: nn.Module, optimizer: Any, zero_stage: int, ranks: Ranks) -> None:
        """Take the module that DeepSpeed trains, and the optimizer that it returned for it."""
        self._module, self._optimizer, self._zero_stage, self._ranks = module, optimizer, zero_stage, ranks
        self._base: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        """The torch optimizer that DeepSpeed wraps under ZeRO."""

    def full(self) -> dict[str, Tensor]:
        """Return the full tensors on the CPU in the main process; only `num_steps` in others."""
        # All parameters have taken the same number of steps; before the first one there is no state.
        num_steps = next((float(each["step"]) for each in self._base.state.values()), 0.0)
        if num_steps:
            self._link()
        state: dict[str, Tensor] = {}
        for name, parameter in trained(self._module):
            for key in _keys(num_steps):
                full = self._get(parameter, key)
                if self._ranks.is_main:
                    state[f"{name}/{key}"] = full.detach().to("cpu", torch.float32, copy=True)
        return {**state, _NUM_STEPS: torch.tensor(num_steps)}

    def load(self, file: Path) -> None:
        """Set the optimizer to the full tensors in a file; call `load_parameters` first, which sets the model."""
        with safe_open(file, framework="pt") as saved:
            num_steps = saved.get_tensor(_NUM_STEPS)
            if num_steps:
                groups = [group["params"] for group in self._base.param_groups]
                if self._zero_stage == 3:  # the optimizer has this process's part of all parameters as flat tensors
                    groups = [self._optimizer.fp32_partitioned_groups_flat]
                # Torch would create the moments in the first step: create them here, and fill them below.
                for tensor in chain(*groups):
                    moments = {key: torch.zeros_like(tensor) for key in _MOMENTS}
                    self._base.state[tensor] = {"step": num_steps.clone(), **moments}
                self._link()
            for name, parameter in trained(self._module):
                for key in _keys(num_steps):
                    self._set(parameter, key, saved.get_tensor(f"{name}/{key}"))

    def _link(self) -> None:
        """Make DeepSpeed find all optimizer state; by itself it looks only once, when only the first group has any."""
        if self._zero_stage in (1, 2):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _get(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return the full weight or moment of a parameter."""
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
        """Set the weight or moment of a parameter, of which this process may keep a part."""
        from deepspeed import utils

        if self._zero_stage == 0:
            if key != "weight":  # without ZeRO there is no other copy of the weights, which `load_parameters` has set
                self._optimizer.state[parameter][key].copy_(value)
        elif self._zero_stage == 3:
            # A parameter is cut into equal parts, one for each process; the last one is padded with zeros.
            size = parameter.ds_tensor.numel()
            part = value.flatten()[size * self._ranks.rank : size * (self._ranks.rank + 1)]
            part = nn.functional.pad(part, (0, size - part.numel()))
            if key == "weight":
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, key)
        elif key == "weight":
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)


@torch.no_grad()
def load_parameters(module: nn.Module, file: Path) -> None:
    """Set the trained weights of a module to those of a saved state; PipelineError if that is of another model."""
    with safe_open(file, framework="pt") as saved:
        names = set(saved.keys())
        keys = _keys(has_moments=any(name.endswith(_MOMENTS) for name in names))
        shapes = {f"{name}/{key}": list(parameter.shape) for name, parameter in trained(module) for key in keys}
        differing = sorted({*shapes, _NUM_STEPS} ^ names)
        if differing:
            has = "has" if differing[0] in names else "lacks"
            raise PipelineError(f"{file}: {has} the tensor `{differing[0]}`, so it is of another model")
        for name, shape in shapes.items():
            saved_shape = saved.get_slice(name).get_shape()
            if saved_shape != shape:
                sizes = ["x".join(map(str, each)) for each in (saved_shape, shape)]
                raise PipelineError(f"{file}: the tensor `{name}` is {sizes[0]}, where the model's is {sizes[1]}")
        for name, parameter in trained(module):
            parameter.copy_(saved.get_tensor(f"{name}/weight"))


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module that are trained, with their names."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _keys(has_moments: object) -> tuple[str, ...]:
    """Return the keys of the tensors that are saved for each parameter."""
    return ("weight", *_MOMENTS) if has_moments else ("weight",)
