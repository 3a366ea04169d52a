"""Equation 3 of GRPO (arXiv 2402.03300) and its variants: from rewards to advantages, from tokens to the objective.

Pure functions of tensors. The variants of a formula are the cases of one `match` on a Literal of config.py; mypy finds
a missing case, because the function would then return None.

Shape suffixes, the same in all of train_grpo:
    P  prompts              G  completions per prompt            B = P * G, prompt after prompt
    K  rewards of a prompt's group: G for outcome supervision, the steps of all its completions for process
       supervision, padded with NaN
    T  tokens of one sequence
    M  completion tokens of all B completions, end to end        N  completion tokens of a micro-batch
NaN means that there is no reward: statistics leave it out, and its advantage is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.train_grpo.config import AdvantageEstimator, Aggregation, KLEstimator, LossConfig

_SPREAD_TOLERANCE = 1e-6
"""Rewards that differ by less count as equal: their standard deviation is rounding error, and no divisor."""
MAX_LOG_RATIO = 20.0
"""Bound on a log-ratio before it is exponentiated: one outlier must not overflow."""


# The objective of a token ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The completion tokens of a micro-batch, and the log-probability of each under four policies."""

    logprobs_N: Tensor
    """Under the policy that is trained, with gradient."""
    old_logprobs_N: Tensor
    """Under the policy before the updates on this rollout (pi_old), computed as in training."""
    sampler_logprobs_N: Tensor
    """Under the policy that sampled (pi_sampler), as the sampler computed them: pi_old, or one that is some updates
    older."""
    reference_logprobs_N: Tensor | None
    entropy_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    """Index in the rollout of each token's completion. All tokens of a completion are here, unless `loss_is_sum`."""
    num_tokens_B: Tensor
    """Completion tokens of each completion of the rollout."""


@dataclass(frozen=True)
class TokenObjective:
    """The objective of each token, to be maximised, and the terms that metrics need."""

    objective_N: Tensor
    ratio_N: Tensor
    kl_N: Tensor | None
    weight_N: Tensor | None
    """Factor of the policy loss by `corrections.importance_weights`, 0 for masked tokens; None without a correction."""


def token_objective(loss: LossConfig, tokens: Tokens, weight_N: Tensor | None) -> TokenObjective:
    """Return the weighted policy objective minus the KL penalty of each token: the bracket of equation 3."""
    ratio_N = policy_ratio(tokens, loss.ratio)
    objective_N = policy_objective(tokens, ratio_N, loss)
    if weight_N is not None:
        objective_N = objective_N * weight_N
    kl_N = None
    if tokens.reference_logprobs_N is not None:
        token_ratio_N = policy_ratio(tokens, "token")
        kl_N = kl_to_reference(tokens.logprobs_N, tokens.reference_logprobs_N, token_ratio_N, loss.kl.estimator)
        objective_N = objective_N - loss.kl.coefficient * kl_N
    return TokenObjective(objective_N, ratio_N, kl_N, weight_N)


# Advantages -----------------------------------------------------------------------------------------------------------


def advantages(rewards_PK: Tensor, estimator: AdvantageEstimator) -> Tensor:
    """Return the advantage of each reward over its group, (P, K): zero in a group whose rewards are all equal."""
    centered_PK, num_scored_P1 = _centered(rewards_PK)  # r - mean(r)
    num_others_P1 = (num_scored_P1 - 1).clamp(min=1)
    match estimator:
        case "z_score":  # over the biased standard deviation: the paper does not say which
            return centered_PK / _or_one(_std(centered_PK, num_scored_P1))
        case "z_score_bessel":  # over the unbiased one, as most implementations do
            return centered_PK / _or_one(_std(centered_PK, num_others_P1))
        case "mean_only":  # no preference for groups whose rewards hardly differ (Dr. GRPO, arXiv 2503.20783)
            return centered_PK
        case "leave_one_out":
            # r_i minus the mean of the others, which is K / (K - 1) times r_i - mean(r) (RLOO, arXiv 2402.14740). Not
            # divided by the standard deviation of the others: if these are nearly equal, it is a rounding error.
            return centered_PK * num_scored_P1 / num_others_P1
        case "batch_std":  # over the biased standard deviation of all rewards of the rollout (arXiv 2508.08221)
            all_centered, num_scored = _centered(rewards_PK.reshape(1, -1))  # the rollout as a single group
            return centered_PK / _or_one(_std(all_centered, num_scored))
        case "mean_scaled":  # over mean(r), zero where that is not positive (MaxRL, arXiv 2602.02710)
            mean_P1 = rewards_PK.nansum(1, keepdim=True) / num_scored_P1
            return torch.where(mean_P1 > 0, centered_PK / _or_one(mean_P1), 0.0)


def token_advantages(
    advantages_PK: Tensor, step_ends_PG: Sequence[Sequence[Sequence[int]]], num_tokens_PG: Sequence[Sequence[int]]
) -> Tensor:
    """Return for each token the sum of the advantages of the steps that end at it or later, (M,) (section 4.1.3).

    A step's end is the number of completion tokens up to and including its last one; tokens after the last step get
    zero. With outcome supervision, the completion is one step. As in the paper, more steps mean larger sums.
    """
    sums = []
    for advantages_K, step_ends_G, num_tokens_G in zip(advantages_PK, step_ends_PG, num_tokens_PG, strict=True):
        first = 0
        for step_ends, num_tokens in zip(step_ends_G, num_tokens_G, strict=True):
            at_step_ends_T = torch.zeros(num_tokens, dtype=advantages_PK.dtype)
            if num_tokens:
                at_step_ends_T.index_add_(0, torch.tensor(step_ends) - 1, advantages_K[first : first + len(step_ends)])
            sums.append(at_step_ends_T.flip(0).cumsum(0).flip(0))  # from the last token back to each
            first += len(step_ends)
    return torch.cat(sums)


def has_spread(rewards_PK: Tensor) -> Tensor:
    """Return whether the rewards of each group differ, (P,)."""
    unscored_PK = rewards_PK.isnan()
    highest_P = rewards_PK.masked_fill(unscored_PK, -torch.inf).amax(dim=1)
    lowest_P = rewards_PK.masked_fill(unscored_PK, torch.inf).amin(dim=1)
    return highest_P - lowest_P > _SPREAD_TOLERANCE


def _centered(rewards_PK: Tensor) -> tuple[Tensor, Tensor]:
    """Return r - mean(r), zero where there is no reward or no spread, and the number of rewards, at least 1, (P, 1)."""
    scored_PK = ~rewards_PK.isnan()
    num_scored_P1 = scored_PK.sum(dim=1, keepdim=True).clamp(min=1)
    mean_P1 = rewards_PK.nansum(dim=1, keepdim=True) / num_scored_P1
    counted_PK = scored_PK & has_spread(rewards_PK)[:, None]
    return torch.where(counted_PK, rewards_PK - mean_P1, 0.0), num_scored_P1


def _std(centered_PK: Tensor, divisor_P1: Tensor) -> Tensor:
    return (centered_PK.square().sum(1, keepdim=True) / divisor_P1).sqrt()


def _or_one(divisor: Tensor) -> Tensor:
    """Return the divisor, or 1 where it is not positive; the dividend is zero there, or its quotient is not used."""
    return torch.where(divisor > 0, divisor, 1.0)


# The ratio to the policy before the update, and the policy loss -------------------------------------------------------


def policy_ratio(tokens: Tokens, level: Literal["token", "sequence"]) -> Tensor:
    """Return pi / pi_old of each token (equation 3), or of its completion o.

    That of a completion is (pi(o) / pi_old(o))^(1/|o|) (GSPO, arXiv 2507.18071, equation 7).
    """
    log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
    if level == "sequence":
        mean_B = completion_sums(log_ratio_N, tokens) / tokens.num_tokens_B.clamp(min=1)
        log_ratio_N = mean_B[tokens.sequence_N]
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def completion_sums(values_N: Tensor, tokens: Tokens) -> Tensor:
    """Return the sum over each completion, (B,)."""
    zero_B = torch.zeros_like(tokens.num_tokens_B, dtype=values_N.dtype)
    return zero_B.index_add(0, tokens.sequence_N, values_N)


def policy_objective(tokens: Tokens, ratio_N: Tensor, loss: LossConfig) -> Tensor:
    """Return the term of each token whose gradient makes good completions likelier, to be maximised.

    The paper's epsilon is both `low` and `high`; DAPO's clip-higher (arXiv 2503.14476, section 3.1) raises `high`.
    """
    clip, advantages_N = loss.clip, tokens.advantages_N
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    match loss.policy_loss:
        case "clipped":  # min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) (equation 3)
            return torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        case "cispo":
            # clip(ratio) * A * log pi, the first factor without gradient (CISPO, arXiv 2506.13585): the clip bounds the
            # weight of a token, but every token has a gradient.
            return clipped_N.detach() * advantages_N * tokens.logprobs_N
        case "sapo":
            # 4/tau sigmoid(tau (ratio - 1)) * A, with a tau for each sign of A (SAPO, arXiv 2511.20347): the slope is A
            # at a ratio of 1, and falls towards 0 with the distance from it.
            tau_N = torch.full_like(ratio_N, loss.soft_clip.negative)
            tau_N.masked_fill_(advantages_N > 0, loss.soft_clip.positive)
            return 4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * advantages_N
        case "gmpo":
            # A times the geometric mean over the completion of the clipped ratio, which is min(ratio, 1 + high) if A is
            # positive, else max(ratio, 1 - low) (GMPO, arXiv 2507.20673).
            below_N, above_N = ratio_N.clamp(max=1 + clip.high), ratio_N.clamp(min=1 - clip.low)
            bounded_N = torch.where(advantages_N > 0, below_N, above_N)
            mean_B = completion_sums(bounded_N.log(), tokens) / tokens.num_tokens_B.clamp(min=1)
            return mean_B.exp()[tokens.sequence_N] * advantages_N
        case "dppo":  # ratio * A, without a gradient where the probability has changed too much (arXiv 2602.04879)
            high_N, low_N = beyond_clip(loss, tokens, ratio_N)
            return torch.where(high_N | low_N, 0.0, ratio_N * advantages_N)


def beyond_clip(loss: LossConfig, tokens: Tokens, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are beyond the upper bound, and which beyond the lower one; SAPO has no bounds.

    DPPO bounds the difference pi - pi_sampler instead of the ratio: the binary approximation of their total variation.
    """
    clip, advantages_N = loss.clip, tokens.advantages_N
    match loss.policy_loss:
        case "dppo":
            change_N = tokens.logprobs_N.detach().exp() - tokens.sampler_logprobs_N.exp()
            return (change_N > clip.high) & (advantages_N > 0), (change_N < -clip.low) & (advantages_N < 0)
        case "sapo":
            none_N = torch.zeros_like(ratio_N, dtype=torch.bool)
            return none_N, none_N
        case "clipped" | "cispo" | "gmpo":
            return (ratio_N > 1 + clip.high) & (advantages_N > 0), (ratio_N < 1 - clip.low) & (advantages_N < 0)


# The KL divergence from the reference, and the aggregation ------------------------------------------------------------


def kl_to_reference(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, ratio_N: Tensor, estimator: KLEstimator
) -> Tensor:
    """Return an estimate of KL(pi || pi_ref) for each token, from samples of pi (equation 4).

    With x = log(pi_ref / pi), k3 = exp(x) - x - 1 is never negative, and its mean is the divergence. The mean of its
    gradient, however, is the gradient of the *other* divergence, KL(pi_ref || pi); multiplied by the ratio pi / pi_old,
    `ratio_N`, it is that of KL(pi || pi_ref) (names: http://joschu.net/blog/kl-approx.html).
    """
    x_N = reference_logprobs_N - logprobs_N
    bounded_N = x_N.clamp(max=MAX_LOG_RATIO)  # in both terms, else the gradient above the bound has the wrong sign
    k3_N = torch.expm1(bounded_N) - bounded_N
    match estimator:
        case "k3":
            return k3_N
        case "k3_corrected":
            return ratio_N * k3_N


def token_weights(num_tokens_B: Tensor, aggregation: Aggregation, *, group_size: int, max_new_tokens: int) -> Tensor:
    """Return the weight in the loss of a token of each completion of an optimizer step, (B,).

    `num_tokens_B` has the completions of all micro-batches and processes of the step: the weighted sum of objectives is
    then the same however the step is split. Completions that are not in the loss, such as masked ones, have 0 tokens
    here and count in no mean; those whose advantage is zero do count.
    """
    in_loss_B = (num_tokens_B > 0).to(num_tokens_B.dtype)
    num_completions = in_loss_B.sum().clamp(min=1)
    match aggregation:
        case "sequence_mean":  # the double mean of equation 3, over groups, completions and tokens
            return in_loss_B / (num_completions * num_tokens_B.clamp(min=1))
        case "token_mean":  # every token counts alike, so long completions count for more (DAPO, equation 8)
            return in_loss_B / num_tokens_B.sum().clamp(min=1)
        case "prompt_mean":  # every prompt counts alike, and every token of its group (ScaleRL, arXiv 2510.13786)
            num_tokens_P = num_tokens_B.view(-1, group_size).sum(1)
            num_prompts = (num_tokens_P > 0).sum().clamp(min=1)
            return in_loss_B / (num_prompts * num_tokens_P.clamp(min=1)).repeat_interleave(group_size)
        case "constant":  # no completion's length changes its tokens' weight (Dr. GRPO)
            return in_loss_B / (num_completions * max_new_tokens)
