"""The section `report` of a params file: the promotion gate, and how much the report shows."""

from pydantic import Field, field_validator

from components.shared.config import Config


class GateConfig(Config):
    """When a policy is good enough to be registered, decided on greedy answers to the same test problems."""

    target: tuple[str, ...] = Field(min_length=1)
    """Sources on which GRPO has to improve, pooled; on every other source it must not get worse."""
    min_gain: float = Field(0.01, ge=0, lt=1)
    """Minimum gain in accuracy over SFT on the target, as a fraction (0.02 is two percentage points)."""
    max_p_value: float = Field(0.05, gt=0, le=1)
    """Maximum p-value of that gain in the exact McNemar test."""
    margin: float = Field(0.01, ge=0, lt=1)
    """Maximum loss of accuracy on any other source, as a fraction (lower bound of the 95 % interval)."""
    enforce: bool = True
    """Whether a policy that misses the gate is rejected; if false it is registered with a note."""

    @field_validator("target")
    @classmethod
    def _named_once(cls, target: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(target)) < len(target):
            raise ValueError("contains a source twice")
        return target


class ReportConfig(Config):
    """The gate, and the size of the page."""

    gate: GateConfig
    num_examples: int = Field(16, ge=0)
    """Problems shown with the answers before and after GRPO."""
