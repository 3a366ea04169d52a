"""Settings of a small GRPO run."""

from typing import Any

from components.train_grpo.config import RewardModelConfig, TrainGRPOConfig
from tests import tiny

_DEADLINES = {"start_deadline_s": 1, "request_deadline_s": 1, "lost_deadline_s": 1}
_VLLM = {"max_tokens": 64, "cache_gib": 0.1, "compile": False, "weights_by": "folder"}
SERVERS = {"num_servers": 1, "devices": None, **_VLLM, **_DEADLINES}
REWARD_MODEL = {"base": "reference", "initial_rollouts": 1, "learning_rate": 1e-3, "epochs": 1}


def reward_model_config(**changes: Any) -> TrainGRPOConfig:
    """Return settings of a run with a reward model, with `changes`: keys of its section or as of `grpo_config`."""
    own = RewardModelConfig.model_fields
    settings = {**REWARD_MODEL, **{key: value for key, value in changes.items() if key in own}}
    others = {key: value for key, value in changes.items() if key not in own}
    return grpo_config(**{"reward__weights": {"reward_model": 1.0}, "reward__model": settings, **others})


def grpo_config(**changes: Any) -> TrainGRPOConfig:
    """Return settings for the tiny model, with `changes`: values by key, `section__key` for one in a section."""
    fields: dict[str, Any] = {
        "num_steps": 3,
        "prompts_per_step": 3,
        "group_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 1,
        "final_learning_rate_fraction": 0.1,
        "logged_completions_per_step": 2,
        "sampling": {"max_new_tokens": 16, "max_batch_size": 64},
        "sampler": {"max_mismatch": 1e-3},
        "checkpoint": {**tiny.CHECKPOINT},
        # A single process does without DeepSpeed, which takes seconds to import.
        "engine": tiny.engine_config(zero_stage=2 if "engine__num_processes" in changes else 0).model_dump(),
    }
    for path, value in changes.items():
        section: Any = fields
        *outer, key = path.split("__")
        for name in outer:
            section = section.setdefault(name, {})
        section[key] = value
    fields["checkpoint"] = {"keep_in_registry": 0, **fields["checkpoint"]}
    return TrainGRPOConfig.model_validate(fields)
