"""The section `validate_data` of a params file: requirements on problems before a model is trained on them."""

from typing import Annotated

from pydantic import Field

from components.shared.config import Config, SameAs
from components.shared.model import NUM_SFT_STEPS, ModelConfig


class ValidateConfig(Config):
    """The section `validate_data`."""

    model: Annotated[ModelConfig, SameAs("train_sft", "model")]
    """The model to train: its prompt and tokenizer determine the length of a text."""
    num_sft_steps: Annotated[int, SameAs("train_sft", "num_steps")] = Field(NUM_SFT_STEPS, ge=0)
    """Steps of fine-tuning: with 0 no solution is imitated, so none has to declare its answer."""
    max_prompt_tokens: int = Field(1024, gt=0)
    """Maximum tokens of a prompt."""
    max_solution_tokens: int = Field(1024, gt=0)
    """Maximum tokens of a train solution, without the end-of-sequence token."""
    min_within_limit_fraction: float = Field(0.98, gt=0, le=1)
    """Minimum fraction of the texts within each of the two limits."""
    min_train_rows: int = Field(100, ge=1)
    """Minimum problems of the train split."""
    min_test_rows: int = Field(50, ge=1)
    """Minimum problems of the test split."""
    max_answer_share: float = Field(0.1, gt=0, le=1)
    """Maximum fraction of a split with the same answer, which a model gets right by always giving it."""
    min_worked_fraction: float = Field(0.9, ge=0, le=1)
    """Minimum fraction of the train solutions that show their work."""
