"""What the forward pass keeps for the backward pass, and what either needs for a moment.

Counted from the tensors that transformers' Llama, Qwen2 and Qwen3 layers save for autograd, and from this trainer's own
attention and output layer. Norms compute in fp32, whatever the weights are. T tokens of a micro-batch; every one of
them may be a completion token.
"""

from pipelines.planning.model_shape import ModelShape
from pipelines.planning.run import Engine

_CHUNK_ELEMENTS = 4_194_304
"""Logits that exist at once, and the fewest rows of them (components/policy/token_head.py)."""
_MIN_CHUNK_ROWS = 64
_INDEX_BYTES = 8


def activation_bytes(shape: ModelShape, engine: Engine, num_tokens: int) -> float:
    """Return what is saved of a micro-batch when its backward pass begins."""
    per_layer = layer_bytes_per_token(shape, engine.element_bytes)
    if engine.gradient_checkpointing:  # only the input of each layer
        per_layer = shape.hidden_size * engine.element_bytes
    layers = shape.num_layers * per_layer
    return float(num_tokens * (layers + _end_bytes_per_token(shape, engine.element_bytes)))


def layer_bytes_per_token(shape: ModelShape, size: int) -> int:
    """Return what a layer saves of a token."""
    norm = shape.hidden_size * (4 + size)  # its input in fp32, and the normalised
    norms = 2 * norm + shape.qk_norm * (4 + size) * (shape.query_size + shape.kv_size)
    inputs = 2 * size * shape.hidden_size  # of the matrices of attention and of the MLP
    # Queries, keys and values as many as there are queries, the output, and the log-sum-exp of each head. A value that
    # is not repeated is the projection's own output.
    attention = 4 * size * shape.query_size + 4 * shape.num_heads
    mlp = 4 * size * shape.intermediate_size  # gate, its activation, up, and their product
    return norms + inputs + attention + mlp


def _end_bytes_per_token(shape: ModelShape, size: int) -> int:
    """Before and after the layers: places, rotations, the last norm, and what the output layer keeps."""
    indices = 4 * _INDEX_BYTES
    rotations = 2 * size * shape.head_size
    return indices + rotations + shape.hidden_size * (4 + size) + shape.hidden_size * size + 3 * 4


def _chunk_bytes(shape: ModelShape, num_tokens: int) -> int:
    rows = min(num_tokens, max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS // shape.vocabulary_size))
    return 4 * rows * shape.vocabulary_size


def head_gradient_bytes(shape: ModelShape, engine: Engine, num_tokens: int) -> float:
    """Return what the backward pass of the output layer needs: gradients, and a chunk of logits."""
    gradient = 4 * shape.head_weights
    hidden = num_tokens * shape.hidden_size * engine.element_bytes
    return float(gradient + 2 * _chunk_bytes(shape, num_tokens) + hidden)


def backward_bytes(shape: ModelShape, engine: Engine, num_tokens: int) -> float:
    """Return what the backward pass of a layer needs: gradients of the widest tensors of its MLP.

    With checkpointing, what the layer would have saved is there for a moment, too.
    """
    per_token = engine.element_bytes * (3 * shape.intermediate_size + 2 * shape.hidden_size)
    if engine.gradient_checkpointing:
        per_token += layer_bytes_per_token(shape, engine.element_bytes)
    return float(num_tokens * per_token)


def sampling_bytes(shape: ModelShape, rows: int) -> float:
    """Return what drawing a token of each row needs: logits, over the temperature, and their exponentials."""
    return 3.0 * 4 * rows * shape.vocabulary_size
