"""What is done about a sampler whose probabilities are not exactly the trainer's.

An engine that samples with other kernels or another number type draws from pi_sampler, not from pi_old. The weight
pi_old / pi_sampler makes the mean over its samples that over pi_old; bounded above, it stays tame (truncated
importance sampling, https://fengyao.notion.site/off-policy-rl).

Shape suffixes:
    N  completion tokens
"""

from torch import Tensor

from components.shared.errors import PipelineError


class SamplerMismatchError(PipelineError):
    """The sampler does not draw from the policy that is trained."""


def importance_weights(old_logprobs_N: Tensor, sampler_logprobs_N: Tensor, *, maximum: float) -> Tensor:
    """Return min(pi_old / pi_sampler, maximum) of each token."""
    return (old_logprobs_N - sampler_logprobs_N).exp().clamp(max=maximum)


def mismatch(old_logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """Return |log pi_old - log pi_sampler| of each token, in nats."""
    return (old_logprobs_N - sampler_logprobs_N).abs()


def refuse_mismatch(mean_nats: float, *, maximum: float) -> None:
    """Stop a run whose sampler draws from another distribution, as one that keeps stale weights does."""
    # A mismatch that is not a number is none that is small.
    if not mean_nats <= maximum:
        raise SamplerMismatchError(
            f"the sampler's log-probabilities differ from the trainer's by {mean_nats:.4g} nats per token on average, "
            f"more than sampler.max_mismatch = {maximum:g}: it does not sample from the policy under training"
        )
