"""Memory of one GPU by part, as this trainer holds it.

N parameters, of which n are trained, on P GPUs; a weight has b bytes (2 for bf16, 4 for fp32).

| part | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |
|---|---|---|---|---|
| weights | bN | bN | bN | bN / P |
| gradients, summed in fp32 | 4n | 4n | 4n / P | 4n / P |
| optimizer: two moments and a master copy, fp32 | 12n | 12n / P | 12n / P | 12n / P |

In fp32 without sharding the weights are their own master copy: 8n.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from pipelines.plan.models import ModelShape
from pipelines.plan.run import Engine, Run

_BUCKET_ELEMENTS = 500_000_000
"""Gradients that DeepSpeed reduces at once (components/policy/engine.py)."""
_LIVE_ELEMENTS = 1_000_000_000
"""Weights that ZeRO 3 keeps gathered because they will be needed again soon (DeepSpeed's default)."""
_AHEAD_ELEMENTS = 50_000_000
"""Weights that ZeRO 3 gathers ahead, in a buffer of their own until they are used (DeepSpeed's default)."""
_WHOLE_BELOW = 100_000
"""Tensors of fewer elements ZeRO 3 does not shard (DeepSpeed's default)."""
_FIRST_CAPACITY = 64
"""Tokens that a completion's cache holds at first; it is doubled when full (components/rollout/group_cache.py)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of each part on one GPU that trains."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    buffers: float
    """Collectives, gathered weights and gradients on their way, at the worst moment of the backward pass."""
    sampler_weights: float
    """A copy of the weights that the sampler has for itself: vLLM's, or a whole one beside the shards of ZeRO 3."""
    kv_cache: float
    sampling: float
    """Logits while sampling."""
    gathered: float
    """All weights of ZeRO 3 for a moment, when the sampler's copy is renewed."""
    sampler_sleeps: bool
    """Whether the sampler gives its memory back while the policy is updated, as vLLM does."""

    @cached_property
    def states(self) -> float:
        """What is there all the time but the reference."""
        return self.weights + self.gradients + self.optimizer

    @cached_property
    def update_peak(self) -> float:
        """The most of the update."""
        sampler = 0.0 if self.sampler_sleeps else self.sampler_weights
        return self.states + self.reference + self.activations + self.buffers + sampler

    @cached_property
    def sampling_peak(self) -> float:
        """The most while sampling; gradients of the last step are gone by then."""
        held = self.weights + self.optimizer + self.reference + self.sampler_weights
        return held + max(self.kv_cache + self.sampling, self.gathered)

    @property
    def peak(self) -> float:
        """The most of a step."""
        return max(self.update_peak, self.sampling_peak)


def memory_of(run: Run) -> Memory:
    """Return the memory of a GPU of this run."""
    return Memory(
        weights=_weights(run),
        gradients=_gradients(run),
        optimizer=_optimizer(run),
        reference=_reference(run),
        activations=activation_bytes(run.shape, run.engine, run.tokens_at_once),
        buffers=_buffers(run),
        sampler_weights=_sampler_weights(run),
        kv_cache=_kv_cache(run),
        sampling=0.0 if run.sampler.num_servers else sampling_bytes(run.shape, _rows(run)),
        gathered=_whole(run) if run.engine.zero_stage == 3 else 0.0,
        sampler_sleeps=run.sampler.engine == "vllm",
    )


def at_stage(run: Run, zero_stage: int) -> Run:
    """Return the same run with another stage of ZeRO."""
    return replace(run, engine=replace(run.engine, zero_stage=zero_stage))


def _whole(run: Run) -> float:
    """One whole copy of the weights."""
    return float(run.engine.element_bytes * run.shape.num_parameters)


def _sharded(run: Run) -> float:
    """A shard of the weights, with what is too small to be sharded."""
    whole = run.shape.num_below(_WHOLE_BELOW) * run.engine.element_bytes
    return _whole(run) / run.num_trainers + whole


def _weights(run: Run) -> float:
    adapters = run.engine.element_bytes * run.num_trained if run.engine.lora_rank else 0
    if run.engine.zero_stage < 3:
        return _whole(run) + adapters
    if run.engine.offload == "all":
        return float(run.shape.num_below(_WHOLE_BELOW) * run.engine.element_bytes + adapters)
    return _sharded(run) + adapters


def _gradients(run: Run) -> float:
    if run.engine.offload != "none":
        return 0.0
    return 4.0 * run.num_trained / (run.num_trainers if run.engine.zero_stage >= 2 else 1)


def _optimizer(run: Run) -> float:
    if run.engine.offload != "none":
        return 0.0
    if run.engine.zero_stage:
        return 12.0 * run.num_trained / run.num_trainers
    return (8.0 if run.engine.element_bytes == 4 else 12.0) * run.num_trained


def _reference(run: Run) -> float:
    held = {"none": 0.0, "replicated": _whole(run), "sharded": _sharded(run), "offloaded": 0.0}
    return held[run.reference]


def _buffers(run: Run) -> float:
    """What the update needs for a moment, beside what was saved for the backward pass.

    At its start that is the output layer's part, later a layer's, and with ZeRO 1 and 2 the bucket that gradients are
    reduced in. ZeRO 3 has this bucket all the time, and weights that are gathered, and being gathered ahead.
    """
    size, num_tokens = run.engine.element_bytes, run.tokens_at_once
    head = head_gradient_bytes(run.shape, run.engine, num_tokens)
    layer = backward_bytes(run.shape, run.engine, num_tokens)
    bucket = size * min(run.num_trained, _BUCKET_ELEMENTS)
    if run.engine.zero_stage == 3:
        gathered, ahead = (size * min(run.shape.num_parameters, most) for most in (_LIVE_ELEMENTS, _AHEAD_ELEMENTS))
        return bucket + gathered + max(head, layer, ahead)
    return max(head, layer + (bucket if run.engine.zero_stage else 0.0))


def _sampler_weights(run: Run) -> float:
    if run.sampler.engine == "vllm":
        return _whole(run) / run.sampler.tensor_parallel
    sharded = run.engine.zero_stage == 3
    return _whole(run) if sharded and run.sampler.engine == "transformers" else 0.0


def _rows(run: Run) -> int:
    """Completions under way at once on a GPU."""
    groups_here = -(-run.work.prompts // run.num_trainers)
    at_once = max(1, run.sampler.max_batch_size // run.work.group_size)
    return min(groups_here, at_once) * run.work.group_size


def _kv_cache(run: Run) -> float:
    """Keys and values of a batch, a group's prompt once.

    Every completion may reach its limit; vLLM makes the last wait where they do, and gets by with mean lengths.
    """
    if run.sampler.num_servers:
        return 0.0
    if run.sampler.cache_bytes:
        return run.sampler.cache_bytes / run.sampler.tensor_parallel
    rows, work = _rows(run), run.work
    capacity = work.mean_completion_tokens
    if run.sampler.engine == "transformers":
        capacity = _FIRST_CAPACITY
        while capacity < work.completion_tokens:
            capacity *= 2
    tokens = rows // work.group_size * work.prompt_tokens + rows * capacity
    return tokens * run.shape.kv_bytes_per_token(run.engine.element_bytes) / run.sampler.tensor_parallel


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
