"""LoRA (arXiv 2106.09685): the weights of the model are frozen, and pairs of small matrices are trained.

An adapted layer computes (W + alpha / rank B A) x. B is zero at first, so new adapters do not change the model.

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
"""PEFT's name for a single adapter."""
SAVED_PREFIX = "base_model.model."
"""Prefix of the names of layers in PEFT's adapter files."""


def add_adapters(model: PreTrainedModel, config: LoraConfig | None, *, seed: int) -> None:
    """Add new adapters to the model, and freeze all other weights; do nothing without a config.

    The class of the model and the names of its other layers stay the same. The adapters depend on the seed alone, so
    they are the same in every process.
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
    has_all_layers = config.targets == [ALL_LINEAR]
    targets = [path for path, name in layers.items() if has_all_layers or name in config.targets]
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # PEFT draws the adapters on the CPU, also for a model on a GPU
        peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)


def with_named_targets(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Return the config with the names of the model's layers instead of `all-linear`."""
    if config.targets != [ALL_LINEAR]:
        return config
    names = list(dict.fromkeys(_linear_layers(model).values()))
    return config.model_copy(update={"targets": names})


def _linear_layers(model: PreTrainedModel) -> dict[str, str]:
    """Return the path of each layer that can have adapters, with its name in a block: the last part of the path."""
    # Not the output layer (`score` in a classifier): training reads only its weight, so an adapter would never run.
    head = getattr(model, "score", None) or model.get_output_embeddings()
    paths = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    return {path: path.rpartition(".")[2] for path in paths}


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Make the model compute without its adapters in the block, bit for bit as before they were added."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    scalings = [layer.scaling[_ADAPTER] for layer in layers]
    # Not PEFT's switch: it would skip modules whose order ZeRO 3 has recorded, and change `requires_grad`.
    for layer in layers:
        layer.scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[_ADAPTER] = scaling


def merged_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of the model with its adapters merged into the weights, under the names without adapters.

    The model is not changed. Merged weights are new tensors in host memory, as the device may have no room for them.
    """
    unmerged = model.state_dict()
    return {name: tensor if name in unmerged else tensor.cpu() for name, tensor in _merged_tensors(model)}


@torch.no_grad()
def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write adapters for PEFT and vLLM: with B times alpha / rank and alpha = rank, so that loaders do not scale."""
    layers: dict[str, Any] = {path: layer for path, layer in model.named_modules() if hasattr(layer, "lora_A")}
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        b_OR = layer.lora_B[_ADAPTER].weight * layer.scaling[_ADAPTER]
        tensors[f"{SAVED_PREFIX}{path}.lora_A.weight"] = layer.lora_A[_ADAPTER].weight.detach().contiguous()
        tensors[f"{SAVED_PREFIX}{path}.lora_B.weight"] = b_OR.contiguous()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({path.rpartition(".")[2] for path in layers})
    rank = next(iter(layers.values())).r[_ADAPTER]  # all layers have the same
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    jsonl.write_json(folder / "adapter_config.json", settings)


@torch.no_grad()
def copy_merged_weights(model: PreTrainedModel, *, to: PreTrainedModel) -> None:
    """Copy the weights of a model, adapters merged, into one without adapters, one tensor at a time."""
    for (name, tensor), (target_name, target) in zip(_merged_tensors(model), to.state_dict().items(), strict=True):
        assert name == target_name
        target.copy_(tensor)


def _merged_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model, dequantised and with adapters merged, by their names without adapters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if ".weight." in name or ".lora_" in name:  # quantisation constants, or adapters
            continue
        weight = tensor
        quantisation = getattr(parameters.get(name), "quant_state", None)
        if quantisation is not None:
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(tensor, quantisation)  # to its original type, as the model computes with it
        # PEFT names the tensors of an adapted layer LAYER.base_layer.weight and LAYER.base_layer.bias.
        layer, _, tensor_name = name.partition(".base_layer.")
        if tensor_name == "weight":
            weight = _merged(model.get_submodule(layer), weight)
        yield name.replace(".base_layer.", "."), weight


@torch.no_grad()
def _merged(layer: Any, weight_OI: Tensor) -> Tensor:
    """Return W + alpha / rank B A, computed in float32 at least and rounded once to the type of W."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    b_OR, a_RI = (matrices[_ADAPTER].weight.to(dtype) for matrices in (layer.lora_B, layer.lora_A))
    return torch.addmm(weight_OI.to(dtype), b_OR, a_RI, alpha=layer.scaling[_ADAPTER]).to(weight_OI.dtype)
