"""Time of a step by phase, from operations, bytes and assumed fractions of the hardware's rates.

Seconds are those of the busiest GPU: it has the most groups, and the others wait for it. Each phase is a sum of named
terms, so that a plan can say which of them does not shrink with more GPUs.
"""

import math
from dataclasses import dataclass, replace

from pipelines.plan.hardware import HOST_RATE, Gpu
from pipelines.plan.memory import STATES, layer_bytes_per_token, memory_of, peak
from pipelines.plan.run import Run

_MATRIX_FRACTION = 0.65
"""Fraction of the datasheet's rate that large matrix products reach (chosen: see docs/scaling.md)."""
_MEMORY_FRACTION = 0.6
"""Fraction of the memory's rate: decoding, elementwise operations, the optimizer (assumed)."""
_TRAFFIC = 4.0
"""Times that what a forward pass saves for its backward pass goes through the memory in one pass: it is written and
read by the next operation, and norms and casts pass over it again (chosen, too; a backward pass counts as two)."""
_HEAD_BYTES = 24
"""Bytes per logit, in fp32, that a softmax over the vocabulary reads and writes: three passes of eight."""
_LAYER_S = 400e-6
"""Time to launch the operations of a layer one by one, from Python (assumed): decoding in process, and the floor of a
forward pass."""
_GRAPH_LAYER_S, _EAGER_LAYER_S = 40e-6, 300e-6
"""The same under vLLM, as captured graphs or with `compile: false` (assumed)."""
_ENGINE_STEP_S, _ROW_S = 3e-3, 10e-6
"""Time between two decoding steps of vLLM in which its GPU waits: scheduling, and per sequence (assumed)."""
_ALL_REDUCE_S = 15e-6
"""Latency of a sum over the GPUs of a server, two per layer (assumed)."""
_OPTIMIZER_BYTES = 28
"""Bytes read and written per parameter by AdamW: gradient, master copy and moments in, master copy and moments out."""
_HOST_ADAM_RATE = 1e9
"""Parameters per second that a process updates on its share of the host's processors (assumed)."""
_VERDICTS_PER_S, _PLAIN_VERDICTS_PER_S, _WORKERS_PER_GPU = 950.0, 3200.0, 4
"""Of one grading worker on generated formulas and on answers that are numbers: one over the processor time of a
verdict, 1.04 and 0.31 ms on busy processors (docs/explanation/experiments.md); the workers are assumed."""
_TOKEN_S = 5e-6
"""Per token of a process's own completions: decoding text, packing, metrics (benchmarks/results/overlap: what its parts
leave of a step)."""
_COMPLETION_TOKEN_S = 150e-9
"""Per token of all completions, which every process receives: 13 bytes, and the measured time to unpack them."""
_GATHERS_PER_LAYER = 7
"""Collectives with which ZeRO 3 gathers a layer: one for each matrix."""
_FILE_RATE = 2e9
"""Bytes per second to write or read weights as files in memory, and to digest them on the way (assumed)."""
_GLOO_RATE = 1e9
"""Bytes per second between processes without GPUs (assumed)."""
_TENSOR_S = 300e-6
"""Per tensor that is sent without files: a handle or a collective, and its digest on both sides (assumed)."""
DISK_RATE = 1e9
"""Bytes per second at which a checkpoint reaches its disk, digested and synchronised (assumed; --disk-rate)."""

SAMPLING, SCORING, REFERENCE, UPDATE = "sampling", "scoring", "reference", "update"
SYNC, CHECKPOINTS, OTHER = "weight sync", "checkpoints", "other"
PHASES = (SAMPLING, SCORING, REFERENCE, UPDATE, SYNC, CHECKPOINTS, OTHER)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    terms: dict[tuple[str, str], float]
    """By phase and name of the term."""
    overlap: bool

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase."""
        return {phase: sum(seconds for (of, _), seconds in self.terms.items() if of == phase) for phase in PHASES}

    @property
    def total(self) -> float:
        """The seconds of the step."""
        seconds = self.phases
        sampling, training = seconds[SAMPLING] + seconds[SCORING], seconds[REFERENCE] + seconds[UPDATE]
        rest = seconds[SYNC] + seconds[CHECKPOINTS] + seconds[OTHER]
        return rest + (max(sampling, training) if self.overlap else sampling + training)


def step_time(run: Run, gpu: Gpu, disk_rate: float = DISK_RATE) -> StepTime:
    """Return the predicted time of a step, to which a checkpoint adds its share."""
    tokens = run.completions * run.mean_completion_tokens
    gathered = tokens if run.num_trainers > 1 else 0.0
    own = _busiest(run, run.num_trainers, run.prompts) * run.mean_completion_tokens
    verdicts_per_s = _WORKERS_PER_GPU * (_VERDICTS_PER_S if run.formulas else _PLAIN_VERDICTS_PER_S)
    checkpoint_s = checkpoint_bytes(run) / disk_rate / run.checkpoint_every if run.checkpoint_every else 0.0
    phases = {
        SAMPLING: _sampling(run, gpu),
        SCORING: {"verifier": run.completions / run.num_trainers / verdicts_per_s},
        REFERENCE: _reference(run, gpu),
        UPDATE: _update(run, gpu),
        SYNC: _sync(run, gpu),
        CHECKPOINTS: {"writing": checkpoint_s},
        OTHER: {"the rest": own * _TOKEN_S, "gathering completions": gathered * _COMPLETION_TOKEN_S},
    }
    terms = {(phase, name): seconds for phase, parts in phases.items() for name, seconds in parts.items()}
    return StepTime(terms, run.overlap)


def checkpoint_bytes(run: Run) -> float:
    """Return the size of a checkpoint: fp32 weights and both moments of what is trained, and the model for others."""
    exported = float(run.element_bytes * run.shape.num_parameters) if run.checkpoint_exports else 0.0
    return 12.0 * run.num_trained + exported


def _rate(run: Run, gpu: Gpu) -> float:
    return _MATRIX_FRACTION * (gpu.bf16_rate if run.element_bytes == 2 else gpu.fp32_rate)


def _num_samplers(run: Run) -> float:
    """Copies of the weights that sample."""
    return (run.num_servers or run.num_gpus) / run.tensor_parallel


def _busiest(run: Run, num_parts: float, prompts: int) -> float:
    """Completions of the busiest of `num_parts`; a group that shares its prompt stays together."""
    if run.shared_prompts:
        return math.ceil(prompts / num_parts) * run.group_size
    return math.ceil(prompts * run.group_size / num_parts)


def _sampling(run: Run, gpu: Gpu) -> dict[str, float]:
    """Decoding reads all weights, and the caches of the completions in progress, once per token."""
    shape, size = run.shape, run.element_bytes
    rows = _busiest(run, _num_samplers(run), run.prompts)
    steps = _decoding_steps(run, rows)
    memory_rate = _MEMORY_FRACTION * gpu.memory_rate * run.tensor_parallel
    tokens = rows * run.mean_completion_tokens
    prompt = run.mean_prompt_tokens / (run.group_size if run.shared_prompts else 1)
    # On average half of a completion is cached; long ones count more.
    cached = prompt + (run.mean_completion_tokens + run.completion_tokens) / 4
    prompts = rows / (run.group_size if run.shared_prompts else 1) * run.mean_prompt_tokens
    rate = _rate(run, gpu) * run.tensor_parallel
    operations = 2.0 * (shape.layer_weights + shape.head_weights)
    terms = {
        "reading weights": steps * (shape.layer_weights + shape.head_weights) * size / memory_rate,
        "reading caches": tokens * cached * shape.kv_bytes_per_token(size) / memory_rate,
        "starting operations": steps * shape.num_layers * _LAYER_S,
        "arithmetic": operations * tokens / rate,
        "choosing tokens": tokens * _HEAD_BYTES * shape.vocabulary_size / memory_rate,
        "prompts": 2.0 * shape.layer_weights * prompts / rate,
    }
    if run.sampler != "transformers":
        layer_s = (_GRAPH_LAYER_S if run.compiled else _EAGER_LAYER_S) + 2 * _ALL_REDUCE_S * (run.tensor_parallel > 1)
        terms["starting operations"] = steps * (_ENGINE_STEP_S + shape.num_layers * layer_s) + tokens * _ROW_S
    return terms


def _decoding_steps(run: Run, rows: float) -> float:
    """Tokens decoded in sequence: the longest completion of each batch, or vLLM's continuous batching."""
    if run.sampler == "transformers":
        groups_at_once = max(1, run.max_batch_size // run.group_size)
        return math.ceil(rows / run.group_size / groups_at_once) * run.completion_tokens
    at_once: float = run.max_batch_size
    if run.cache_bytes:
        tokens = run.cache_bytes / run.shape.kv_bytes_per_token(run.element_bytes)
        at_once = max(1.0, tokens / (run.mean_prompt_tokens / run.group_size + run.mean_completion_tokens))
    if rows <= at_once:
        return run.completion_tokens
    full = rows * run.mean_completion_tokens / at_once
    return full + run.completion_tokens - run.mean_completion_tokens


def forward_flops(run: Run, completions: float) -> float:
    """Return the operations of one forward pass over completions and their prompts.

    As components/policy/flops.py counts them: prompts once per group, the output layer for completions alone.
    """
    shape, prompt, completion = run.shape, run.mean_prompt_tokens, run.mean_completion_tokens
    prompts = completions / (run.group_size if run.shared_prompts else 1)
    products = shape.layer_weights * (prompts * prompt + completions * completion)
    products += shape.head_weights * completions * completion
    pairs = prompts * prompt**2 / 2 + completions * completion * (prompt + completion / 2)
    return 2.0 * products + 4.0 * shape.query_size * shape.num_layers * pairs


def _passes(run: Run, gpu: Gpu, *, passes: float, gathers: int) -> dict[str, float]:
    """Passes over the rollout by the busiest GPU, with `gathers` gatherings of the weights under ZeRO 3.

    A pass computes, moves activations through the memory, and launches operations, which a GPU waits for only where it
    is ahead of them.
    """
    shape, completions = run.shape, run.minibatches * _busiest(run, run.num_trainers, run.prompts // run.minibatches)
    groups = completions / (run.group_size if run.shared_prompts else 1)
    scored = completions * run.mean_completion_tokens
    moved = layer_bytes_per_token(run) * shape.num_layers * (scored + groups * run.mean_prompt_tokens) * _TRAFFIC
    moved += _HEAD_BYTES * shape.vocabulary_size * scored
    seconds = {
        "arithmetic": passes * forward_flops(run, completions) / _rate(run, gpu),
        "moving activations": passes * moved / (_MEMORY_FRACTION * gpu.memory_rate),
    }
    launching = passes * _num_micro_batches(run) * shape.num_layers * _LAYER_S
    seconds["starting operations"] = max(0.0, launching - sum(seconds.values()))
    if run.zero_stage < 3:
        return seconds
    gather_s = _gather_weights_s(run, gpu)
    if run.offload == "all":
        gather_s += shape.num_parameters * run.element_bytes / run.num_trainers / HOST_RATE
    gathering = gathers * _num_micro_batches(run) * gather_s
    # Weights are prefetched while earlier layers compute: only the excess is waited for.
    return {**seconds, "gathering weights": max(0.0, gathering - sum(seconds.values()))}


def _gather_weights_s(run: Run, gpu: Gpu) -> float:
    num_bytes, calls = run.shape.num_parameters * run.element_bytes, run.shape.num_layers * _GATHERS_PER_LAYER
    return gpu.gather_s(run.num_trainers, num_bytes, calls)


def _num_micro_batches(run: Run) -> int:
    """Micro-batches of the busiest GPU in one pass over the rollout."""
    completions = _busiest(run, run.num_trainers, run.prompts // run.minibatches)
    prompts = completions / (run.group_size if run.shared_prompts else 1)
    tokens = completions * run.mean_completion_tokens + prompts * run.mean_prompt_tokens
    return run.minibatches * math.ceil(tokens / run.micro_batch_tokens)


def _reference(run: Run, gpu: Gpu) -> dict[str, float]:
    """The reference's forward pass, and the old policy's for the minibatches after the first."""
    passes = (run.minibatches - 1) / run.minibatches if run.updates * run.minibatches > 1 else 0.0
    passes += run.reference != "none"
    if not passes:
        return {}
    parts = _passes(run, gpu, passes=passes, gathers=math.ceil(passes))
    if run.reference == "offloaded":
        parts["copying from the host"] = run.shape.num_parameters * run.element_bytes / HOST_RATE
    return parts


def _update(run: Run, gpu: Gpu) -> dict[str, float]:
    """Forward and backward passes, the reduction of gradients, and the optimizer's steps."""
    # A backward pass is two forward passes, or one where weights are frozen and have no gradient. Logits are
    # recomputed, with checkpointing everything.
    head = run.shape.head_weights / (run.shape.layer_weights + run.shape.head_weights)
    passes = run.updates * ((1.0 if run.lora_rank else 2.0) + (2.0 if run.gradient_checkpointing else 1.0 + head))
    parts = _passes(run, gpu, passes=passes, gathers=2 * run.updates)
    steps, trained_bytes = run.updates * run.minibatches, run.element_bytes * run.num_trained
    if run.zero_stage >= 2:  # after each micro-batch
        times = run.updates * _num_micro_batches(run)
        parts["reducing gradients"] = times * gpu.gather_s(run.num_trainers, trained_bytes)
    else:
        parts["reducing gradients"] = steps * 2 * gpu.gather_s(run.num_trainers, 4.0 * run.num_trained)
    parts["optimizer"] = steps * _optimizer_s(run, gpu)
    if run.zero_stage in (1, 2):
        parts["gathering new weights"] = steps * gpu.gather_s(run.num_trainers, trained_bytes)
    return parts


def _optimizer_s(run: Run, gpu: Gpu) -> float:
    num_updated = run.num_trained / (run.num_trainers if run.zero_stage else 1)
    if run.offload == "none":
        return num_updated * _OPTIMIZER_BYTES / (_MEMORY_FRACTION * gpu.memory_rate)
    return num_updated / _HOST_ADAM_RATE + num_updated * (4 + run.element_bytes) / HOST_RATE


def _sync(run: Run, gpu: Gpu) -> dict[str, float]:
    """Weight synchronisation: gathered under ZeRO 3, and on its way to vLLM, which digests what it has received."""
    num_bytes = float(run.element_bytes * (run.num_trained if run.adapters_only else run.shape.num_parameters))
    terms = {"gathering weights": _gather_weights_s(run, gpu)} if run.zero_stage == 3 else {}
    if run.sampler == "transformers":
        return terms or {"weights": 0.0}
    digest_s = 2 * num_bytes / (_MEMORY_FRACTION * gpu.memory_rate)
    tensors_s = _TENSOR_S * run.shape.num_tensors
    ways = {
        # Adapters are merged in the host's memory; a file is written, read to be digested, and read by vLLM.
        "folder": {"weights by files": num_bytes * (1 / HOST_RATE + 3 / _FILE_RATE) + digest_s},
        "gloo": {"weights over a socket": num_bytes / _GLOO_RATE + tensors_s},
        "nccl": {"weights over the network": num_bytes / gpu.network_rate + digest_s + tensors_s},
        "ipc": {"weights within the GPU": 2 * digest_s + tensors_s},
    }
    return terms | ways[run.weights_by]


def critic(run: Run, gpu: Gpu) -> dict[str, float]:
    """Return what PPO needs beside GRPO, per GPU and step: a critic of the policy's shape, with its own optimizer.

    It computes when the policy does not, so activations and buffers are there once. Shares are fractions of the states
    of policy, critic and reference, of PPO's peak, and of a step of PPO.
    """
    memory = memory_of(run)
    states = sum(memory[name] for name in STATES)
    # One output in place of the output layer, as PPO's papers have it.
    num_parameters = replace(run.shape, tied=True).num_parameters + run.shape.hidden_size
    num_bytes = states * num_parameters / run.shape.num_parameters
    # It scores what the reference scores, and is updated as the policy is.
    seconds = sum(_passes(run, gpu, passes=1.0, gathers=1).values()) + sum(_update(run, gpu).values())
    return {
        "critic_bytes": num_bytes,
        "states_share": num_bytes / (num_bytes + states + memory["reference"]),
        "peak_share": num_bytes / (num_bytes + peak(memory)),
        "critic_s": seconds,
        "time_share": seconds / (seconds + step_time(run, gpu).total),
    }
