"""The optimizer steps on one rollout.

Shape suffixes:
    N  completion tokens of a micro-batch, B  sequences of the rollout
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from components.policy.engine import PolicyEngine
from components.policy.logprobs import CompletionScorer, TokenScores
from components.policy.sequences import MicroBatch
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.loss import clipped_surrogate, is_clipped, kl_to_reference, sequence_mean_weights

Figures = dict[str, float]


class _Tally:
    """Sums over the completion tokens of an optimizer step, for its metrics."""

    def __init__(self) -> None:
        self.num_tokens, self.kl, self.entropy, self.clipped = 0, 0.0, 0.0, 0
        self.ratio_min, self.ratio_max = float("inf"), float("-inf")

    def add(self, scores: TokenScores, ratio_N: Tensor, kl_N: Tensor, clipped_N: Tensor) -> None:
        self.num_tokens += ratio_N.numel()
        self.kl += float(kl_N.sum())
        self.entropy += float(scores.entropy_N.sum())
        self.clipped += int(clipped_N.sum())
        self.ratio_min = min(self.ratio_min, float(ratio_N.min()))
        self.ratio_max = max(self.ratio_max, float(ratio_N.max()))

    def figures(self) -> Figures:
        return {
            "kl": self.kl / self.num_tokens,
            "entropy": self.entropy / self.num_tokens,
            "clip_fraction": self.clipped / self.num_tokens,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
        }


def update(
    config: TrainGRPOConfig,
    policy: PolicyEngine,
    reference: CompletionScorer,
    batches: Sequence[MicroBatch],
    advantages_B: Tensor,
    learning_rate: float,
) -> Figures:
    """Take `updates_per_rollout` optimizer steps on a rollout; return the metrics of the last.

    The log-probabilities of the policy that sampled are those of the first step, before it changed anything: they
    cost no forward of their own, and the ratio of that step is exactly one.
    """
    with torch.no_grad():
        reference_logprobs = [reference(batch).logprobs_N for batch in batches]
    sampling_logprobs: list[Tensor] = []
    weights_B = sequence_mean_weights(_num_tokens(batches, advantages_B))
    figures: Figures = {}
    for _ in range(config.updates_per_rollout):
        tally = _Tally()
        for index, batch in enumerate(batches):
            scores = policy(batch)
            if len(sampling_logprobs) == index:
                sampling_logprobs.append(scores.logprobs_N.detach())
            ratio_N = torch.exp(scores.logprobs_N - sampling_logprobs[index])
            advantages_N = advantages_B[batch.sequence_N]
            kl_N = kl_to_reference(scores.logprobs_N, reference_logprobs[index])
            surrogate_N = clipped_surrogate(ratio_N, advantages_N, clip_range=config.clip_range)
            objective_N = surrogate_N - config.kl_coefficient * kl_N
            policy.accumulate(-(weights_B[batch.sequence_N] * objective_N).sum())
            with torch.no_grad():
                tally.add(scores, ratio_N, kl_N, is_clipped(ratio_N, advantages_N, clip_range=config.clip_range))
        figures = {**tally.figures(), **policy.step(learning_rate)}
    return figures


def _num_tokens(batches: Sequence[MicroBatch], like_B: Tensor) -> Tensor:
    """Completion tokens of each sequence of the rollout."""
    num_tokens_B = torch.zeros_like(like_B)
    for batch in batches:
        num_tokens_B.index_add_(0, batch.sequence_N, torch.ones_like(batch.sequence_N, dtype=like_B.dtype))
    return num_tokens_B
