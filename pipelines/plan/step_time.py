"""Time of a step by phase, from operations, bytes and assumed fractions of the hardware's rates.

Seconds are those of the busiest GPU: it has the most groups, and the others wait for it. Each phase is a sum of named
terms, so that a plan can say which of them does not shrink with more GPUs.
"""

import math
from dataclasses import dataclass, replace

from pipelines.plan.hardware import HOST_RATE, Gpu, Network
from pipelines.plan.memory import memory_of
from pipelines.plan.models import ModelShape
from pipelines.plan.run import Run, Work

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
_VERDICTS_PER_S = 90.0
"""Of one grading worker on the slowest kind, MATH (benchmarks/results/verifier.json: half of two workers' rate)."""
_WORKERS_PER_GPU = 4
"""Grading workers per GPU (assumed)."""
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
    terms: dict[tuple[str, str], float] = {}
    phases = {
        SAMPLING: _sampling(run, gpu),
        SCORING: {"verifier": run.work.completions / _num_samplers(run) / (_VERDICTS_PER_S * _WORKERS_PER_GPU)},
        REFERENCE: _reference(run, gpu),
        UPDATE: _update(run, gpu),
        SYNC: {"weights": _sync_s(run, gpu)},
        OTHER: {"the rest": _STEP_S, "gathering completions": _gathering_s(run)},
    }
    for phase, parts in phases.items():
        terms |= {(phase, name): seconds for name, seconds in parts.items()}
    return StepTime(terms, run.sampler.overlap)


def _gathering_s(run: Run) -> float:
    tokens = run.work.completions * run.work.mean_completion_tokens
    return tokens * _COMPLETION_TOKEN_S if run.num_trainers > 1 else 0.0


def _rate(run: Run, gpu: Gpu) -> float:
    return _UTILISATION * (gpu.bf16_rate if run.engine.element_bytes == 2 else gpu.fp32_rate)


def _num_samplers(run: Run) -> float:
    """Copies of the weights that sample."""
    return (run.sampler.num_servers or run.num_gpus) / run.sampler.tensor_parallel


def _busiest(work: Work, num_parts: float, prompts: int) -> float:
    """Completions of the busiest of `num_parts`; a group that shares its prompt stays together."""
    if work.shared_prompts:
        return math.ceil(prompts / num_parts) * work.group_size
    return math.ceil(prompts * work.group_size / num_parts)


def _sampling(run: Run, gpu: Gpu) -> dict[str, float]:
    """Decoding reads all weights, and the caches of the completions in progress, once per token."""
    work, shape, size = run.work, run.shape, run.engine.element_bytes
    rows = _busiest(work, _num_samplers(run), work.prompts)
    steps = _decoding_steps(run, rows)
    parallel = run.sampler.tensor_parallel
    memory_rate = _MEMORY_FRACTION * gpu.memory_rate * parallel
    tokens = rows * work.mean_completion_tokens
    prompt = work.mean_prompt_tokens / (work.group_size if work.shared_prompts else 1)
    # On average half of a completion is cached; long ones count more.
    cached = prompt + (work.mean_completion_tokens + work.completion_tokens) / 4
    prompts = rows / work.group_size * work.mean_prompt_tokens
    rate = _rate(run, gpu) * parallel
    operations = 2.0 * (shape.layer_weights + shape.head_weights)
    return {
        "reading weights": steps * (shape.layer_weights + shape.head_weights) * size / memory_rate,
        "reading caches": tokens * cached * shape.kv_bytes_per_token(size) / memory_rate,
        "starting operations": steps * shape.num_layers * _LAYER_S[run.sampler.engine],
        "arithmetic": operations * tokens / rate,
        "prompts": 2.0 * shape.layer_weights * prompts / rate,
    }


def _decoding_steps(run: Run, rows: float) -> float:
    """Tokens decoded in sequence: the longest completion of each batch, or vLLM's continuous batching."""
    work = run.work
    if run.sampler.engine == "transformers":
        groups_at_once = max(1, run.sampler.max_batch_size // work.group_size)
        return math.ceil(rows / work.group_size / groups_at_once) * work.completion_tokens
    at_once = _completions_at_once(run)
    if rows <= at_once:
        return work.completion_tokens
    full = rows * work.mean_completion_tokens / at_once
    return full + work.completion_tokens - work.mean_completion_tokens


def _completions_at_once(run: Run) -> float:
    if not run.sampler.cache_bytes:
        return run.sampler.max_batch_size
    tokens = run.sampler.cache_bytes / run.shape.kv_bytes_per_token(run.engine.element_bytes)
    return max(1.0, tokens / (run.work.mean_prompt_tokens / run.work.group_size + run.work.mean_completion_tokens))


def forward_flops(shape: ModelShape, work: Work, completions: float) -> float:
    """Return the operations of one forward pass over completions and their prompts.

    As components/policy/flops.py counts them: prompts once per group, the output layer for completions alone.
    """
    prompts = completions / (work.group_size if work.shared_prompts else 1)
    prompt, completion = work.mean_prompt_tokens, work.mean_completion_tokens
    products = shape.layer_weights * (prompts * prompt + completions * completion)
    products += shape.head_weights * completions * completion
    pairs = prompts * prompt**2 / 2 + completions * completion * (prompt + completion / 2)
    return 2.0 * products + 4.0 * shape.query_size * shape.num_layers * pairs


def _passes(run: Run, gpu: Gpu, *, passes: float, gathers: int) -> dict[str, float]:
    """Passes over the rollout by the busiest GPU, with `gathers` gatherings of the weights under ZeRO 3."""
    work, engine = run.work, run.engine
    completions = work.minibatches * _busiest(work, run.num_trainers, work.prompts // work.minibatches)
    arithmetic = passes * forward_flops(run.shape, work, completions) / _rate(run, gpu)
    if engine.zero_stage < 3:
        return {"arithmetic": arithmetic}
    network = Network(gpu, run.num_trainers)
    calls = run.shape.num_layers * _GATHERS_PER_LAYER
    gather_s = network.gather_s(run.shape.num_parameters * engine.element_bytes, calls)
    if engine.offload == "all":
        gather_s += run.shape.num_parameters * engine.element_bytes / run.num_trainers / HOST_RATE
    gathering = gathers * _num_micro_batches(run) * gather_s
    # Weights are prefetched while earlier layers compute: only the excess is waited for.
    return {"arithmetic": arithmetic, "gathering weights": max(0.0, gathering - arithmetic)}


def _num_micro_batches(run: Run) -> int:
    """Micro-batches of the busiest GPU in one pass over the rollout."""
    work = run.work
    completions = _busiest(work, run.num_trainers, work.prompts // work.minibatches)
    prompts = completions / (work.group_size if work.shared_prompts else 1)
    tokens = completions * work.mean_completion_tokens + prompts * work.mean_prompt_tokens
    return work.minibatches * math.ceil(tokens / run.engine.micro_batch_tokens)


def _reference(run: Run, gpu: Gpu) -> dict[str, float]:
    """The reference's forward pass, and the old policy's for the minibatches after the first."""
    work = run.work
    passes = (work.minibatches - 1) / work.minibatches if work.updates * work.minibatches > 1 else 0.0
    passes += run.reference != "none"
    if not passes:
        return {}
    parts = _passes(run, gpu, passes=passes, gathers=math.ceil(passes))
    if run.reference == "offloaded":
        parts["copying from the host"] = run.shape.num_parameters * run.engine.element_bytes / HOST_RATE
    return parts


def _update(run: Run, gpu: Gpu) -> dict[str, float]:
    """Forward and backward passes, the reduction of gradients, and the optimizer's steps."""
    work, engine, shape = run.work, run.engine, run.shape
    # A backward pass is two forward passes; logits are recomputed, and with checkpointing everything is.
    head = shape.head_weights / (shape.layer_weights + shape.head_weights)
    passes = work.updates * (4.0 if engine.gradient_checkpointing else 3.0 + head)
    parts = _passes(run, gpu, passes=passes, gathers=2 * work.updates)
    network = Network(gpu, run.num_trainers)
    steps = work.updates * work.minibatches
    if engine.zero_stage >= 2:  # after each micro-batch
        reduced = work.updates * _num_micro_batches(run) * network.gather_s(engine.element_bytes * run.num_trained)
    else:
        reduced = steps * network.reduce_s(4.0 * run.num_trained)
    parts["reducing gradients"] = reduced
    parts["optimizer"] = steps * _optimizer_s(run, gpu)
    if engine.zero_stage in (1, 2):
        parts["gathering new weights"] = steps * network.gather_s(engine.element_bytes * run.num_trained)
    return parts


def _optimizer_s(run: Run, gpu: Gpu) -> float:
    num_updated = run.num_trained / (run.num_trainers if run.engine.zero_stage else 1)
    if run.engine.offload == "none":
        return num_updated * _OPTIMIZER_BYTES / (_MEMORY_FRACTION * gpu.memory_rate)
    return num_updated / _HOST_ADAM_RATE + num_updated * (4 + run.engine.element_bytes) / HOST_RATE


def _sync_s(run: Run, gpu: Gpu) -> float:
    """Weight synchronisation: gathered under ZeRO 3, and sent where the sampler has GPUs of its own."""
    num_bytes = float(run.shape.num_parameters * run.engine.element_bytes)
    seconds = 0.0
    if run.engine.zero_stage == 3:
        seconds += Network(gpu, run.num_trainers).gather_s(num_bytes, run.shape.num_layers * _GATHERS_PER_LAYER)
    if run.sampler.engine == "vllm":
        seconds += 2 * num_bytes / (_MEMORY_FRACTION * gpu.memory_rate)
    if run.sampler.num_servers:
        seconds += num_bytes / gpu.network_rate
    return seconds


@dataclass(frozen=True)
class Critic:
    """What PPO needs beside GRPO, per GPU and step: a critic of the policy's shape, with its own optimizer.

    It computes when the policy does not, so activations and buffers are there once.
    """

    critic_bytes: float
    states_share: float
    """Fraction of the states of policy, critic and reference."""
    peak_share: float
    """Fraction of PPO's peak."""
    critic_s: float
    """Its values, and its own update."""
    time_share: float
    """Fraction of a step of PPO."""


def critic(run: Run, gpu: Gpu) -> Critic:
    """Return what a critic would add to a run."""
    memory = memory_of(run)
    num_bytes = memory.states * num_critic_parameters(run.shape) / run.shape.num_parameters
    seconds = sum(_passes(run, gpu, passes=1.0, gathers=1).values()) + sum(_update(run, gpu).values())
    return Critic(
        critic_bytes=num_bytes,
        states_share=num_bytes / (num_bytes + memory.states + memory.reference),
        peak_share=num_bytes / (num_bytes + memory.peak),
        critic_s=seconds,
        time_share=seconds / (seconds + step_time(run, gpu).total),
    )


def num_critic_parameters(shape: ModelShape) -> int:
    """Return the critic's parameters: one output in place of the output layer, as PPO's papers have it."""
    return replace(shape, tied=True).num_parameters + shape.hidden_size
