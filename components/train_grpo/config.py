"""Configuration of Group Relative Policy Optimization."""

from pydantic import Field, model_validator

from components.policy.config import EngineConfig
from components.shared.config import Config


class SamplingConfig(Config):
    """How completions are drawn from the policy: exactly its distribution at one temperature."""

    temperature: float = Field(gt=0)
    """Divides the logits, when sampling and when training alike."""
    max_new_tokens: int = Field(gt=0)
    """Tokens after which a completion is cut off; it then counts as wrong."""
    max_batch_size: int = Field(gt=0)
    """Completions generated at once."""


class TrainGRPOConfig(Config):
    """How the reference checkpoint becomes the policy."""

    seed: int
    """Seed of the order of prompts and of sampling."""
    num_steps: int = Field(gt=0)
    """Rollouts: each samples completions once and updates the policy `updates_per_rollout` times."""
    prompts_per_step: int = Field(gt=0)
    """Groups per rollout."""
    group_size: int = Field(gt=1)
    """Completions sampled per prompt (G); they are each other's baseline."""
    updates_per_rollout: int = Field(gt=0)
    """Optimizer steps on each rollout (mu in the paper, which uses 1)."""
    learning_rate: float = Field(gt=0)
    """Peak of the schedule."""
    warmup_steps: int = Field(ge=0)
    """Rollouts in which the rate rises to its peak; it then falls in a line."""
    final_learning_rate_fraction: float = Field(ge=0, le=1)
    """Share of the peak that is left at the last rollout."""
    clip_range: float = Field(gt=0, lt=1)
    """How far from one the ratio to the sampling policy may move a token's gradient (epsilon in the paper)."""
    kl_coefficient: float = Field(ge=0)
    """Weight of the KL term that tethers the policy to the reference (beta; 0.04 in the paper)."""
    completions_kept_per_step: int = Field(ge=0)
    """Completions per rollout that are written down to be read later."""
    sampling: SamplingConfig
    engine: EngineConfig

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainGRPOConfig":
        if self.warmup_steps >= self.num_steps:
            raise ValueError("warmup_steps must be smaller than num_steps")
        return self
