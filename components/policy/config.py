"""Configuration of training, shared by SFT and GRPO; no torch here, so that params are checked in an instant."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from components.shared.config import Config, Operational

Dtype = Literal["float32", "bfloat16"]
Schedule = Literal["linear", "cosine", "constant"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class CheckpointConfig(Config):
    """Checkpoints of an unfinished run, from which it is resumed."""

    every_steps: Annotated[int, Operational] = Field(20, gt=0)
    """Steps between checkpoints; another is written when the run is asked to stop."""
    keep_last: Annotated[int, Operational] = Field(2, gt=0)
    """Checkpoints that are kept; older ones are removed."""
    keep_best: bool = True
    """Whether the result is the policy with the best validation accuracy (ties go to the earliest), whose checkpoint is
    also kept. Otherwise, and without validation, the result is the policy after the last step."""
    grace_s: Annotated[float, Operational] = Field(600, gt=0)
    """Time to finish the step and write a checkpoint after a request to stop; after it the process exits at once."""


class WandbConfig(Config):
    """Weights & Biases; WANDB_API_KEY, WANDB_BASE_URL and WANDB_MODE are read from the environment."""

    project: str = Field(min_length=1)
    """Project of the runs."""
    entity: str | None = Field(None, min_length=1)
    """User or team that the project belongs to; null for the user's default."""


class MlflowConfig(Config):
    """MLflow; MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME and _PASSWORD are read from the environment."""

    uri: str = Field(min_length=1)
    """Tracking server, `https://mlflow.example`, or database, `sqlite:////home/ada/mlflow.db`."""
    experiment: str = Field("grpo-pipeline", min_length=1)
    """Experiment of the runs; created if it does not exist."""

    @field_validator("uri")
    @classmethod
    def _is_no_folder(cls, uri: str) -> str:
        if uri.startswith(("file:", "/", ".")):
            raise ValueError("is a folder, to which MLflow no longer writes; name a file: sqlite:////PATH/mlflow.db")
        return uri


class TrackingConfig(Config):
    """Experiment trackers that receive the metrics of each training step."""

    tensorboard: bool = False
    """Whether event files are written for TensorBoard."""
    wandb: WandbConfig | None = None
    """Weights & Biases; null for none."""
    mlflow: MlflowConfig | None = None
    """MLflow; null for none."""


ALL_LINEAR = "all-linear"
"""As the only target, it means every linear layer except the output layer."""


class LoraConfig(Config):
    """Training of low-rank adapters beside frozen weights (lora.py)."""

    rank: int = Field(16, gt=0)
    """Inner size of the two matrices of an adapter."""
    alpha: float = Field(32, gt=0)
    """Scale of adapters: the product of the two matrices is multiplied by alpha / rank."""
    targets: list[str] = Field([ALL_LINEAR], min_length=1)
    """Names of the layers that get adapters, such as q_proj and v_proj, in every block; or `all-linear` alone."""

    @model_validator(mode="after")
    def _all_linear_is_alone(self) -> "LoraConfig":
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"targets: {ALL_LINEAR} means all layers; remove it or the other targets")
        return self


class EngineConfig(Config):
    """How the model is trained: processes, sharding, precision and memory."""

    num_processes: Annotated[int, Operational] = Field(1, gt=0)
    """Processes that train together, one per GPU."""
    deadline_s: Annotated[float, Operational] = Field(1800, gt=0)
    """Time that a process waits for the others before the run stops and names the missing ones. It must exceed the
    difference between the rollout times of two processes."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], Operational] = 2
    """What DeepSpeed shards over processes: 0 nothing, 1 the optimizer, 2 also gradients, 3 also weights. For a single
    process in fp32 without offloading, 1 and 2 mean 0."""
    offload: Annotated[Literal["none", "optimizer", "all"], Operational] = "none"
    """What is kept in host memory: nothing, the optimizer state (`optimizer`), or also unused weights (`all`)."""
    lora: LoraConfig | None = None
    """Adapters to train instead of the weights, merged into them wherever a model is saved; null trains the weights."""
    quantise: Literal["nf4"] | None = None
    """Type of the frozen weights under adapters: `nf4`, 4 bits each (QLoRA, arXiv 2305.14314), which are converted to
    `precision` to compute; null keeps them in `precision`. Saved models and samplers have the rounded weights."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Type of weights and activations; bf16 keeps fp32 master weights in the optimizer."""
    gradient_checkpointing: Annotated[bool, Operational] = True
    """Whether activations are recomputed in the backward pass: less memory for one more forward pass."""
    micro_batch_tokens: Annotated[int, Operational] = Field(16384, gt=0)
    """Tokens that go through the model at once, the prompt of a group counted once; affects memory, not the result.
    A group that does not fit is split, and its prompt computed once per part."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay per step of the running means of the gradient and of its square."""
    epsilon: float = Field(1e-8, gt=0)
    """Constant that AdamW adds to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW, for matrices only."""
    max_gradient_norm: float = Field(1.0, gt=0)
    """Norm to which the gradient of an optimizer step is clipped."""

    @property
    def dtype(self) -> Dtype:
        """Name of the type of weights and activations, for torch and vLLM."""
        return "bfloat16" if self.precision == "bf16" else "float32"

    @model_validator(mode="after")
    def _keys_fit_together(self) -> "EngineConfig":
        if self.quantise and self.lora is None:
            raise ValueError("quantise needs lora: 4-bit weights are not trained, the adapters beside them are")
        if self.quantise and self.zero_stage == 3:
            raise ValueError("quantise needs zero_stage 2 or less: 4-bit weights are not sharded")
        # Below stage 2 DeepSpeed sums the micro-batches of a bf16 model in bf16, where many small ones are lost.
        if self.precision == "bf16" and self.zero_stage < 2:
            raise ValueError("precision bf16 needs zero_stage 2 or 3")
        if self.offload == "optimizer" and self.zero_stage < 1:
            raise ValueError("offload optimizer needs zero_stage 1 or more")
        if self.offload == "all" and self.zero_stage < 3:
            raise ValueError("offload all needs zero_stage 3")
        return self
