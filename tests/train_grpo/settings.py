"""Settings of a small GRPO run."""

from typing import Any

from components.train_grpo.config import TrainGRPOConfig
from tests import tiny


def grpo_config(**changes: Any) -> TrainGRPOConfig:
    """Return settings for the tiny model, with `changes`: values by key, `section__key` for one in a section."""
    fields: dict[str, Any] = {
        "seed": 1,
        "num_iterations": 1,
        "num_steps": 3,
        "prompts_per_step": 3,
        "group_size": 4,
        "minibatches_per_rollout": 1,
        "updates_per_rollout": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 1,
        "final_learning_rate_fraction": 0.1,
        "completions_kept_per_step": 2,
        "prompts": {"source_weights": {}, "curriculum": None, "max_resampling_rounds": 0},
        "sampling": {"temperature": 1.0, "max_new_tokens": 16, "max_batch_size": 64, "truncated": "score"},
        "reward": {
            "weights": {"accuracy": 1.0},
            "supervision": "outcome",
            "combination": "before_normalisation",
            "max_unscorable_fraction": 0.1,
            "overlong_buffer_tokens": 0,
            "repetition_ngram_tokens": 0,
            "model": None,
        },
        "advantage": {"estimator": "z_score"},
        "loss": {
            "aggregation": "sequence_mean",
            "ratio": "token",
            "clip": {"low": 0.2, "high": 0.2, "dual": None},
            "kl": {"coefficient": 0.04, "estimator": "k3", "placement": "loss"},
            "entropy_coefficient": 0.0,
        },
        "sampler": {
            "vllm": None,
            "servers": None,
            "overlap": False,
            "max_importance_weight": None,
            "max_mismatch": 1e-3,
        },
        "reference": "whole",
        "checkpoint": tiny.CHECKPOINT,
        "engine": tiny.engine_config().model_dump(),
    }
    for path, value in changes.items():
        section: Any = fields
        *outer, key = path.split("__")
        for name in outer:
            section = section[name]
        section[key] = value
    return TrainGRPOConfig.model_validate(fields)
