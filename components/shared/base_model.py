"""The base model that a pipeline starts from, named in params: a Hugging Face id or folder, or `scratch:<preset>`."""

from dataclasses import dataclass

from pydantic import Field, field_validator

from components.shared.config import Config
from components.shared.grading.answer import AnswerPolicy

_SCRATCH_PREFIX = "scratch:"


@dataclass(frozen=True)
class ScratchModel:
    """The size of a small Qwen3 made on the spot, with a tokenizer built from the training problems."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocabulary_size: int | None
    """Entries of a byte-level BPE vocabulary; None reads whole words and whole numbers."""
    max_tokens: int
    """Longest prompt with its completion."""


SCRATCH_MODELS = {
    "tiny": ScratchModel(hidden_size=64, num_layers=2, num_heads=4, vocabulary_size=None, max_tokens=512),
    "words": ScratchModel(hidden_size=96, num_layers=3, num_heads=3, vocabulary_size=None, max_tokens=512),
    "math": ScratchModel(hidden_size=128, num_layers=3, num_heads=4, vocabulary_size=2048, max_tokens=1024),
}


class ModelConfig(Config):
    """Which model is post-trained, and how a question is put to it."""

    base: str = Field(min_length=1)
    """Hugging Face id or folder, or `scratch:<preset>` for a small model that needs no download."""
    prompt: str
    """Text put to the model; `{question}` stands for the question. One that holds `<think>` asks for thoughts."""
    answer: AnswerPolicy
    """Where a response to this prompt has to state its final answer."""

    @field_validator("base")
    @classmethod
    def _preset_exists(cls, base: str) -> str:
        preset = base.removeprefix(_SCRATCH_PREFIX)
        if preset != base and preset not in SCRATCH_MODELS:
            raise ValueError(
                f"no such preset; accepted: {', '.join(_SCRATCH_PREFIX + name for name in SCRATCH_MODELS)}"
            )
        return base

    @field_validator("prompt")
    @classmethod
    def _prompt_asks_the_question(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("must contain `{question}`")
        return prompt

    @property
    def scratch(self) -> ScratchModel | None:
        """The size of the model to make, or None where `base` is an existing one."""
        return (
            SCRATCH_MODELS[self.base.removeprefix(_SCRATCH_PREFIX)] if self.base.startswith(_SCRATCH_PREFIX) else None
        )

    @property
    def asks_for_thoughts(self) -> bool:
        """Whether a response is to think between `<think>` and `</think>` before it answers."""
        return "<think>" in self.prompt

    def ask(self, question: str) -> str:
        """Return the prompt for a question: the one place where it is made."""
        return self.prompt.replace("{question}", question)
