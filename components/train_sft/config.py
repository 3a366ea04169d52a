"""Configuration of supervised fine-tuning."""

from typing import Annotated

from pydantic import Field, model_validator

from components.policy.config import CheckpointConfig, EngineConfig, Schedule, TrackingConfig
from components.shared.config import Config, Operational, SameAs
from components.shared.model import NUM_SFT_STEPS, ModelConfig


class TrainSFTConfig(Config):
    """How the base model becomes the reference checkpoint."""

    model: ModelConfig
    """The base model and the prompt that every later stage uses."""
    seed: int = 1
    """Seed of the initial weights of a model from scratch and of adapters, and of the order of examples."""
    num_steps: int = Field(NUM_SFT_STEPS, ge=0)
    """Optimizer steps; with 0 there is no fine-tuning, and the base model is the reference."""
    examples_per_step: int = Field(64, gt=0)
    """Problems with their solutions per optimizer step."""
    learning_rate: float = Field(5e-6, gt=0, le=1)
    """Peak of the schedule."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the rate rises to its peak."""
    schedule: Schedule = "linear"
    """How the rate then falls to `final_learning_rate_fraction` of the peak: in a line, along half a cosine, or not at
    all (`constant`, which ignores that fraction)."""
    final_learning_rate_fraction: float = Field(0.1, ge=0, le=1)
    """Learning rate of the last step as a fraction of the peak."""
    max_tokens: int = Field(2048, gt=0)
    """Most tokens of a prompt with its solution; longer examples are left out, and counted."""
    checkpoint: Annotated[CheckpointConfig, Operational] = CheckpointConfig()
    tracking: Annotated[TrackingConfig, Operational, SameAs("train_grpo", "tracking")] = TrackingConfig()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainSFTConfig":
        if self.num_steps and self.warmup_steps >= self.num_steps:
            raise ValueError("warmup_steps must be smaller than num_steps")
        return self
