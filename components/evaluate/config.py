"""Configuration of evaluation."""

from pydantic import Field

from components.shared.config import Config


class EvaluateConfig(Config):
    """How the base, SFT and GRPO models are evaluated on the test problems."""

    seed: int = 1
    """Seed of sampling; greedy decoding needs none."""
    num_samples: int = Field(4, ge=0)
    """Completions sampled per problem in addition to the greedy one; 0 for greedy only."""
    temperature: float = Field(0.7, gt=0)
    """Temperature of the sampled completions."""
    max_new_tokens: int = Field(1024, gt=0)
    """Tokens after which a completion is truncated; it then counts as wrong."""
    max_batch_size: int = Field(256, gt=0)
    """Completions generated at once."""
