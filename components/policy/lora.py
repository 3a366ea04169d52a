"""LoRA (arXiv 2106.09685): the model's weights stay as they are, and small matrices beside them are trained.

An adapted layer computes (W + alpha / rank B A) x. B is zero at first, so a model with new adapters is the model.

Shape suffixes: O  outputs of a layer, I  its inputs, R  rank
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.config import ALL_LINEAR, LoraConfig
from components.shared import jsonl
from components.shared.errors import PipelineError

_ADAPTER = "default"
"""The name that PEFT gives to an only adapter."""
SAVED_PREFIX = "base_model.model."
"""Before the names of layers in a folder of adapters."""


def add_adapters(model: PreTrainedModel, config: LoraConfig | None, *, seed: int) -> None:
    """Add new adapters to the model, and freeze all other weights; do nothing without a config.

    The model keeps its class, and its other layers their names. The adapters depend on the seed alone, so they are the
    same in every process.
    """
    if config is None:
        return
    import peft  # takes half a second

    layers = _linear_layers(model)
    unknown = [target for target in config.targets if target not in (*layers.values(), ALL_LINEAR)]
    if unknown:
        raise PipelineError(
            f"engine.lora.targets: {type(model).__name__} has no layer `{unknown[0]}` to adapt; "
            f"accepted: {', '.join(dict.fromkeys(layers.values()))}, or {ALL_LINEAR} for all of them"
        )
    targets = [name for name, own in layers.items() if own in config.targets or config.targets == [ALL_LINEAR]]
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # they are drawn on the CPU, wherever the model is
        peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)


def with_named_targets(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Return the config with the names of the model's layers in place of `all-linear`."""
    names = list(dict.fromkeys(_linear_layers(model).values()))
    return config.model_copy(update={"targets": names}) if config.targets == [ALL_LINEAR] else config


def _linear_layers(model: PreTrainedModel) -> dict[str, str]:
    """Return the layers that can have adapters: their own name by the full one."""
    # Training uses only the weight of the output layer: an adapter beside it would never run.
    head = getattr(model, "score", None) or model.get_output_embeddings()  # of a classifier, or of a language model
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    return {name: name.rpartition(".")[2] for name in linear}


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Have the model compute with its own weights alone, to the last bit, while the block runs."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    scalings = [layer.scaling[_ADAPTER] for layer in layers]
    # PEFT's own switch would leave layers out, whose order ZeRO 3 records, and change what DeepSpeed finds trainable.
    for layer in layers:
        layer.scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[_ADAPTER] = scaling


def merged_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of the model with its adapters merged into the weights, under the names of the plain model.

    The model is not changed. Merged weights are new tensors in the memory of the host: on the model's device there may
    be no room for them.
    """
    unmerged = model.state_dict()
    return {name: tensor if name in unmerged else tensor.cpu() for name, tensor in _merged_tensors(model)}


@torch.no_grad()
def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters into a folder that PEFT and vLLM load.

    Its alpha is the rank: B is saved times alpha / rank, so that a loader has nothing to scale.
    """
    layers: list[tuple[str, Any]] = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
    tensors: dict[str, Tensor] = {}
    for name, layer in layers:
        a_RI, b_OR = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight * layer.scaling[_ADAPTER]
        tensors[f"{SAVED_PREFIX}{name}.lora_A.weight"] = a_RI.detach().contiguous()
        tensors[f"{SAVED_PREFIX}{name}.lora_B.weight"] = b_OR.contiguous()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets, rank = sorted({name.rpartition(".")[2] for name, _ in layers}), layers[0][1].r[_ADAPTER]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    jsonl.write_json(folder / "adapter_config.json", settings)


@torch.no_grad()
def copy_merged_weights(model: PreTrainedModel, *, to: PreTrainedModel) -> None:
    """Copy the weights of a model, adapters merged, into one without adapters, one tensor at a time."""
    for (name, tensor), (own_name, own) in zip(_merged_tensors(model), to.state_dict().items(), strict=True):
        assert name == own_name
        own.copy_(tensor)


def _merged_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        layer, base, own_name = name.partition(".base_layer.")
        if ".weight." in name:  # how a quantised weight was rounded
            continue
        weight = _full_weight(parameters.get(name, tensor), tensor)
        if own_name == "weight":
            yield f"{layer}.weight", _merged(model.get_submodule(layer), weight)
        elif base:
            yield f"{layer}.{own_name}", tensor
        elif ".lora_" not in name:
            yield name, weight


def _full_weight(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a weight as the model computes with it: a quantised one in the type that it had before."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    full: Tensor = dequantize_4bit(tensor, state)
    return full


@torch.no_grad()
def _merged(layer: Any, weight_OI: Tensor) -> Tensor:
    """Return W + alpha / rank B A, rounded once."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    b_OR, a_RI = (matrices[_ADAPTER].weight.to(dtype) for matrices in (layer.lora_B, layer.lora_A))
    return torch.addmm(weight_OI.to(dtype), b_OR, a_RI, alpha=layer.scaling[_ADAPTER]).to(weight_OI.dtype)
