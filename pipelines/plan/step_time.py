"""Time of a step: a roofline model, by phase.

A phase takes the time of its arithmetic and of its memory traffic at the rates of the datasheet, over one efficiency.
Not counted: launch overhead (which dominates for small models), collectives, checkpoints, transfer of weights to the
sampler, and grading.
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
        """The seconds of the step."""
        sampling, training = self.phases[SAMPLING], self.phases[REFERENCE] + self.phases[UPDATE]
        return max(sampling, training) if self.overlap else sampling + training


def step_time(run: Run, gpu: Gpu) -> StepTime:
    """Return the predicted time of a step on the GPU with the most groups, for which the others wait."""
    per_pass = forward_flops(run, run.minibatches * _busiest(run, run.num_trainers, run.prompts // run.minibatches))
    scoring = float(run.reference != "none")  # and the old policy's forward pass for the minibatches after the first
    scoring += (run.minibatches - 1) / run.minibatches if run.updates * run.minibatches > 1 else 0.0
    # A backward pass is two forward passes, or one where weights are frozen. Logits are recomputed, with checkpointing
    # everything.
    head = run.shape.head_weights / (run.shape.active_weights + run.shape.head_weights)
    updating = (1.0 if run.lora_rank else 2.0) + (2.0 if run.gradient_checkpointing else 1.0 + head)
    rate = gpu.bf16_rate if run.element_bytes == 2 else gpu.fp32_rate
    seconds = {
        SAMPLING: _sampling_s(run, gpu, rate),
        REFERENCE: scoring * per_pass / rate,
        UPDATE: run.updates * updating * per_pass / rate,
    }
    return StepTime({phase: each / EFFICIENCY for phase, each in seconds.items()}, run.overlap)


def _busiest(run: Run, num_parts: float, prompts: int) -> float:
    """Return the completions of the busiest of `num_parts`; a group that shares its prompt stays together."""
    if run.shared_prompts:
        return math.ceil(prompts / num_parts) * run.group_size
    return math.ceil(prompts * run.group_size / num_parts)


def _sampling_s(run: Run, gpu: Gpu, rate: float) -> float:
    """Return the seconds of decoding, which reads all weights and the caches of running completions for each token."""
    shape, group = run.shape, run.group_size if run.shared_prompts else 1
    rows = _busiest(run, (run.num_server_gpus or run.num_gpus) / run.tensor_parallel, run.prompts)
    tokens, weights = rows * run.mean_completion_tokens, shape.layer_weights + shape.head_weights
    # On average half of a completion is cached; long ones count more.
    cached = run.mean_prompt_tokens / group + (run.mean_completion_tokens + run.completion_tokens) / 4
    num_bytes = _decoding_steps(run, rows) * weights * run.element_bytes
    num_bytes += tokens * cached * shape.kv_bytes_per_token(run.element_bytes)
    active = shape.active_weights + shape.head_weights
    operations = 2.0 * (active * tokens + shape.active_weights * rows / group * run.mean_prompt_tokens)
    return (operations / rate + num_bytes / gpu.memory_rate) / run.tensor_parallel


def _decoding_steps(run: Run, rows: float) -> float:
    """Return the decoding steps: the longest completion of each batch, or with vLLM continuous batching."""
    if run.sampler == "transformers":
        groups_at_once = max(1, run.max_batch_size // run.group_size)
        return math.ceil(rows / run.group_size / groups_at_once) * run.completion_tokens
    at_once: float = run.max_batch_size
    if run.cache_bytes:
        tokens = run.cache_bytes / run.shape.kv_bytes_per_token(run.element_bytes)
        at_once = max(1.0, tokens / (run.mean_prompt_tokens / run.group_size + run.mean_completion_tokens))
    if rows <= at_once:
        return run.completion_tokens
    return rows * run.mean_completion_tokens / at_once + run.completion_tokens - run.mean_completion_tokens


def forward_flops(run: Run, completions: float) -> float:
    """Return the operations of one forward pass over completions and their prompts.

    As components/policy/flops.py counts them: prompts once per group, the output layer for completions alone.
    """
    shape, prompt = run.shape, run.mean_prompt_tokens
    completion = run.completion_tokens if run.padded else run.mean_completion_tokens
    prompts = completions / (run.group_size if run.shared_prompts else 1)
    products = shape.active_weights * (prompts * prompt + completions * completion)
    products += shape.head_weights * completions * completion
    pairs = prompts * prompt**2 / 2 + completions * completion * (prompt + completion / 2)
    return 2.0 * products + 4.0 * shape.query_size * shape.num_layers * pairs
