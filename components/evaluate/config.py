"""Configuration of evaluation."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from components.evaluate.protocols import PIPELINE, PROTOCOLS
from components.rollout.vllm.config import EnginesConfig
from components.shared.config import Config
from components.shared.problem import Split
from components.shared.tools import ToolsConfig


class EvaluateConfig(Config):
    """How the base, SFT and GRPO models are evaluated on the test problems."""

    seed: int = 1
    """Seed of sampling, and of the problems that are drawn; greedy decoding needs none."""
    protocol: str = PIPELINE
    """Words, solved examples and stop texts of the prompts, and the place of the answer: a name that `grpo-pipeline
    evaluate --list` prints. `pipeline` asks as in training (train_sft.model)."""
    system_prompt: str | None = None
    """System message before the question, for a protocol with chat; null for the default of the chat template."""
    tools: ToolsConfig | None = None
    """Environment in which the models answer; null for that of the protocol: the model's own with `pipeline`
    (train_sft.model.tools), Python if the protocol has `python` in its name, otherwise none."""
    split: Split = Split.TEST
    """Problems to answer: `test`, or `dev`, which tuning may use any number of times."""
    limit: int | None = Field(default=None, gt=0)
    """Number of problems to draw from the split; null for all."""
    num_samples: int = Field(4, ge=0)
    """Completions sampled per problem in addition to the greedy one; 0 for greedy only."""
    temperature: float = Field(0.7, gt=0)
    """Temperature of the sampled completions."""
    max_new_tokens: int = Field(1024, gt=0)
    """Tokens after which a completion is truncated; it then counts as wrong."""
    max_batch_size: int = Field(256, gt=0)
    """Completions generated at once; an evaluation that is killed goes on after the last batch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; `auto` is the checkpoint's."""
    vllm: EnginesConfig | None = None
    """vLLM in place of transformers: faster, and on several GPUs; null for transformers, on one GPU."""

    @field_validator("protocol")
    @classmethod
    def _protocol_exists(cls, name: str) -> str:
        if name not in PROTOCOLS:
            raise ValueError(f"no such protocol; accepted: {', '.join(PROTOCOLS)}")
        return name

    @field_validator("split")
    @classmethod
    def _is_held_out(cls, split: Split) -> Split:
        if split == Split.TRAIN:
            raise ValueError("problems that were trained on measure nothing")
        return split

    @model_validator(mode="after")
    def _system_prompt_is_sent(self) -> "EvaluateConfig":
        if self.system_prompt is not None and not PROTOCOLS[self.protocol].chat:
            chats = ", ".join(name for name, protocol in PROTOCOLS.items() if protocol.chat)
            raise ValueError(f"system_prompt needs a protocol with chat: {chats}")
        return self

    @property
    def num_gpus(self) -> int:
        """GPUs that an evaluation uses where there are any."""
        return self.vllm.num_gpus if self.vllm else 1
