import math

import pytest
import torch
from torch import Tensor

from components.train_grpo.config import RatioLevel
from components.train_grpo.ratio import policy_ratio, sequence_ratio, token_ratio

LEVELS = list(RatioLevel)


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Sequences 2 and 0 of an optimizer step of four, the tokens of each in turn as in a micro-batch.
SEQUENCE_N = torch.tensor([2, 2, 2, 0, 0])
NUM_TOKENS_B = torch.tensor([2, 7, 3, 1])


def test_the_ratio_of_a_token_is_that_of_its_probabilities() -> None:
    """By hand: 1/2 after 1/4, and 0.3 after 0.6."""
    logprobs, old = _tensor(0.5, 0.3).log(), _tensor(0.25, 0.6).log()
    found = policy_ratio(logprobs, old, torch.tensor([0, 0]), torch.tensor([2]), RatioLevel.TOKEN)
    assert found.tolist() == pytest.approx([2.0, 0.5], rel=1e-12)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_over_its_tokens() -> None:
    """By hand: (1 * 2 * 4)^(1/3) = 2 and (1/4 * 1)^(1/2) = 1/2, for each token of the sequence."""
    ratio_N = policy_ratio(
        _tensor(1, 2, 4, 0.25, 1).log() - 1,
        _tensor(1, 1, 1, 1, 1).log() - 1,
        SEQUENCE_N,
        NUM_TOKENS_B,
        RatioLevel.SEQUENCE,
    )
    assert ratio_N.tolist() == pytest.approx([2.0] * 3 + [0.5] * 2, rel=1e-12)


def test_the_ratio_of_a_sequence_is_equation_7_of_gspo() -> None:
    """It is (pi(o) / pi_old(o))^(1/|o|), with the probabilities of whole completions multiplied out."""
    generator = torch.manual_seed(3)
    probs, old = (torch.rand(5, dtype=torch.float64, generator=generator) for _ in range(2))
    found = sequence_ratio((probs / old).log(), SEQUENCE_N, NUM_TOKENS_B)
    first = (math.prod(probs[:3].tolist()) / math.prod(old[:3].tolist())) ** (1 / 3)
    second = (math.prod(probs[3:].tolist()) / math.prod(old[3:].tolist())) ** (1 / 2)
    assert found.tolist() == pytest.approx([first] * 3 + [second] * 2, rel=1e-12)


def test_the_gradient_of_a_sequences_ratio_is_spread_over_its_tokens() -> None:
    """Each token's log-probability moves the ratio of every token of its sequence by ratio / |o|, and no other's."""
    log_ratio = _tensor(0.3, -0.2, 0.5, -0.4, 0.1).requires_grad_()
    ratio_N = policy_ratio(log_ratio - 1, torch.full_like(log_ratio, -1), SEQUENCE_N, NUM_TOKENS_B, RatioLevel.SEQUENCE)
    for token in range(5):
        (gradient,) = torch.autograd.grad(ratio_N[token], log_ratio, retain_graph=True)
        own = SEQUENCE_N.eq(SEQUENCE_N[token]).double()
        expected = own * ratio_N[token].detach() / own.sum()
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_tokens_ratio_is_its_own() -> None:
    """A token's log-probability moves its ratio by the ratio, and no other token's."""
    log_ratio = _tensor(0.3, -0.2).requires_grad_()
    jacobian = torch.autograd.functional.jacobian(token_ratio, log_ratio)
    torch.testing.assert_close(jacobian, torch.diag(log_ratio.detach().exp()), rtol=1e-12, atol=1e-12)


def test_both_levels_agree_on_completions_of_one_token() -> None:
    """Where a sequence is a token there is one ratio."""
    log_ratio = _tensor(0.3, -0.2, 1.1)
    sequences, lengths = torch.tensor([1, 0, 2]), torch.tensor([1, 1, 1])
    torch.testing.assert_close(sequence_ratio(log_ratio, sequences, lengths), token_ratio(log_ratio))


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probabilities_have_ratio_exactly_one(level: RatioLevel) -> None:
    """On-policy there is no rounding in the ratio, in float32 as well."""
    logprobs = torch.log_softmax(torch.randn(5, generator=torch.manual_seed(1)), 0)
    assert policy_ratio(logprobs, logprobs, SEQUENCE_N, NUM_TOKENS_B, level).tolist() == [1.0] * 5


@pytest.mark.parametrize("level", LEVELS)
def test_an_outlier_does_not_overflow(level: RatioLevel) -> None:
    """Log-ratios of ten thousand stay numbers above zero, in the order they had."""
    shift = torch.tensor([1e4, 1e4, 1e4, -1e4, -1e4])
    found = policy_ratio(shift, torch.zeros(5), SEQUENCE_N, NUM_TOKENS_B, level)
    assert bool(found.isfinite().all())
    assert float(found[0]) > 1e6
    assert 0 < float(found[-1]) < 1e-6
