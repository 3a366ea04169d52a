"""The shape of a decoder of the Llama and Qwen families, from its name or its config.json, without loading the model.

A folder, or a model in the local Hugging Face cache, is read from its config.json. For others there is a table of the
published configs of well-known models; instruction-tuned and mathematical variants have the shape of their base.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig, local_model


@dataclass(frozen=True)
class ModelShape:
    """The numbers in a model's config.json that determine its memory and its arithmetic."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    tied: bool = False
    """Whether the output layer shares the weights of the embedding."""
    qkv_bias: bool = False
    """Whether query, key and value projections have biases, as in Qwen2."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token in a layer."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Elements of all keys of a token in a layer, and of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Sizes of input and output of each matrix of a layer, by its name in the checkpoint."""
        hidden, wide = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.query_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.query_size, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }

    @property
    def head_weights(self) -> int:
        """Elements of the output layer."""
        return self.vocabulary_size * self.hidden_size

    @cached_property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.projections.values())

    @property
    def active_weights(self) -> int:
        """Elements of `layer_weights` that compute a token: all, but not in a mixture of experts."""
        return self.layer_weights

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(self._sizes())

    def num_below(self, threshold: int) -> int:
        """Return the elements of all tensors that are smaller than `threshold`."""
        return sum(size for size in self._sizes() if size < threshold)

    def _sizes(self) -> Iterable[int]:
        layer = [inputs * outputs for inputs, outputs in self.projections.values()]
        layer += [self.hidden_size, self.hidden_size]  # norms before attention and before the MLP
        if self.qkv_bias:
            layer += [self.query_size, self.kv_size, self.kv_size]
        if self.qk_norm:
            layer += [self.head_size, self.head_size]
        vocabulary = [self.head_weights] if self.tied else [self.head_weights, self.head_weights]
        return [*layer * self.num_layers, self.hidden_size, *vocabulary]

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of a token in the KV cache, in all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes


_WORD_VOCABULARY = 234
"""Size of the vocabulary of whole words in the problems of `params.yaml`."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_VARIANTS = {"base", "chat", "instruct", "math", "coder", "meta", "llm", "rl"}
"""Words in a name that do not change the shape."""
_llama = ModelShape
_qwen2 = partial(ModelShape, qkv_bias=True)
_qwen3 = partial(ModelShape, qk_norm=True)
_LLAMA_8B = _llama(4096, 14336, 32, 32, 8, 128, 128256)
_LLAMA_70B = _llama(8192, 28672, 80, 64, 8, 128, 128256)
KNOWN_MODELS = {
    # hidden size, intermediate size, layers, query heads, KV heads, size of a head, vocabulary
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 128, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 128, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 128, 152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 128, 152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 128, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 128, 152064),
    "llama-3-8b": _LLAMA_8B,
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128, 128256, tied=True),
    "llama-3.3-70b": _LLAMA_70B,
    "deepseek-7b": _llama(4096, 11008, 30, 32, 32, 128, 102400),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, 128, 151936, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 128, 151936, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, 128, 151936),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, 128, 151936),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 64, 49152, tied=True),
}


def shape_of(model: ModelConfig) -> ModelShape:
    """Return the shape of a params file's base model."""
    if model.scratch is not None:
        size = model.scratch
        heads, head_size = size.num_heads, size.hidden_size // size.num_heads
        vocabulary = size.vocabulary_size or _WORD_VOCABULARY
        # Four times as wide inside, every head with its own keys, and untied (components/policy/checkpoint.py).
        return _qwen3(size.hidden_size, 4 * size.hidden_size, size.num_layers, heads, heads, head_size, vocabulary)
    file = config_file(local_model(model.base))
    if file:
        return _from_config(jsonl.read_json(file), file)
    words = model.base.lower().rsplit("/", 1)[-1].split("-")
    known = KNOWN_MODELS.get("-".join(word for word in words if word not in _VARIANTS))
    if known is None:
        raise PipelineError(
            f"model {model.base}: unknown architecture; give a folder with its config.json, or one of "
            f"{', '.join(KNOWN_MODELS)}"
        )
    return known


def config_file(base: str) -> Path | None:
    """Return the config.json of a folder, or of a model in the local Hugging Face cache, if any."""
    if Path(base).is_dir():
        return Path(base) / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(base, "config.json")
    except HFValidationError:  # a path, not an id
        return None
    return Path(cached) if isinstance(cached, str) else None


def _from_config(config: dict[str, Any], file: Path) -> ModelShape:
    """Return the shape in `config`, the content of a config.json; PipelineError for other families."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise PipelineError(f"{file}: model_type {family} cannot be planned; accepted: {', '.join(FAMILIES)}")
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary_size=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise PipelineError(f"{file}: has no {error}; the config.json of a model is expected") from None
