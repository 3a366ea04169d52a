"""Runs to plan: a model of 7 billion parameters unless a test says otherwise."""

from dataclasses import replace
from typing import Any

from components.shared.model_shape import KNOWN_MODELS
from pipelines.plan.run import Run

SEVEN_B = KNOWN_MODELS["deepseek-7b"]
NUM_PARAMETERS = 6_910_365_696
RUN = Run(
    shape=SEVEN_B,
    num_gpus=8,
    prompts=16,
    group_size=64,
    prompt_tokens=1024,
    completion_tokens=1024,
    mean_prompt_tokens=256,
    mean_completion_tokens=512,
    zero_stage=2,
    element_bytes=2,
    gradient_checkpointing=True,
    micro_batch_tokens=16384,
    reference="replicated",
    sampler="transformers",
    max_batch_size=512,
)


def run(num_gpus: int = 8, **changes: Any) -> Run:
    """Return the run with other values."""
    return replace(RUN, num_gpus=num_gpus, **changes)
