"""Settings of a small GRPO run."""

from typing import Any

from components.train_grpo.config import TrainGRPOConfig
from tests import tiny


def grpo_config(**changes: Any) -> TrainGRPOConfig:
    """Return settings for the tiny model, with `changes`."""
    fields = {
        "seed": 1,
        "num_steps": 3,
        "prompts_per_step": 3,
        "group_size": 4,
        "updates_per_rollout": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 1,
        "final_learning_rate_fraction": 0.1,
        "clip_range": 0.2,
        "kl_coefficient": 0.04,
        "completions_kept_per_step": 2,
        "sampling": {"temperature": 1.0, "max_new_tokens": 16, "max_batch_size": 64},
        "engine": tiny.engine_config().model_dump(),
    }
    return TrainGRPOConfig.model_validate({**fields, **changes})
