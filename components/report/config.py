"""What the promotion gate asks for, and how much the report shows."""

from pydantic import Field, field_validator

from components.shared.config import Config


class GateConfig(Config):
    """When a policy is good enough to be registered, decided on greedy answers to the same test problems."""

    target: tuple[str, ...] = Field(min_length=1)
    """Sources that GRPO has to improve on, taken together; every other source must only not get worse."""
    min_gain: float = Field(0.01, ge=0, lt=1)
    """Fraction of the target problems by which GRPO has to be right more often than SFT (0.02 is two points)."""
    max_p_value: float = Field(0.05, gt=0, le=1)
    """Probability up to which the exact McNemar test may give such a difference to chance."""
    margin: float = Field(0.01, ge=0, lt=1)
    """Fraction by which the true accuracy on another source may at worst have fallen (lower 95 % bound)."""
    enforce: bool = True
    """True refuses to register a policy that misses the gate; false registers it and says so."""

    @field_validator("target")
    @classmethod
    def _named_once(cls, target: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(target)) < len(target):
            raise ValueError("names a source twice")
        return target


class ReportConfig(Config):
    """The gate, and the size of the page."""

    gate: GateConfig
    num_examples: int = Field(16, ge=0)
    """Problems shown with the answers before and after GRPO."""
