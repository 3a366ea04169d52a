"""Time of a step: a roofline model, by phase.

A phase takes the time of its arithmetic plus that of its memory traffic, at the rates of the datasheet, divided by an
efficiency. Not counted: launch overhead (which dominates for small models), collectives, checkpoints, transfer of
weights to the sampler, and grading.
"""

import math
from dataclasses import dataclass

from pipelines.plan.hardware import Gpu
from pipelines.plan.run import Run

SAMPLING, REFERENCE, UPDATE = "sampling", "reference", "update"
EFFICIENCY = 0.4
"""Fraction of the roofline that every phase reaches; it predicts nine published steps within a factor of 1.5
(docs/scaling.md)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    phases: dict[str, float]
    overlap: bool
    """Whether sampling and training run at the same time."""

    @property
    def total(self) -> float:
        """Seconds of all phases; of two that overlap only the longer counts."""
        sampling, training = self.phases[SAMPLING], self.phases[REFERENCE] + self.phases[UPDATE]
        return max(sampling, training) if self.overlap else sampling + training


def step_time(run: Run, gpu: Gpu) -> StepTime:
    """Return the predicted time of a step on the GPU with the most completions, for which the others wait."""
    completions = run.minibatches * _busiest(run, run.num_trainers, run.prompts // run.minibatches)
    forward = forward_flops(run, completions)
    # All times below are in forward passes over all completions. Besides the reference, the old policy scores the
    # completions of each minibatch but the first, for which it still is the policy.
    scoring_passes = (0.0 if run.reference == "none" else 1.0) + (run.minibatches - 1) / run.minibatches
    backward = 1.0 if run.lora_rank else 2.0  # frozen weights need no gradients
    recomputed = 1.0  # gradient checkpointing recomputes everything; otherwise only the logits are recomputed
    if not run.gradient_checkpointing:
        recomputed = run.shape.head_weights / (run.shape.active_weights + run.shape.head_weights)
    update_passes = run.updates * (1.0 + backward + recomputed)
    rate = gpu.bf16_rate if run.element_bytes == 2 else gpu.fp32_rate
    seconds = {
        SAMPLING: _sampling_s(run, gpu, rate),
        REFERENCE: scoring_passes * forward / rate,
        UPDATE: update_passes * forward / rate,
    }
    return StepTime({phase: each / EFFICIENCY for phase, each in seconds.items()}, run.overlap)


def _busiest(run: Run, num_parts: float, prompts: int) -> float:
    """Return the most completions that one of `num_parts` devices has; a group with a shared prompt stays together."""
    if run.shared_prompts:
        return math.ceil(prompts / num_parts) * run.group_size
    return math.ceil(prompts * run.group_size / num_parts)


def _sampling_s(run: Run, gpu: Gpu, rate: float) -> float:
    """Return the seconds of sampling on the GPUs of the busiest sampler, at `rate` operations per second."""
    shape, num_samplers = run.shape, (run.num_server_gpus or run.num_gpus) / run.tensor_parallel
    completions = _busiest(run, num_samplers, run.prompts)
    completions_per_prompt = run.group_size if run.shared_prompts else 1
    tokens = completions * run.mean_completion_tokens
    prompt_tokens = completions / completions_per_prompt * run.mean_prompt_tokens
    operations = 2.0 * (shape.active_weights * (tokens + prompt_tokens) + shape.head_weights * tokens)
    # A decoding step reads all weights.
    weights = shape.layer_weights + shape.head_weights
    num_bytes = _decoding_steps(run, completions) * weights * run.element_bytes
    # A token reads its share of the cached prompt, and the half of its completion that is cached on average. The length
    # of this completion is halfway from mean to limit, because long completions have more tokens.
    completion_tokens = (run.mean_completion_tokens + run.completion_tokens) / 4
    cached_tokens = run.mean_prompt_tokens / completions_per_prompt + completion_tokens
    num_bytes += tokens * cached_tokens * shape.kv_bytes_per_token(run.element_bytes)
    return (operations / rate + num_bytes / gpu.memory_rate) / run.tensor_parallel


def _decoding_steps(run: Run, completions: float) -> float:
    """Return the number of decoding steps, each of which samples a token for every completion of the batch."""
    if run.sampler == "transformers":  # one batch after another, each until its longest completion ends
        groups_per_batch = max(1, run.max_batch_size // run.group_size)
        return math.ceil(completions / run.group_size / groups_per_batch) * run.completion_tokens
    batch_size: float = run.max_batch_size
    if run.cache_bytes:  # vLLM samples as many completions at once as fit into its cache
        cache_tokens = run.cache_bytes / run.shape.kv_bytes_per_token(run.element_bytes)
        tokens_per_completion = run.mean_prompt_tokens / run.group_size + run.mean_completion_tokens
        batch_size = max(1.0, cache_tokens / tokens_per_completion)
    if completions <= batch_size:
        return run.completion_tokens
    # vLLM keeps the batch full until the last completions, one of which reaches the limit.
    steps_of_full_batch = completions * run.mean_completion_tokens / batch_size
    return steps_of_full_batch + run.completion_tokens - run.mean_completion_tokens


def forward_flops(run: Run, completions: float) -> float:
    """Return the operations of a forward pass over completions and their prompts, as in components/policy/flops.py."""
    # The output layer counts for completion tokens only, and a shared prompt once per group.
    shape, prompt_length = run.shape, run.mean_prompt_tokens
    completion_length = run.completion_tokens if run.padded else run.mean_completion_tokens
    prompts = completions / run.group_size if run.shared_prompts else completions
    tokens = completions * completion_length
    multiplications = shape.active_weights * (prompts * prompt_length + tokens) + shape.head_weights * tokens
    # Pairs of a query and a key, which attention multiplies once with each other and once with the value.
    pairs = prompts * prompt_length**2 / 2 + tokens * (prompt_length + completion_length / 2)
    return 2.0 * multiplications + 4.0 * shape.query_size * shape.num_layers * pairs
