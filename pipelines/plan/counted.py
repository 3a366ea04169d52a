"""The shape of any transformers model, counted from its tensors on the meta device, where they take no memory.

Such a model is planned in padded rows: whether it accepts packed rows is known only once its weights are loaded. Packed
rows take less time and memory, so the plan is an upper bound.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared.errors import PipelineError
from components.shared.model_shape import ModelShape

if TYPE_CHECKING:  # torch
    from transformers import PreTrainedModel

_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_ACTIVE_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
"""Config keys for the number of experts in a layer, and of experts per token; each family uses one."""
_EXPERTS = ".experts."  # part of the tensor names of routed experts; those of shared experts lack it


@dataclass(frozen=True, kw_only=True)
class CountedShape(ModelShape):
    """A shape with counted weights; its other sizes are those of a Llama with as many active weights."""

    family: str
    sizes: tuple[int, ...]
    """Number of elements of each tensor."""
    matrices: dict[str, tuple[int, int]]
    """Inputs and outputs of the matrices that may have adapters, by name; averages over all layers."""
    all_layer_weights: int
    active_layer_weights: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """See `ModelShape`; averages over the layers."""
        return self.matrices

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers, all experts included."""
        return self.all_layer_weights

    @property
    def active_weights(self) -> int:
        """Elements of these matrices that each token uses: of the routed experts only some."""
        return self.active_layer_weights

    def _sizes(self) -> tuple[int, ...]:
        return self.sizes


def counted_shape(file: Path) -> CountedShape:
    """Return the shape of the model that a config.json describes; PipelineError if transformers cannot build it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(file.parent, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # any model's code may fail, in any way
        raise PipelineError(f"{file}: cannot be planned: {type(error).__name__}: {error}"[:300]) from None
    text_config = config.get_text_config()
    num_layers = getattr(text_config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        raise PipelineError(f"{file}: cannot be planned: {config.model_type} does not say how many layers it has")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary_size, hidden_size = embedding.weight.shape
    num_heads = getattr(text_config, "num_attention_heads", 1)
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    head_size = getattr(text_config, "head_dim", None) or hidden_size // num_heads
    layer_weights, active_weights = _layer_weights(model, text_config)
    # The weights of the MLP in a Llama layer that has as many active weights as a layer of this model.
    mlp_weights = active_weights / num_layers - 2 * hidden_size * head_size * (num_heads + num_kv_heads)
    return CountedShape(
        hidden_size=hidden_size,
        # Such an MLP has three matrices. Layers without attention may have fewer weights than attention would.
        intermediate_size=max(hidden_size, round(mlp_weights / (3 * hidden_size))),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocabulary_size=vocabulary_size,
        tied=head is not None and head.weight is embedding.weight,
        family=config.model_type,
        sizes=tuple(each.numel() for each in model.parameters()),
        matrices=_matrices(model, num_layers),
        all_layer_weights=round(layer_weights),
        active_layer_weights=round(active_weights),
    )


def _layer_weights(model: "PreTrainedModel", config: Any) -> tuple[float, float]:
    """Return the elements of the matrices of all layers, and how many of them each token uses."""
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    outside_layers = {id(module.weight) for module in ends}
    num_experts = _first_int(config, _NUM_EXPERTS_KEYS)  # 0 in a dense model of a family with experts
    active_fraction = _first_int(config, _NUM_ACTIVE_KEYS) / num_experts if num_experts else 1.0
    total = active = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in outside_layers:
            total += parameter.numel()
            active += parameter.numel() * (active_fraction if _EXPERTS in name else 1.0)
    return total, active


def _first_int(config: Any, keys: Sequence[str]) -> int:
    """Return the first integer under these keys of a config; 1 if there is none."""
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int)), 1)


def _matrices(model: "PreTrainedModel", num_layers: int) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear modules in the layers, by their last name, averaged over the layers."""
    from torch import nn

    inputs, outputs = Counter[str](), Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            last_name = name.rpartition(".")[2]
            inputs[last_name] += module.in_features
            outputs[last_name] += module.out_features
    return {name: (inputs[name] // num_layers, outputs[name] // num_layers) for name in inputs}
