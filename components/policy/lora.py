"""LoRA (arXiv 2106.09685): the model's weights stay as they are, and small matrices beside them are trained.

An adapted layer computes (W + alpha / rank B A) x. B is zero at first, so a model with new adapters is the model.

Shape suffixes: O  outputs of a layer, I  its inputs, R  rank
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.config import ALL_LINEAR, LoraConfig
from components.shared.errors import PipelineError

_ADAPTER = "default"
"""What PEFT calls an adapter that is the only one."""


def add_adapters(model: PreTrainedModel, config: LoraConfig | None, *, seed: int) -> None:
    """Put new adapters into layers of the model, and freeze all else; without a config the model stays as it is.

    The model keeps its class, and its other layers their names. The adapters depend on the seed alone: they are the
    same in every process.
    """
    if config is None:
        return
    import peft  # takes half a second

    layers = _chosen_layers(model, config.targets)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=layers, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # they are drawn on the CPU, wherever the model is
        peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)


def _chosen_layers(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The whole names of the layers that `targets` name by their last part."""
    # Of the output layer training takes the weight alone: an adapter beside it would never run.
    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    if list(targets) == [ALL_LINEAR]:
        return linear
    there = list(dict.fromkeys(map(_last_part, linear)))
    for target in targets:
        if target not in there:
            raise PipelineError(
                f"engine.lora.targets: {type(model).__name__} has no layer `{target}` to adapt; "
                f"accepted: {', '.join(there)}, or {ALL_LINEAR} for all of them"
            )
    return [name for name in linear if _last_part(name) in targets]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def merged_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of the model without adapters, under its own names; what they add is added to the weights.

    The model is not changed. Sums are new tensors, in the memory of the host: on the model's device there may be no
    room for them.
    """
    kept = model.state_dict()
    return {name: tensor if name in kept else tensor.cpu() for name, tensor in _plain_tensors(model)}


@torch.no_grad()
def copy_merged_weights(model: PreTrainedModel, *, to: PreTrainedModel) -> None:
    """Give a model without adapters the weights of one that may have some, in the same way but one by one."""
    for (name, tensor), (own_name, own) in zip(_plain_tensors(model), to.state_dict().items(), strict=True):
        assert name == own_name
        own.copy_(tensor)


def _plain_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        layer, base, own_name = name.partition(".base_layer.")
        if own_name == "weight":
            yield f"{layer}.weight", _sum(model.get_submodule(layer), tensor)
        elif base:
            yield f"{layer}.{own_name}", tensor
        elif ".lora_" not in name:
            yield name, tensor


@torch.no_grad()
def _sum(layer: Any, weight_OI: Tensor) -> Tensor:
    """Return W + alpha / rank B A, rounded only at its end."""
    precise = torch.promote_types(weight_OI.dtype, torch.float32)
    b_OR, a_RI = (matrices[_ADAPTER].weight.to(precise) for matrices in (layer.lora_B, layer.lora_A))
    return torch.addmm(weight_OI.to(precise), b_OR, a_RI, alpha=layer.scaling[_ADAPTER]).to(weight_OI.dtype)
