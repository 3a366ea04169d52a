from typing import Any

import pytest
from pydantic import ValidationError

from tests.train_grpo.settings import grpo_config

MODEL = {"base": "reference", "initial_rollouts": 0, "learning_rate": 1e-3, "epochs": 1, "replay_fraction": 0.1}
STEPS = {"reward__weights": {"steps": 1.0}, "reward__supervision": "process"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward__weights": {"accuracy": 1, "overlong": 1}},
            r"weights\.overlong and overlong_buffer_tokens go together",
        ),
        ({"reward__overlong_buffer_tokens": 4}, r"weights\.overlong and overlong_buffer_tokens go together"),
        ({"reward__weights": {"reward_model": 1}}, r"weights\.reward_model and model go together"),
        ({"reward__model": MODEL}, r"weights\.reward_model and model go together"),
        ({"reward__weights": {"steps": 1}}, r"weights\.steps needs supervision: process"),
        (
            {"reward__supervision": "process"},
            r"supervision: process needs weights\.steps or weights\.reward_model",
        ),
        (
            {**STEPS, "reward__combination": "after_normalisation"},
            "combination: after_normalisation needs supervision: outcome",
        ),
        ({"warmup_steps": 3}, "warmup_steps must be smaller than num_steps"),
        ({"num_iterations": 2}, "num_steps must be a multiple of num_iterations"),
        ({"minibatches_per_rollout": 2}, "prompts_per_step must be a multiple of minibatches_per_rollout"),
        (
            {"reward__weights": {"accuracy": 1, "overlong": 1}, "reward__overlong_buffer_tokens": 16},
            r"reward\.overlong_buffer_tokens must be smaller than sampling\.max_new_tokens",
        ),
        (
            {"loss__kl__placement": "reward", "reward__combination": "after_normalisation"},
            r"loss\.kl\.placement: reward needs reward\.combination: before_normalisation",
        ),
        ({"reward__weights": {}}, "weights"),
        ({"reward__weights": {"tidiness": 1}}, "tidiness"),
        ({"group_size": 1}, "group_size"),
        ({"loss__clip__low": 1.0}, "low"),
        ({"loss__clip__dual": 1.0}, "dual"),
        ({"sampler__max_importance_weight": 0.5}, "max_importance_weight"),
        ({"sampling__temperature": 0.0}, "temperature"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    """The message names the keys that do not fit."""
    with pytest.raises(ValidationError, match=message):
        grpo_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward__weights": {"accuracy": 1, "overlong": 1}, "reward__overlong_buffer_tokens": 15},
        STEPS,
        {"reward__weights": {"reward_model": 1}, "reward__model": MODEL},
        {"reward__weights": {"reward_model": 1}, "reward__model": MODEL, "reward__supervision": "process"},
        {"reward__weights": {"accuracy": 1, "format": 0.5}, "reward__combination": "after_normalisation"},
        {**STEPS, "loss__kl__placement": "reward"},
        {"warmup_steps": 2, "num_iterations": 3, "minibatches_per_rollout": 3},
        {"loss__clip__high": 5.0, "loss__clip__dual": 1.1, "sampler__max_importance_weight": 1.0},
    ],
)
def test_settings_at_the_bounds_are_accepted(changes: dict[str, Any]) -> None:
    """What is just allowed, and what goes together, is."""
    grpo_config(**changes)
