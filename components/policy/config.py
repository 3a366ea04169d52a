"""Configuration of training, shared by SFT and GRPO; no torch here, so that params can be checked in an instant."""

from typing import Literal

from pydantic import Field, model_validator

from components.shared.config import Config


class EngineConfig(Config):
    """How the policy is held and updated."""

    zero_stage: Literal[0, 1, 2, 3]
    """What DeepSpeed shards over processes: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights."""
    precision: Literal["fp32", "bf16"]
    """Type of weights and activations; bf16 keeps fp32 master weights in the optimizer."""
    gradient_checkpointing: bool
    """Whether activations are computed again in the backward pass: one more forward pass, and memory for few."""
    micro_batch_tokens: int = Field(gt=0)
    """Tokens that go through the model at once, a group's prompt counted once; memory, never the result, depends on
    it. A group that does not fit is split, and its prompt computed once per part."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay of AdamW, on matrices only."""
    max_gradient_norm: float = Field(gt=0)
    """Norm to which the gradient of an optimizer step is clipped."""

    @model_validator(mode="after")
    def _micro_batches_add_up(self) -> "EngineConfig":
        # Below stage 2 DeepSpeed sums the micro-batches of a bf16 model in bf16, where many small ones are lost.
        if self.precision == "bf16" and self.zero_stage < 2:
            raise ValueError("precision bf16 needs zero_stage 2 or 3")
        return self
