"""Configuration of evaluation."""

from pydantic import Field

from components.shared.config import Config


class EvaluateConfig(Config):
    """How a model is examined on the test problems."""

    seed: int
    """Seed of sampling; greedy decoding needs none."""
    num_samples: int = Field(ge=0)
    """Completions drawn per problem beside the greedy one; 0 for greedy only."""
    temperature: float = Field(gt=0)
    """Temperature of the drawn completions."""
    max_new_tokens: int = Field(gt=0)
    """Tokens after which a completion is cut off; it then counts as wrong."""
    max_batch_size: int = Field(gt=0)
    """Completions generated at once."""
