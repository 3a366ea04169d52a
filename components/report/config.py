"""The section `report` of a params file: the promotion gate, and how much the report shows."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from components.shared.config import Config, SameAs
from components.shared.versioning import MODEL_NAME, REGISTRY


class HealthConfig(Config):
    """Limits on a run besides accuracy. Fractions are of the policy's greedy answers to each source; 1 is no limit.

    Figures of training are means over the last tenth of the steps up to that of the policy.
    """

    max_truncated_fraction: float = Field(0.1, ge=0, le=1)
    """Maximum fraction of answers that reach the token limit."""
    max_unscorable_fraction: float = Field(0.05, ge=0, le=1)
    """Maximum fraction of answers that the grader could not score."""
    max_sampler_mismatch: float | None = Field(None, gt=0)
    """Nats per token; maximum mean difference of the sampler's log-probabilities from the trainer's; null for none."""
    min_entropy: float | None = Field(None, ge=0)
    """Nats per token; minimum entropy of the policy, below which its completions are all alike; null for none."""
    max_kl: float | None = Field(None, gt=0)
    """Nats per token; maximum KL divergence from the reference; null for none."""
    max_completion_tokens: float | None = Field(None, gt=0)
    """Maximum mean length of the sampled completions; null for none."""


class ChampionConfig(Config):
    """Requirements on the policy compared with the registry's version of the alias `champion`, if there is one."""

    margin: float = Field(0.05, ge=0, le=1)
    """Maximum loss of accuracy against the champion on any source, as a fraction; 1 shows the comparison only. The
    default is what 500 problems can exclude for a policy that is as good."""
    min_gain: float | None = Field(None, ge=0, lt=1)
    """Minimum gain over the champion on a target, as `gate.min_gain` is over SFT; null for none."""
    if_incomparable: Literal["pass", "miss"] = "pass"
    """Verdict if the champion was measured on other problems, or in another way."""


class GateConfig(Config):
    """When a policy is good enough to be registered, decided on greedy answers to the same test problems."""

    target: tuple[str, ...] = ()
    """Sources, all by default: GRPO has to improve on at least one of them. It may get worse on no source at all."""
    min_gain: float = Field(0.0, ge=0, lt=1)
    """Minimum gain in accuracy over SFT on a target, as a fraction (0.02 is two percentage points); the lower
    confidence bound of the gain has to reach it."""
    max_p_value: float = Field(0.05, gt=0, lt=0.5)
    """Level of all tests and bounds, which are one-sided: the maximum probability that a policy passes although it is
    no better, or worse by the margin."""
    margin: float = Field(0.02, ge=0, lt=1)
    """Maximum loss of accuracy on any source, as a fraction; excluded where the lower confidence bound is above it."""
    formatting_counts: bool = False
    """Whether a gain passes even if it vanishes on the problems that both models answered with finished and scorable
    text."""
    health: HealthConfig = HealthConfig()
    champion: ChampionConfig = ChampionConfig()
    expected_gain: float = Field(0.05, gt=0, lt=1)
    """Gain in accuracy on each target for which the gate is planned, as a fraction: preflight computes how likely such
    a policy passes."""
    expected_sft_accuracy: float = Field(0.5, ge=0, le=1)
    """Assumed accuracy of SFT, as a fraction."""
    expected_lost_fraction: float = Field(0.05, ge=0, lt=0.5)
    """Assumed fraction of the problems that are right after SFT and wrong after GRPO, on every source."""
    power: Literal["refuse", "warn"] = "refuse"
    """What to do before training if a policy as expected would pass with a probability below 80 %; a gate that is not
    enforced is only warned about."""
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

    gate: GateConfig = GateConfig()
    registry: Annotated[str, SameAs("register", "registry")] = REGISTRY
    """Registry of the champion with which the policy is compared, and of the uses of each test set."""
    name: Annotated[str, SameAs("register", "name")] = MODEL_NAME
    """Name of the model there."""
    num_examples: int = Field(16, ge=0)
    """Problems shown with the answers before and after GRPO."""
