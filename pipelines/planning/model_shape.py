"""The shape of a decoder of the Llama and Qwen families, and what follows from it by counting."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model's config.json that its memory and its arithmetic depend on."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    """Qwen2's biases of the projections of attention."""
    qk_norm: bool = False
    """Qwen3's norms of queries and keys."""

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Elements of all keys of a token in a layer, and of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer, by their names in the checkpoint."""
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
        """Elements of the matrices of all layers: what each token is multiplied by."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.projections.values())

    @cached_property
    def num_parameters(self) -> int:
        """All elements, as they are trained."""
        return sum(self._sizes())

    def num_below(self, threshold: int) -> int:
        """Return the elements of all tensors that are smaller than `threshold`."""
        return sum(size for size in self._sizes() if size < threshold)

    def _sizes(self) -> Iterable[int]:
        """The elements of each tensor."""
        layer = [inputs * outputs for inputs, outputs in self.projections.values()]
        layer += [self.hidden_size] * 2
        layer += [self.query_size, self.kv_size, self.kv_size] * self.qkv_bias
        layer += [self.head_size] * 2 * self.qk_norm
        return [*layer * self.num_layers, self.hidden_size, *[self.head_weights] * (1 if self.tied else 2)]

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return what the cache keeps of a token, in all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes
