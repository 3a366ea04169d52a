"""Memory of one GPU by part, as this trainer holds it.

N parameters, of which n are trained, on P GPUs; a weight has b bytes (2 for bf16, 4 for fp32).

| part | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |
|---|---|---|---|---|
| weights | bN | bN | bN | bN / P |
| gradients, summed in fp32 | 4n | 4n | 4n / P | 4n / P |
| optimizer: two moments and a master copy, fp32 | 12n | 12n / P | 12n / P | 12n / P |

In fp32 without sharding the weights are their own master copy: 8n.

Activations are counted from the tensors that transformers' Llama, Qwen2 and Qwen3 layers save for autograd, and from
this trainer's own attention and output layer. Norms compute in fp32, whatever the weights are. Every token of a
micro-batch may be a completion token.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from pipelines.plan.run import Run

_BUCKET_ELEMENTS = 500_000_000
"""Gradients that DeepSpeed reduces at once (components/policy/engine.py)."""
_LIVE_ELEMENTS = 1_000_000_000
"""Weights that ZeRO 3 keeps gathered for reuse (DeepSpeed's default)."""
_PREFETCH_ELEMENTS = 50_000_000
"""Weights that ZeRO 3 prefetches, in a buffer of their own (DeepSpeed's default)."""
_MIN_SHARDED_ELEMENTS = 100_000
"""ZeRO 3 does not shard smaller tensors (DeepSpeed's default)."""
_FIRST_CAPACITY = 64
"""Tokens for which a completion's cache has room at first; it is doubled when full (components/rollout)."""
_CHUNK_ELEMENTS, _MIN_CHUNK_ROWS = 4_194_304, 64
"""Logits that exist at once, and the fewest rows of them (components/policy)."""
_INDEX_BYTES = 8


@dataclass(frozen=True)
class Memory:
    """Bytes of each part on one GPU that trains."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    buffers: float
    """Of collectives, gathered weights and gradients, at the peak of the backward pass."""
    sampler_weights: float
    """The sampler's own copy of the weights: vLLM's, or an unsharded one beside the shards of ZeRO 3."""
    kv_cache: float
    sampling: float
    """Logits while sampling."""
    gathered: float
    """All weights of ZeRO 3, while the sampler's copy is updated."""
    sampler_sleeps: bool
    """Whether the sampler is offloaded while the policy is updated, as vLLM is."""

    @cached_property
    def states(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @cached_property
    def update_peak(self) -> float:
        """The peak of the update."""
        sampler = 0.0 if self.sampler_sleeps else self.sampler_weights
        return self.states + self.reference + self.activations + self.buffers + sampler

    @cached_property
    def sampling_peak(self) -> float:
        """The peak while sampling, without gradients."""
        resident = self.weights + self.optimizer + self.reference + self.sampler_weights
        return resident + max(self.kv_cache + self.sampling, self.gathered)

    @property
    def peak(self) -> float:
        """The peak of a step."""
        return max(self.update_peak, self.sampling_peak)


def memory_of(run: Run) -> Memory:
    """Return the memory of a GPU of this run."""
    return Memory(
        weights=_weights(run),
        gradients=_gradients(run),
        optimizer=_optimizer(run),
        reference={"replicated": _unsharded(run), "sharded": _sharded(run)}.get(run.reference, 0.0),
        activations=_activations(run),
        buffers=_buffers(run),
        sampler_weights=_sampler_weights(run),
        kv_cache=_kv_cache(run),
        # Logits in fp32, the same over the temperature, and their exponentials.
        sampling=0.0 if run.sampler.num_servers else 3.0 * 4 * _rows(run) * run.shape.vocabulary_size,
        gathered=_unsharded(run) if run.engine.zero_stage == 3 else 0.0,
        sampler_sleeps=run.sampler.engine == "vllm",
    )


def at_stage(run: Run, zero_stage: int) -> Run:
    """Return the same run with another stage of ZeRO."""
    return replace(run, engine=replace(run.engine, zero_stage=zero_stage))


def _unsharded(run: Run) -> float:
    return float(run.engine.element_bytes * run.shape.num_parameters)


def _small_tensors(run: Run) -> int:
    return run.shape.num_below(_MIN_SHARDED_ELEMENTS) * run.engine.element_bytes


def _sharded(run: Run) -> float:
    return _unsharded(run) / run.num_trainers + _small_tensors(run)


def _weights(run: Run) -> float:
    adapters = run.engine.element_bytes * run.num_trained if run.engine.lora_rank else 0
    if run.engine.zero_stage < 3:
        return _unsharded(run) + adapters
    return (float(_small_tensors(run)) if run.engine.offload == "all" else _sharded(run)) + adapters


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


def _activations(run: Run) -> float:
    """What is saved of a micro-batch when its backward pass begins."""
    shape, size = run.shape, run.engine.element_bytes
    # With checkpointing only the input of each layer.
    layer = shape.hidden_size * size if run.engine.gradient_checkpointing else _layer_bytes_per_token(run)
    # Before and after the layers: indices, rotations, the last norm, and what the output layer saves.
    indices, rotations = 4 * _INDEX_BYTES, 2 * size * shape.head_size
    ends = indices + rotations + shape.hidden_size * (4 + size) + shape.hidden_size * size + 3 * 4
    return float(run.tokens_at_once * (shape.num_layers * layer + ends))


def _layer_bytes_per_token(run: Run) -> int:
    shape, size = run.shape, run.engine.element_bytes
    norm = shape.hidden_size * (4 + size)  # its input in fp32, and the output
    norms = 2 * norm + shape.qk_norm * (4 + size) * (shape.query_size + shape.kv_size)
    inputs = 2 * size * shape.hidden_size  # of the matrices of attention and of the MLP
    # Queries, keys and values repeated to as many as there are queries, the output, and the log-sum-exp of each head.
    attention = 4 * size * shape.query_size + 4 * shape.num_heads
    mlp = 4 * size * shape.intermediate_size  # gate, its activation, up, and their product
    return norms + inputs + attention + mlp


def _buffers(run: Run) -> float:
    """What the update needs beside the activations, at its peak.

    At the start of the backward pass that is the output layer's part, later a layer's, and with ZeRO 1 and 2 the bucket
    that gradients are reduced in. ZeRO 3 has this bucket all the time, and gathered and prefetched weights.
    """
    shape, size, num_tokens = run.shape, run.engine.element_bytes, run.tokens_at_once
    rows = min(num_tokens, max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS // shape.vocabulary_size))
    # The output layer: its gradient, two chunks of logits, and the gradient of the hidden states.
    head = float(4 * shape.head_weights + 2 * 4 * rows * shape.vocabulary_size + num_tokens * shape.hidden_size * size)
    # A layer: gradients of the widest tensors of its MLP; with checkpointing its activations, too.
    per_token = size * (3 * shape.intermediate_size + 2 * shape.hidden_size)
    if run.engine.gradient_checkpointing:
        per_token += _layer_bytes_per_token(run)
    layer = float(num_tokens * per_token)
    bucket = size * min(run.num_trained, _BUCKET_ELEMENTS)
    if run.engine.zero_stage == 3:
        live, prefetched = (size * min(shape.num_parameters, most) for most in (_LIVE_ELEMENTS, _PREFETCH_ELEMENTS))
        return bucket + live + max(head, layer, prefetched)
    return max(head, layer + (bucket if run.engine.zero_stage else 0.0))


def _sampler_weights(run: Run) -> float:
    if run.sampler.engine == "vllm":
        return _unsharded(run) / run.sampler.tensor_parallel
    return _unsharded(run) if run.engine.zero_stage == 3 and run.sampler.engine == "transformers" else 0.0


def _rows(run: Run) -> int:
    """Completions that a GPU samples at once."""
    groups = -(-run.work.prompts // run.num_trainers)
    at_once = max(1, run.sampler.max_batch_size // run.work.group_size)
    return min(groups, at_once) * run.work.group_size


def _kv_cache(run: Run) -> float:
    """Keys and values of a batch, with the prompt of a group once.

    Every completion may reach its limit; vLLM makes some wait where they do, so that mean lengths are enough.
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
