"""Time of a step by phase, from operations, bytes and assumed fractions of the hardware's rates.

Seconds are those of the busiest GPU: it has the most groups, and the others wait for it. Each phase is a sum of named
terms, so that a plan can say which of them does not shrink with more GPUs.
"""

import math
from dataclasses import dataclass, replace

from pipelines.plan.hardware import HOST_RATE, Gpu
from pipelines.plan.memory import STATES, memory_of, peak
from pipelines.plan.run import Run

_UTILISATION = 0.40
"""Fraction of the rate of matrix products: forward and backward passes, prefill (assumed; published runs of dense
models report 0.3 to 0.5)."""
_MEMORY_FRACTION = 0.6
"""Fraction of the memory's rate: decoding, and the optimizer (assumed)."""
_LAYER_S = {"transformers": 400e-6, "vllm": 40e-6, "vllm_server": 40e-6}
"""Time per layer and decoded token that is neither arithmetic nor memory: launching small operations one by one, or,
under vLLM, captured graphs, sampling and scheduling (assumed)."""
_OPTIMIZER_BYTES = 28
"""Bytes read and written per parameter by AdamW: gradient, master copy and moments in, master copy and moments out."""
_HOST_ADAM_RATE = 1e9
"""Parameters per second that a process updates on its share of the host's processors (assumed)."""
_VERDICTS_PER_S, _WORKERS_PER_GPU = 90.0, 4
"""Of one grading worker on the slowest kind, MATH (benchmarks/results/verifier.json: half of two workers' rate); the
workers are assumed."""
_STEP_S = 1.0
"""Tokenizing, packing and metrics of a step (assumed)."""
_COMPLETION_TOKEN_S = 150e-9
"""Per token of all completions, which every process receives: 13 bytes, and the measured time to unpack them."""
_GATHERS_PER_LAYER = 7
"""Collectives with which ZeRO 3 gathers a layer: one for each matrix."""

SAMPLING, SCORING, REFERENCE, UPDATE, SYNC, OTHER = "sampling", "scoring", "reference", "update", "weight sync", "other"
PHASES = (SAMPLING, SCORING, REFERENCE, UPDATE, SYNC, OTHER)


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
        return seconds[SYNC] + seconds[OTHER] + (max(sampling, training) if self.overlap else sampling + training)


def step_time(run: Run, gpu: Gpu) -> StepTime:
    """Return the predicted time of a step."""
    gathered = run.completions * run.mean_completion_tokens if run.num_trainers > 1 else 0.0
    phases = {
        SAMPLING: _sampling(run, gpu),
        SCORING: {"verifier": run.completions / _num_samplers(run) / (_VERDICTS_PER_S * _WORKERS_PER_GPU)},
        REFERENCE: _reference(run, gpu),
        UPDATE: _update(run, gpu),
        SYNC: {"weights": _sync_s(run, gpu)},
        OTHER: {"the rest": _STEP_S, "gathering completions": gathered * _COMPLETION_TOKEN_S},
    }
    terms = {(phase, name): seconds for phase, parts in phases.items() for name, seconds in parts.items()}
    return StepTime(terms, run.overlap)


def _rate(run: Run, gpu: Gpu) -> float:
    return _UTILISATION * (gpu.bf16_rate if run.element_bytes == 2 else gpu.fp32_rate)


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
    prompts = rows / run.group_size * run.mean_prompt_tokens
    rate = _rate(run, gpu) * run.tensor_parallel
    operations = 2.0 * (shape.layer_weights + shape.head_weights)
    return {
        "reading weights": steps * (shape.layer_weights + shape.head_weights) * size / memory_rate,
        "reading caches": tokens * cached * shape.kv_bytes_per_token(size) / memory_rate,
        "starting operations": steps * shape.num_layers * _LAYER_S[run.sampler],
        "arithmetic": operations * tokens / rate,
        "prompts": 2.0 * shape.layer_weights * prompts / rate,
    }


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
    """Passes over the rollout by the busiest GPU, with `gathers` gatherings of the weights under ZeRO 3."""
    completions = run.minibatches * _busiest(run, run.num_trainers, run.prompts // run.minibatches)
    arithmetic = passes * forward_flops(run, completions) / _rate(run, gpu)
    if run.zero_stage < 3:
        return {"arithmetic": arithmetic}
    gather_s = _gather_weights_s(run, gpu)
    if run.offload == "all":
        gather_s += run.shape.num_parameters * run.element_bytes / run.num_trainers / HOST_RATE
    gathering = gathers * _num_micro_batches(run) * gather_s
    # Weights are prefetched while earlier layers compute: only the excess is waited for.
    return {"arithmetic": arithmetic, "gathering weights": max(0.0, gathering - arithmetic)}


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
    # A backward pass is two forward passes; logits are recomputed, and with checkpointing everything is.
    head = run.shape.head_weights / (run.shape.layer_weights + run.shape.head_weights)
    passes = run.updates * (4.0 if run.gradient_checkpointing else 3.0 + head)
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


def _sync_s(run: Run, gpu: Gpu) -> float:
    """Weight synchronisation: gathered under ZeRO 3, and sent where the sampler has GPUs of its own."""
    num_bytes = float(run.shape.num_parameters * run.element_bytes)
    seconds = _gather_weights_s(run, gpu) if run.zero_stage == 3 else 0.0
    if run.sampler == "vllm":
        seconds += 2 * num_bytes / (_MEMORY_FRACTION * gpu.memory_rate)
    if run.num_servers:
        seconds += num_bytes / gpu.network_rate
    return seconds


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
