"""The memory that a run takes on one GPU, by part; whether it fits, and the cheapest change that makes it fit.

Activations are the tensors that transformers' Llama, Qwen2 and Qwen3 layers and this trainer's attention and output
layer save for autograd. Norms compute in fp32, whatever the dtype of the weights. Every token of a micro-batch counts
as a completion token, for which the output layer computes logits.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from pipelines.plan.hardware import GIB, Gpu
from pipelines.plan.run import Run

_BUCKET_ELEMENTS = 500_000_000  # gradients that DeepSpeed reduces at once (components/policy/engine.py)
_LIVE_ELEMENTS, _PREFETCH_ELEMENTS = 1_000_000_000, 50_000_000
"""Weights that ZeRO 3 keeps gathered for reuse, and prefetches into another buffer (DeepSpeed's defaults)."""
_MIN_SHARDED_ELEMENTS = 100_000  # ZeRO 3 does not shard smaller tensors (DeepSpeed's default)
_FIRST_CAPACITY = 64  # initial capacity of a completion's cache in tokens; a full cache is doubled (components/rollout)
_CHUNK_ELEMENTS, _MIN_CHUNK_ROWS = 134_217_728, 64
"""Elements of the chunk of logits that a GPU holds at once, and its minimum number of rows (components/policy)."""
_CONTEXT_BYTES, _GRAPH_BYTES = 0.5 * GIB, 1.0 * GIB
"""CUDA context of a second process on the GPU, and vLLM's captured graphs; both stay while it sleeps (assumed)."""
_PREFILL_TOKENS = 16384
"""Prompt tokens that vLLM computes at once (its default on GPUs with 70 GiB or more; half of that on others)."""
_QUANTISED_BYTES = 0.5 + 4 / 64
"""Bytes per NF4 element: 4 bits, and a float32 scale for each 64 (QLoRA, arXiv 2305.14314, section 2)."""
_INDEX_BYTES = 8
_MAX_GPUS = 4096
_MIN_ZERO_STAGE = {"none": 0, "optimizer": 1, "all": 3}
"""Lowest ZeRO stage for each kind of offloading, as only sharded tensors can be offloaded."""

STATES = ("weights", "gradients", "optimizer")


def memory_of(run: Run) -> dict[str, float]:
    """Return the bytes of each part on a GPU that trains, and their sums at the peaks of the update and of sampling."""
    parts = {**_states(run), "activations": _activations(run), "buffers": _buffers(run), **_sampler(run)}
    states = sum(parts[name] for name in STATES)
    # A reward model is trained like the policy, and keeps its states while the policy is trained.
    parts["reward_model"] = states if run.reward_model else 0.0
    resident = parts["reference"] + parts["reward_model"] + parts["engine"]
    update_peak = states + resident + parts["activations"] + parts["buffers"]
    if run.sampler != "vllm":  # vLLM sleeps during the update, and releases its weights
        update_peak += parts["sampler_weights"]
    # While a run samples, it has no gradients. ZeRO 3 gathers weights for the sampler before there is a KV cache.
    while_sampling = parts["weights"] + parts["optimizer"] + resident + parts["sampler_weights"]
    sampling_peak = while_sampling + max(parts["kv_cache"] + parts["sampling"], parts["gathered"])
    return {**parts, "update_peak": update_peak, "sampling_peak": sampling_peak}


def peak(memory: dict[str, float]) -> float:
    """Return the most bytes that a GPU needs during a step."""
    return max(memory["update_peak"], memory["sampling_peak"])


def _unsharded_bytes(run: Run) -> float:
    return float(run.element_bytes * run.shape.num_parameters)


def _states(run: Run) -> dict[str, float]:
    """Return the bytes of weights, gradients, optimizer (two moments and a master copy) and the reference."""
    unsharded, small_tensors = _unsharded_bytes(run), run.shape.num_below(_MIN_SHARDED_ELEMENTS) * run.element_bytes
    sharded = unsharded / run.num_trainers + small_tensors
    weights = unsharded
    if run.zero_stage == 3:
        weights = small_tensors if run.offload == "all" else sharded
    if run.quantised:
        weights -= (run.element_bytes - _QUANTISED_BYTES) * run.shape.layer_weights
    if run.lora_rank:
        weights += run.element_bytes * run.num_trained
    gradients = 4.0 * run.num_trained / (run.num_trainers if run.zero_stage >= 2 else 1)
    # Without sharding, weights in fp32 are their own master copy.
    optimizer = (8.0 if run.element_bytes == 4 else 12.0) * run.num_trained
    if run.zero_stage:
        optimizer = 12.0 * run.num_trained / run.num_trainers
    on_gpu = run.offload == "none"
    return {
        "weights": weights,
        "gradients": gradients if on_gpu else 0.0,
        "optimizer": optimizer if on_gpu else 0.0,
        "reference": {"replicated": unsharded, "sharded": sharded}.get(run.reference, 0.0),
    }


def _activations(run: Run) -> float:
    """Return the bytes that are saved for the backward pass of a micro-batch."""
    shape, size = run.shape, run.element_bytes
    # Gradient checkpointing saves only the input of each layer.
    layer = shape.hidden_size * size if run.gradient_checkpointing else layer_bytes_per_token(run)
    indices, rotations = 4 * _INDEX_BYTES, 2 * size * shape.head_size
    last_norm = shape.hidden_size * (4 + size)
    output_layer = shape.hidden_size * size + 3 * 4
    return float(run.tokens_at_once * (indices + rotations + shape.num_layers * layer + last_norm + output_layer))


def layer_bytes_per_token(run: Run) -> int:
    """Return the bytes that a layer saves per token for its backward pass."""
    shape, size = run.shape, run.element_bytes
    norm = shape.hidden_size * (4 + size)  # its input in fp32, and the output
    norms = 2 * norm + ((4 + size) * (shape.query_size + shape.kv_size) if shape.qk_norm else 0)
    inputs = 2 * size * shape.hidden_size  # of the matrices of attention and of the MLP
    # Queries, keys and values repeated to as many as there are queries, the output, and the log-sum-exp of each head.
    attention = 4 * size * shape.query_size + 4 * shape.num_heads
    mlp = 4 * size * shape.intermediate_size  # gate, its activation, up, and their product
    return norms + inputs + attention + mlp


def _buffers(run: Run) -> float:
    """Return the bytes of gradients, logits, gathered weights and communication buffers at the peak of a backward pass.

    The peak is in the output layer, where the pass starts, or in another layer, where ZeRO 1 and 2 add a bucket of
    gradients. ZeRO 3 holds this bucket and gathered weights all the time, and prefetches other weights.
    """
    shape, size, num_tokens = run.shape, run.element_bytes, run.tokens_at_once
    chunk = min(num_tokens, max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS // shape.vocabulary_size))
    tokens_with_logits = num_tokens if run.padded else chunk  # at once
    # The output layer: its gradient, logits and their gradient in fp32, and the gradient of the hidden states.
    logits = 2 * 4 * tokens_with_logits * shape.vocabulary_size
    head = float(4 * shape.head_weights + logits + num_tokens * shape.hidden_size * size)
    # Another layer: gradients of the widest tensors of its MLP; with checkpointing also its recomputed activations.
    per_token = size * (3 * shape.intermediate_size + 2 * shape.hidden_size)
    if run.gradient_checkpointing:
        per_token += layer_bytes_per_token(run)
    layer = float(num_tokens * per_token)
    bucket = size * min(run.num_trained, _BUCKET_ELEMENTS)
    if run.zero_stage == 3:
        live = size * min(shape.num_parameters, _LIVE_ELEMENTS)
        prefetched = size * min(shape.num_parameters, _PREFETCH_ELEMENTS)
        return bucket + live + max(head, layer, prefetched)
    return max(head, layer + (bucket if run.zero_stage else 0.0))


def _sampler(run: Run) -> dict[str, float]:
    """Return the bytes that sampling takes on a GPU that trains; ZeRO 3 gathers all weights to update the sampler."""
    gathered = _unsharded_bytes(run) if run.zero_stage == 3 else 0.0
    if run.sampler == "vllm_server":  # it samples on separate GPUs
        return {"engine": 0.0, "sampler_weights": 0.0, "kv_cache": 0.0, "sampling": 0.0, "gathered": gathered}
    num_groups = math.ceil(run.prompts / run.num_trainers)
    groups_at_once = min(num_groups, max(1, run.max_batch_size // run.group_size))
    completions = groups_at_once * run.group_size
    if run.sampler == "transformers":
        engine, weights = 0.0, gathered  # under ZeRO 3 it samples from an unsharded copy
        cached_per_completion: float = _FIRST_CAPACITY
        while cached_per_completion < run.completion_tokens:  # every completion may reach its limit
            cached_per_completion *= 2
    else:
        engine, weights = _CONTEXT_BYTES + (_GRAPH_BYTES if run.compiled else 0.0), _unsharded_bytes(run)
        cached_per_completion = run.mean_completion_tokens  # if the cache is full, vLLM lets completions wait
        completions = min(completions, run.max_batch_size)
    # The prompt of a group is cached once.
    cached_tokens = completions // run.group_size * run.prompt_tokens + completions * cached_per_completion
    # Logits in fp32, logits divided by the temperature, and their exponentials.
    sampling = 3.0 * 4 * completions * run.shape.vocabulary_size
    if run.sampler == "vllm":  # the activations of a prefill may take more
        elements_per_token = 3 * run.shape.intermediate_size + 4 * run.shape.hidden_size
        sampling = max(sampling, float(_PREFILL_TOKENS * elements_per_token * run.element_bytes))
    return {
        "engine": engine,
        "sampler_weights": weights,
        "kv_cache": run.cache_bytes or cached_tokens * run.shape.kv_bytes_per_token(run.element_bytes),
        "sampling": sampling,
        "gathered": gathered,
    }


def fits(run: Run, gpu: Gpu) -> bool:
    """Return whether a run fits on GPUs of this kind, both those that train and those that only sample."""
    if peak(memory_of(run)) > gpu.usable_bytes:
        return False
    if not run.num_server_gpus:
        return True
    # A server holds the weights, and a cache for at least one completion.
    cache = max(run.longest * run.shape.kv_bytes_per_token(run.element_bytes), run.cache_bytes)
    return (_unsharded_bytes(run) + cache) / run.tensor_parallel <= gpu.usable_bytes


class _Change(NamedTuple):
    """Another value of a key of `train_grpo`."""

    text: str
    cost: float
    """Rank among the changes: the more a change slows steps down, the higher (our judgement)."""
    values: dict[str, Any]
    """The fields of `Run` that it changes."""


def cheapest_changes(run: Run, gpu: Gpu) -> str | None:
    """Return the cheapest changes of `train_grpo` that make a run fit, otherwise enough GPUs; None if nothing helps."""
    choices = product(*([None, *alternatives] for alternatives in _alternatives(run)))
    combinations = [[change for change in choice if change] for choice in choices]
    for changes in sorted(combinations, key=lambda changes: (sum(each.cost for each in changes), len(changes))):
        changed = replace(run, **{name: value for each in changes for name, value in each.values.items()})
        if changed.zero_stage >= _MIN_ZERO_STAGE[changed.offload] and fits(changed, gpu):
            return ", ".join(each.text for each in changes)
    num_gpus = 2 * run.num_gpus
    while num_gpus <= min(_MAX_GPUS, run.prompts):  # each GPU needs a prompt
        if fits(replace(run, num_gpus=num_gpus), gpu):
            return f"--gpus {num_gpus}"
        num_gpus *= 2
    return None


def _alternatives(run: Run) -> list[list[_Change]]:
    """Return lists of changes that exclude one another, such as other values of one key, with the cost of each."""
    token_limits = _halvings(run.micro_batch_tokens, run.longest)
    batch_sizes = _halvings(run.max_batch_size, run.group_size)
    samplers = [_change("sampling.max_batch_size", size, 2 + i / 10) for i, size in enumerate(batch_sizes)]
    samplers.append(_Change("sampler.vllm", 3.5, {"sampler": "vllm"}))
    if num_server_gpus := run.num_gpus // 2:
        values = {"sampler": "vllm_server", "num_server_gpus": num_server_gpus}
        samplers.append(_Change(f"sampler.servers on {num_server_gpus} of the GPUs", 5, values))
    stages = range(run.zero_stage + 1, 3 if run.quantised else 4)  # 4-bit weights are not sharded
    references = [_change("reference", "sharded", 1.5), _change("reference", "offloaded", 3.0)]
    offloads = [_change("engine.offload", "optimizer", 6.0), _change("engine.offload", "all", 9.0)]
    return [
        [_change("engine.micro_batch_tokens", limit, 1 + i / 10) for i, limit in enumerate(token_limits)],
        [] if run.gradient_checkpointing else [_change("engine.gradient_checkpointing", True, 2)],
        [_change("engine.zero_stage", stage, 1 + stage / 2) for stage in stages],
        samplers if run.sampler == "transformers" else [],
        references if run.reference == "replicated" else [],
        offloads if run.offload == "none" else [],
    ]


def _halvings(value: int, minimum: int) -> list[int]:
    """Return a half, a quarter and so on of a value, down to the minimum."""
    return [value >> n for n in range(1, 12) if value >> n >= minimum]


def _change(key: str, value: object, cost: float) -> _Change:
    return _Change(f"{key}: {str(value).lower()}", cost, {key.rpartition(".")[2]: value})
