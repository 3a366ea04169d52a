"""The optimizer steps on one rollout (arXiv 2402.03300, equation 3 and algorithm 1, lines 10 and 11).

Shape suffixes as in objective.py: B completions of the rollout, M all their tokens, N tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel, TeacherTerm, TokenLogprobs, completion_logprobs
from components.policy.packing import MicroBatch, Shard, TokenSequence, pack_shard
from components.policy.parallel import Ranks
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.corrections import MASKED_COMPLETIONS, importance_weights, require_sampler_match
from components.train_grpo.metrics import UpdateMetrics, figures_without_update
from components.train_grpo.objective import (
    Tokens,
    advantages,
    token_advantages,
    token_objective,
    token_weights,
)
from components.train_grpo.rollouts import combined_rewards
from components.train_grpo.scoring import Group, is_masked


@dataclass
class Experience:
    """What a policy update learns from: every completion token of a rollout, on the device of the policy."""

    sequences_B: list[TokenSequence]
    in_loss_B: Tensor
    """Whether a completion is in the loss, and in what the loss is divided by: not if it is masked."""
    advantages_M: Tensor
    sampler_logprobs_M: Tensor
    """Under the policy that sampled, as the sampler computed them."""
    old_logprobs_M: Tensor
    """Under the policy before the update, computed as in training; NaN until they are known."""
    reference_logprobs_M: Tensor | None = None
    teacher_logprobs_M: Tensor | None = None
    """Under a teacher behind a server."""
    masked_B: Tensor | None = None
    """Whether `sampler.correction.mask` masks a completion; None without a mask of completions."""

    @property
    def num_tokens_B(self) -> list[int]:
        """Sampled tokens of each completion."""
        return [sequence.num_sampled for sequence in self.sequences_B]


def make_experience(config: TrainGRPOConfig, groups: Sequence[Group], device: torch.device) -> Experience:
    """Return what is known of a rollout before any model has scored it."""
    completions_B = [scored.completion for group in groups for scored in group.scored_G]
    advantages_M = rollout_advantages(config, groups).to(device)
    sampler_logprobs_M = torch.tensor([x for completion in completions_B for x in completion.logprobs]).double()
    return Experience(
        sequences_B=[completion.tokens for completion in completions_B],
        in_loss_B=torch.tensor([not is_masked(config, completion) for completion in completions_B]),
        advantages_M=advantages_M,
        sampler_logprobs_M=sampler_logprobs_M.to(device),
        old_logprobs_M=torch.full_like(advantages_M, torch.nan),
    )


def rollout_advantages(config: TrainGRPOConfig, groups: Sequence[Group]) -> Tensor:
    """Return the advantage of every completion token, (M,), in float64."""
    advantages_PK = advantages(combined_rewards(config, groups), config.advantage.estimator)
    step_ends_PG = [[[step.end for step in scored.steps] for scored in group.scored_G] for group in groups]
    num_tokens_PG = [[scored.completion.num_tokens for scored in group.scored_G] for group in groups]
    return token_advantages(advantages_PK, step_ends_PG, num_tokens_PG)


@dataclass(frozen=True)
class Minibatch:
    """This process's shard of an optimizer step, and the weight of each completion's tokens in its loss."""

    shard: Shard
    weights_B: Tensor


def split_minibatches(
    config: TrainGRPOConfig, experience: Experience, *, ranks: Ranks, padded: bool = False
) -> list[Minibatch]:
    """Split a rollout into optimizer steps of whole groups, without the completions that add nothing to the loss.

    Those still count in what the loss is divided by, unless they are masked. Where groups are few, so are the parts.
    """
    num_tokens_B, in_loss_B = torch.tensor(experience.num_tokens_B), experience.in_loss_B.cpu()
    contributes_B, device = in_loss_B, experience.advantages_M.device
    if not config.teacher and not config.loss.kl.coefficient:
        parts = (experience.advantages_M != 0).cpu().split(experience.num_tokens_B)
        contributes_B = in_loss_B & torch.stack([part.any() for part in parts])
    num_groups, count = len(num_tokens_B) // config.group_size, config.minibatches_per_rollout
    bounds = sorted({num_groups * part // count * config.group_size for part in range(count + 1)})
    minibatches = []
    for start, stop in pairwise(bounds):
        indices = [index for index in range(start, stop) if contributes_B[index]]
        if not indices:
            continue
        weights_B = torch.zeros(len(num_tokens_B), dtype=torch.float64)
        weights_B[start:stop] = token_weights(
            (num_tokens_B * in_loss_B)[start:stop].double(),
            config.loss.aggregation,
            group_size=config.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
        )
        shard = pack_shard(
            ranks,
            experience.sequences_B,
            max_tokens=config.engine.micro_batch_tokens,
            device=device,
            indices=indices,
            padded=padded,
            whole_sequences=not loss_is_sum(config),
        )
        minibatches.append(Minibatch(shard, weights_B.to(device)))
    return minibatches


def update(
    config: TrainGRPOConfig,
    policy: Policy,
    minibatches: Sequence[Minibatch],
    experience: Experience,
    learning_rate: float,
    teacher: LogprobModel | None = None,
) -> dict[str, float]:
    """Take an optimizer step on each minibatch, `updates_per_rollout` times; return the metrics of the last pass.

    Log-probabilities of the policy before the update are those of the first step, before it changed anything: they cost
    no forward pass of their own, and the ratio of that step is exactly one. Only the minibatches after it take one more
    forward pass, before the policy changes.
    """
    masked = {} if experience.masked_B is None else {MASKED_COMPLETIONS: float(experience.masked_B.double().mean())}
    if not minibatches:
        return {**figures_without_update(learning_rate), **masked}
    later = [batch for minibatch in minibatches[1:] for batch in minibatch.shard.all_batches]
    if later and experience.old_logprobs_M.isnan().any():
        experience.old_logprobs_M = completion_logprobs(policy, later, len(experience.old_logprobs_M))
    metrics, is_sum = UpdateMetrics(), loss_is_sum(config)
    for epoch in range(config.updates_per_rollout):
        of_rank, steps = UpdateMetrics(), []
        for number, minibatch in enumerate(minibatches):
            for batch in minibatch.shard.batches:
                is_first = epoch == number == 0
                token_loss = partial(_loss, config, batch, minibatch.weights_B, experience, of_rank, is_first=is_first)
                term = _teacher_term(config, teacher, batch, minibatch.weights_B)
                policy.learn(batch, token_loss, is_sum=is_sum, term=term)
                if term and term.kl_N is not None:
                    of_rank.add_teacher_kl(term.kl_N)
            for batch in minibatch.shard.dummies:  # other processes have more micro-batches, and wait for as many here
                policy.learn(batch, lambda scores, _: 0.0 * scores.logprobs_N.sum())
            metrics = UpdateMetrics.merged(policy.ranks.all_gather(of_rank, "the metrics of an update"))
            require_sampler_match(config, metrics.mean_mismatch)
            steps.append(policy.step(learning_rate))
    return {**metrics.figures(steps), **masked}


def _teacher_term(
    config: TrainGRPOConfig, teacher: LogprobModel | None, batch: MicroBatch, weights_B: Tensor
) -> TeacherTerm | None:
    """Return the divergence from the teacher of the tokens of a micro-batch, weighted like their objectives.

    It is that of whole distributions on the policy's own completions: generalised knowledge distillation (arXiv
    2306.13649) with the reverse divergence and samples of the student alone.
    """
    if teacher is None or config.teacher is None:
        return None
    return TeacherTerm(teacher, config.teacher.coefficient * weights_B[batch.sequence_N])


def loss_is_sum(config: TrainGRPOConfig) -> bool:
    """Return whether the loss of a token needs no other token of its completion, so that it is computed in chunks."""
    weight = config.sampler.correction.weight
    is_of_token = config.loss.ratio == "token" and config.loss.policy_loss != "gmpo"
    return is_of_token and (weight is None or weight.level == "token")


def _loss(
    config: TrainGRPOConfig,
    batch: MicroBatch,
    weights_B: Tensor,
    experience: Experience,
    metrics: UpdateMetrics,
    scores: TokenLogprobs,
    rows: slice,
    *,
    is_first: bool,
) -> Tensor:
    """Return the loss of some tokens of a micro-batch: minus the weighted sum of their objectives (equation 3)."""
    token_N, sequence_N = batch.token_N[rows], batch.sequence_N[rows]
    if is_first:
        experience.old_logprobs_M[token_N] = scores.logprobs_N.detach().double()

    def of_batch(values_M: Tensor) -> Tensor:
        return values_M[token_N].to(scores.logprobs_N.dtype)

    old_logprobs_N, advantages_N = of_batch(experience.old_logprobs_M), of_batch(experience.advantages_M)
    reference_M, teacher_M = experience.reference_logprobs_M, experience.teacher_logprobs_M
    if teacher_M is not None and config.teacher is not None:
        # Over samples of pi, log(pi / q) * grad log pi has the mean grad KL(pi || q): minus the log-ratio is the
        # advantage of on-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation).
        log_ratio_N = old_logprobs_N - of_batch(teacher_M)
        advantages_N = advantages_N - config.teacher.coefficient * log_ratio_N
        metrics.add_teacher_kl(log_ratio_N)
    tokens = Tokens(
        logprobs_N=scores.logprobs_N,
        old_logprobs_N=old_logprobs_N,
        sampler_logprobs_N=of_batch(experience.sampler_logprobs_M),
        reference_logprobs_N=None if reference_M is None else of_batch(reference_M),
        entropy_N=scores.entropy_N,
        advantages_N=advantages_N,
        sequence_N=sequence_N,
        num_tokens_B=torch.tensor(experience.num_tokens_B, device=sequence_N.device),
    )
    terms = token_objective(config.loss, tokens, importance_weights(tokens, config.sampler.correction))
    metrics.add(config.loss, tokens, terms)
    return -(weights_B[sequence_N].to(terms.objective_N.dtype) * terms.objective_N).sum()
