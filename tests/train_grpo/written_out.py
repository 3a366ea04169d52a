"""Equation 3 of the paper and its variants as loops over completions and tokens, each term written out once more."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.policy.packing import TokenSequence
from components.train_grpo.config import KLPlacement, TrainGRPOConfig
from components.train_grpo.experience import Experience


def plain_scores(model: PreTrainedModel, sequence: TokenSequence) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one completion from the full logits of its sequence alone."""
    start = len(sequence.prompt_ids)
    logits_TV = model(torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])).logits[0].double()
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)[start - 1 : -1]
    chosen_T = torch.stack([logprobs_TV[t, token] for t, token in enumerate(sequence.completion_ids)])
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(dim=-1)


def _weight(config: TrainGRPOConfig, given: Experience, number: int) -> float:
    lengths = [
        len(sequence.completion_ids)
        for sequence, counted in zip(given.sequences_B, given.counted_B.tolist(), strict=True)
        if counted
    ]
    return {
        "sequence_mean": 1 / len(lengths) / len(given.sequences_B[number].completion_ids),
        "token_mean": 1 / sum(lengths),
        "constant": 1 / len(lengths) / config.sampling.max_new_tokens,
    }[config.loss.aggregation]


def _surrogate(config: TrainGRPOConfig, ratio: Tensor, advantage: float) -> Tensor:
    clip = config.loss.clip
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    if clip.dual is not None and advantage < 0:
        surrogate = surrogate.clamp(min=clip.dual * advantage)
    return surrogate


def _kl(config: TrainGRPOConfig, logprob: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    x = reference - logprob
    k3 = torch.exp(x) - x - 1
    return {"k1": -x, "k2": x**2 / 2, "k3": k3, "k3_corrected": ratio * k3}[config.loss.kl.estimator]


def plain_loss(config: TrainGRPOConfig, given: Experience, model: PreTrainedModel, data: dict[str, Tensor]) -> Tensor:
    """Minus the objective of all completions that count, from log-probabilities `old`, `sampler` and `reference`."""
    lengths = given.num_tokens_B.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for number, sequence in enumerate(given.sequences_B):
        if not given.counted_B[number]:
            continue
        logprobs_T, entropy_T = plain_scores(model, sequence)
        old_T, sampler_T, reference_T, advantages_T = (
            data[name].split(lengths)[number] for name in ("old", "sampler", "reference", "advantages")
        )
        of_sequence = torch.exp((logprobs_T - old_T).sum() / lengths[number])
        for t in range(lengths[number]):
            of_token = torch.exp(logprobs_T[t] - old_T[t])
            ratio = of_sequence if config.loss.ratio == "sequence" else of_token
            objective = _surrogate(config, ratio, float(advantages_T[t]))
            if config.sampler.max_importance_weight is not None:
                objective = objective * min(math.exp(old_T[t] - sampler_T[t]), config.sampler.max_importance_weight)
            if config.loss.kl.placement is KLPlacement.LOSS:
                kl = _kl(config, logprobs_T[t], reference_T[t], of_token)
                objective = objective - config.loss.kl.coefficient * kl
            objective = objective + config.loss.entropy_coefficient * entropy_T[t]
            total = total - _weight(config, given, number) * objective
    return total
