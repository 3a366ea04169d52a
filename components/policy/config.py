"""Configuration of training, shared by SFT and GRPO; no torch here, so that params can be checked in an instant."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.shared.config import Config, Operational

Dtype = Literal["float32", "bfloat16"]


class CheckpointConfig(Config):
    """What is kept of a run that is not finished, to go on from."""

    every_steps: int = Field(20, gt=0)
    """Steps between checkpoints; there is one more when a run is told to stop."""
    keep_last: int = Field(2, gt=0)
    """Checkpoints kept, older ones removed."""
    keep_best: bool = True
    """Whether the one with the best accuracy (GRPO) or loss (SFT) of its step is kept beside the last."""
    grace_s: float = Field(600, gt=0)
    """Time in which a run that is told to stop ends its step and writes a checkpoint; then it ends without."""


ALL_LINEAR = "all-linear"
"""As the only target: every linear layer but the output layer."""


class LoraConfig(Config):
    """Training of small matrices beside weights that stay as they are (lora.py)."""

    rank: int = Field(16, gt=0)
    """Inner size of the pair of matrices beside a weight."""
    alpha: float = Field(32, gt=0)
    """Their product is multiplied by alpha / rank."""
    targets: list[str] = Field([ALL_LINEAR], min_length=1)
    """Names of the layers that are adapted, such as q_proj and v_proj, in every block; or `all-linear` alone."""

    @model_validator(mode="after")
    def _all_is_all(self) -> "LoraConfig":
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"targets: {ALL_LINEAR} stands for all layers, and by itself")
        return self


class EngineConfig(Config):
    """How the policy is held and updated."""

    num_processes: Annotated[int, Operational] = Field(1, gt=0)
    """Processes that train together, one for each GPU."""
    deadline_s: Annotated[float, Operational] = Field(1800, gt=0)
    """Time that a process waits for the others before the run stops and names those that are missing: more than any
    of them may need longer than another for a rollout."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], Operational] = 2
    """What DeepSpeed shards over processes: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights."""
    offload: Annotated[Literal["none", "optimizer", "all"], Operational] = "none"
    """What is kept in the memory of the host: the optimizer's state, or the weights between their uses too."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the weights, and added to them wherever a model is saved; null trains the
    weights."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Type of weights and activations; bf16 keeps fp32 master weights in the optimizer."""
    gradient_checkpointing: Annotated[bool, Operational] = True
    """Whether activations are computed again in the backward pass: one more forward pass, and memory for few."""
    micro_batch_tokens: Annotated[int, Operational] = Field(16384, gt=0)
    """Tokens that go through the model at once, a group's prompt counted once; memory, never the result, depends on
    it. A group that does not fit is split, and its prompt computed once per part."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW, on matrices only."""
    max_gradient_norm: float = Field(1.0, gt=0)
    """Norm to which the gradient of an optimizer step is clipped."""

    @property
    def dtype(self) -> Dtype:
        """Name of the type of weights and activations, for torch and vLLM."""
        return "bfloat16" if self.precision == "bf16" else "float32"

    @model_validator(mode="after")
    def _micro_batches_add_up(self) -> "EngineConfig":
        # Below stage 2 DeepSpeed sums the micro-batches of a bf16 model in bf16, where many small ones are lost.
        if self.precision == "bf16" and self.zero_stage < 2:
            raise ValueError("precision bf16 needs zero_stage 2 or 3")
        return self

    @model_validator(mode="after")
    def _offload_fits(self) -> "EngineConfig":
        needed = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(f"offload {self.offload} needs zero_stage {needed}" + ("" if needed == 3 else " or more"))
        return self
