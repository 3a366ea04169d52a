"""What problems have to be like before a model is trained on them: the section `validate_data` of a params file."""

from typing import Annotated

from pydantic import Field

from components.shared.config import Config, SameAs
from components.shared.model import ModelConfig


class ValidateConfig(Config):
    """The section `validate_data`."""

    model: Annotated[ModelConfig, SameAs("train_sft", "model")]
    """The model that will be trained: its prompt and its tokenizer decide how long a text is."""
    max_prompt_tokens: int = Field(1024, gt=0)
    """Tokens of a prompt."""
    max_solution_tokens: int = Field(1024, gt=0)
    """Tokens of a train solution, without the end of the sequence."""
    min_within_limit_fraction: float = Field(0.98, gt=0, le=1)
    """Fraction of the texts that must keep to each of the two limits."""
    min_train_rows: int = Field(7000, ge=1)
    """Problems of the train split."""
    min_test_rows: int = Field(500, ge=1)
    """Problems of the test split."""
    max_answer_share: float = Field(0.1, gt=0, le=1)
    """Fraction of a split that may have one and the same answer: what a model gets right by always saying it."""
    min_worked_fraction: float = Field(0.9, ge=0, le=1)
    """Fraction of the train solutions that should show how their answer is found."""
