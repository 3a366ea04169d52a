"""Runs to plan: a model of 7 billion parameters unless a test says otherwise."""

from dataclasses import replace
from typing import Any

from pipelines.plan.models import KNOWN_MODELS
from pipelines.plan.run import Engine, Run, Sampler, Work

SEVEN_B = KNOWN_MODELS["deepseek-7b"]
NUM_PARAMETERS = 6_910_365_696
WORK = Work(
    prompts=16,
    group_size=64,
    prompt_tokens=1024,
    completion_tokens=1024,
    mean_prompt_tokens=256,
    mean_completion_tokens=512,
)
ENGINE = Engine(zero_stage=2, element_bytes=2, gradient_checkpointing=True, micro_batch_tokens=16384)
SAMPLER = Sampler(engine="transformers", max_batch_size=512)
RUN = Run(SEVEN_B, num_gpus=8, work=WORK, engine=ENGINE, sampler=SAMPLER, reference="replicated")


def run(num_gpus: int = 8, **changes: Any) -> Run:
    """Return the run with other values, whichever part they are of."""
    work, engine, sampler = (
        {key: changes.pop(key) for key in list(changes) if hasattr(part, key)} for part in (WORK, ENGINE, SAMPLER)
    )
    return replace(
        RUN,
        num_gpus=num_gpus,
        work=replace(WORK, **work),
        engine=replace(ENGINE, **engine),
        sampler=replace(SAMPLER, **sampler),
        **changes,
    )
