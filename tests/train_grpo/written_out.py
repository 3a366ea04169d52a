"""Equation 3 of the paper and its variants as loops over completions and tokens, each term written out once more."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.policy.packing import TokenSequence
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.update import Experience
from tests.policy.plain import scores_alone


def is_sampled(sequence: TokenSequence) -> list[bool]:
    """Return for each token of a completion whether the policy sampled it, and no environment wrote it."""
    every = range(len(sequence.completion_ids))
    return [not any(start <= place < stop for start, stop in sequence.environment) for place in every]


def plain_scores(model: PreTrainedModel, sequence: TokenSequence) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the sampled tokens, from the full logits of each branch alone."""
    branches = [scores_alone(model, [branch], temperature=1.0)[is_sampled(branch)] for branch in sequence.branches]
    logprobs, entropies = torch.cat(branches).double().T
    return logprobs, entropies


def plain_loss(config: TrainGRPOConfig, experience: Experience, model: PreTrainedModel) -> Tensor:
    """Return minus the objective of all completions in the loss."""
    assert experience.reference_logprobs_M is not None
    lengths = [sum(is_sampled(sequence)) for sequence in experience.sequences_B]
    advantages_M = experience.advantages_M
    if config.teacher is not None and experience.teacher_logprobs_M is not None:
        to_teacher_M = experience.teacher_logprobs_M - experience.old_logprobs_M
        advantages_M = advantages_M + config.teacher.coefficient * to_teacher_M
    logprobs = (experience.old_logprobs_M, experience.sampler_logprobs_M, experience.reference_logprobs_M)
    parts = [values_M.split(lengths) for values_M in (*logprobs, advantages_M)]
    in_loss = [length * counts for length, counts in zip(lengths, experience.in_loss_B.tolist(), strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for number, sequence in enumerate(experience.sequences_B):
        if not experience.in_loss_B[number]:
            continue
        logprobs_T, _ = plain_scores(model, sequence)
        old_T, sampler_T, reference_T, advantages_T = (part[number] for part in parts)
        sequence_ratio = torch.exp((logprobs_T - old_T).sum() / lengths[number])
        for t in range(lengths[number]):
            token_ratio = torch.exp(logprobs_T[t] - old_T[t])
            ratio = sequence_ratio if config.loss.ratio == "sequence" else token_ratio
            objective = _policy_objective(config, logprobs_T[t], ratio, float(advantages_T[t]), float(sampler_T[t]))
            if config.loss.policy_loss == "gmpo":
                objective = _geometric_mean(config, logprobs_T - old_T, advantages_T.tolist()) * float(advantages_T[t])
            objective = objective * _correction(config, (old_T - sampler_T).tolist(), t)
            kl = _kl(config, logprobs_T[t], reference_T[t], token_ratio)
            objective = objective - config.loss.kl.coefficient * kl
            total = total - _weight(config, in_loss, number) * objective
    return total


def _correction(config: TrainGRPOConfig, log_ratio_T: list[float], t: int) -> float:
    weight, mask, factor = config.sampler.correction.weight, config.sampler.correction.mask, 1.0
    if weight is not None:
        product = math.prod(math.exp(each) for each in log_ratio_T)
        factor = math.exp(log_ratio_T[t]) if weight.level == "token" else product
        factor = factor if weight.max is None else min(factor, weight.max)
    if mask is not None and mask.level == "token" and not mask.low <= math.exp(log_ratio_T[t]) <= mask.high:
        return 0.0
    return factor


def _weight(config: TrainGRPOConfig, lengths: list[int], number: int) -> float:
    """Lengths are zero for what is not in the loss."""
    size, num_completions = config.group_size, sum(length > 0 for length in lengths)
    groups = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return {
        "sequence_mean": 1 / num_completions / lengths[number],
        "token_mean": 1 / sum(lengths),
        "prompt_mean": 1 / sum(any(group) for group in groups) / sum(groups[number // size]),
        "constant": 1 / num_completions / config.sampling.max_new_tokens,
    }[config.loss.aggregation]


def _geometric_mean(config: TrainGRPOConfig, log_ratio_T: Tensor, advantages_T: list[float]) -> Tensor:
    clip, product = config.loss.clip, torch.ones((), dtype=torch.float64)
    for log_ratio, advantage in zip(log_ratio_T, advantages_T, strict=True):
        ratio = log_ratio.exp()
        product = product * (ratio.clamp(max=1 + clip.high) if advantage > 0 else ratio.clamp(min=1 - clip.low))
    return product ** (1 / len(advantages_T))


def _policy_objective(
    config: TrainGRPOConfig, logprob: Tensor, ratio: Tensor, advantage: float, sampler: float
) -> Tensor:
    clip = config.loss.clip
    if config.loss.policy_loss == "sapo":
        tau = config.loss.soft_clip.positive if advantage > 0 else config.loss.soft_clip.negative
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if config.loss.policy_loss == "dppo":
        change = math.exp(float(logprob.detach())) - math.exp(sampler)
        is_beyond = change > clip.high if advantage > 0 else change < -clip.low
        return ratio * advantage * (0.0 if is_beyond else 1.0)
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    if config.loss.policy_loss == "cispo":
        return clipped.detach() * advantage * logprob
    return torch.minimum(ratio * advantage, clipped * advantage)


def _kl(config: TrainGRPOConfig, logprob: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    x = reference - logprob
    k3 = torch.exp(x) - x - 1
    return {"k3": k3, "k3_corrected": ratio * k3}[config.loss.kl.estimator]
