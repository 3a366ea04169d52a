"""LoRA (arXiv 2106.09685): the model's weights stay as they are, and small matrices beside them are trained.

An adapted layer computes (W + alpha / rank B A) x. B is zero at first, so a model with new adapters is the model.

Shape suffixes: O  outputs of a layer, I  its inputs, R  rank
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.config import ALL_LINEAR, LoraConfig
from components.shared.errors import PipelineError

_ADAPTER = "default"
"""The name that PEFT gives to an only adapter."""


def add_adapters(model: PreTrainedModel, config: LoraConfig | None, *, seed: int) -> None:
    """Add new adapters to the model, and freeze all other weights; do nothing without a config.

    The model keeps its class, and its other layers their names. The adapters depend on the seed alone, so they are the
    same in every process.
    """
    if config is None:
        return
    import peft  # takes half a second

    # Training uses only the weight of the output layer: an adapter beside it would never run.
    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    layers = {name: name.rpartition(".")[2] for name in linear}
    unknown = [target for target in config.targets if target not in (*layers.values(), ALL_LINEAR)]
    if unknown:
        raise PipelineError(
            f"engine.lora.targets: {type(model).__name__} has no layer `{unknown[0]}` to adapt; "
            f"accepted: {', '.join(dict.fromkeys(layers.values()))}, or {ALL_LINEAR} for all of them"
        )
    targets = linear if config.targets == [ALL_LINEAR] else [name for name in linear if layers[name] in config.targets]
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # they are drawn on the CPU, wherever the model is
        peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)


def merged_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of the model with its adapters merged into the weights, under the names of the plain model.

    The model is not changed. Merged weights are new tensors in the memory of the host: on the model's device there may
    be no room for them.
    """
    unmerged = model.state_dict()
    return {name: tensor if name in unmerged else tensor.cpu() for name, tensor in _merged_tensors(model)}


@torch.no_grad()
def copy_merged_weights(model: PreTrainedModel, *, to: PreTrainedModel) -> None:
    """Copy the weights of a model, adapters merged, into one without adapters, one tensor at a time."""
    for (name, tensor), (own_name, own) in zip(_merged_tensors(model), to.state_dict().items(), strict=True):
        assert name == own_name
        own.copy_(tensor)


def _merged_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        layer, base, own_name = name.partition(".base_layer.")
        if own_name == "weight":
            yield f"{layer}.weight", _merged(model.get_submodule(layer), tensor)
        elif base:
            yield f"{layer}.{own_name}", tensor
        elif ".lora_" not in name:
            yield name, tensor


@torch.no_grad()
def _merged(layer: Any, weight_OI: Tensor) -> Tensor:
    """Return W + alpha / rank B A, rounded once."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    b_OR, a_RI = (matrices[_ADAPTER].weight.to(dtype) for matrices in (layer.lora_B, layer.lora_A))
    return torch.addmm(weight_OI.to(dtype), b_OR, a_RI, alpha=layer.scaling[_ADAPTER]).to(weight_OI.dtype)
