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
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.output_layer import TeacherTerm, TokenLogprobs
from components.policy.packing import MicroBatch, Shard, TokenSequence, pack_shard
from components.policy.parallel import Ranks
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.corrections import MASKED_COMPLETIONS, importance_weights, require_sampler_match
from components.train_grpo.metrics import UpdateMetrics, metrics_without_update
from components.train_grpo.objective import Tokens, advantages, token_advantages, token_objective, token_weights
from components.train_grpo.rollouts import combined_rewards
from components.train_grpo.scoring import Group, is_masked


@dataclass
class Experience:
    """What a policy update learns from: every completion token of a rollout, on the device of the policy."""

    sequences_B: list[TokenSequence]
    in_loss_B: Tensor
    """False for masked completions: they are neither in the loss nor in its divisor."""
    advantages_M: Tensor
    sampler_logprobs_M: Tensor
    """Under the policy that sampled, as the sampler computed them."""
    old_logprobs_M: Tensor
    """Under the policy before the update, computed as in training; NaN before they are computed."""
    reference_logprobs_M: Tensor | None = None
    teacher_logprobs_M: Tensor | None = None
    """Under a teacher on a server; None without one."""
    masked_B: Tensor | None = None
    """Whether `sampler.correction.mask` masks a completion; None if it masks no whole completions."""

    @property
    def num_tokens_B(self) -> list[int]:
        """Sampled tokens of each completion."""
        return [sequence.num_sampled for sequence in self.sequences_B]


def make_experience(config: TrainGRPOConfig, groups: Sequence[Group], device: torch.device) -> Experience:
    """Return the experience of a rollout, without the log-probabilities that take a forward pass."""
    completions_B = [scored.completion for group in groups for scored in group.scored_G]
    advantages_M = rollout_advantages(config, groups).to(device)
    sampler_logprobs = [logprob for completion in completions_B for logprob in completion.logprobs]
    return Experience(
        sequences_B=[completion.tokens for completion in completions_B],
        in_loss_B=torch.tensor([not is_masked(config, completion) for completion in completions_B]),
        advantages_M=advantages_M,
        sampler_logprobs_M=torch.tensor(sampler_logprobs).double().to(device),
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
    """Split a rollout into optimizer steps of whole groups, and pack this process's shard of each.

    Completions without a gradient are left out, but count in the divisor of the loss, unless they are masked. A step
    without any completion is left out, too, so there may be fewer than `minibatches_per_rollout`.
    """
    num_tokens_B, in_loss_B = torch.tensor(experience.num_tokens_B), experience.in_loss_B.cpu()
    device = experience.advantages_M.device
    has_gradient_B = in_loss_B
    if config.teacher is None and config.loss.kl.coefficient == 0:  # then only advantages give gradients
        advantages_B = experience.advantages_M.cpu().split(experience.num_tokens_B)
        has_gradient_B = in_loss_B & torch.stack([advantages_T.any() for advantages_T in advantages_B])
    num_groups, num_parts = len(num_tokens_B) // config.group_size, config.minibatches_per_rollout
    # A set, because bounds coincide if there are fewer groups than parts.
    group_bounds = sorted({num_groups * part // num_parts for part in range(num_parts + 1)})
    minibatches = []
    for start, stop in pairwise(bound * config.group_size for bound in group_bounds):
        indices = [index for index in range(start, stop) if has_gradient_B[index]]
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
    """Take an optimizer step on each mini-batch, `updates_per_rollout` times; return the metrics of the last pass.

    Old log-probabilities are those of the policy before the first step. For the first mini-batch, they come from the
    forward pass of that step itself, whose ratio is exactly one. For all others, an extra forward pass precedes it.
    """
    masked = {} if experience.masked_B is None else {MASKED_COMPLETIONS: float(experience.masked_B.double().mean())}
    if not minibatches:
        return {**metrics_without_update(learning_rate), **masked}
    later_batches = [batch for minibatch in minibatches[1:] for batch in minibatch.shard.all_batches]
    if later_batches and experience.old_logprobs_M.isnan().any():
        experience.old_logprobs_M = completion_logprobs(policy, later_batches, len(experience.old_logprobs_M))
    for epoch in range(config.updates_per_rollout):
        own_metrics, steps = UpdateMetrics(), []
        for number, minibatch in enumerate(minibatches):
            is_first = epoch == 0 and number == 0
            _add_gradients(config, policy, minibatch, experience, own_metrics, teacher, is_first=is_first)
            metrics = UpdateMetrics.merged(policy.ranks.all_gather(own_metrics, "the metrics of an update"))
            require_sampler_match(config, metrics.mean_mismatch)
            steps.append(policy.step(learning_rate))
    return {**metrics.figures(steps), **masked}


def _add_gradients(
    config: TrainGRPOConfig,
    policy: Policy,
    minibatch: Minibatch,
    experience: Experience,
    metrics: UpdateMetrics,
    teacher: LogprobModel | None,
    *,
    is_first: bool,
) -> None:
    """Accumulate the gradient of a mini-batch's loss in the policy, and add its tokens to `metrics`.

    A local teacher adds KL(pi || pi_teacher) to the loss of each token: generalised knowledge distillation (arXiv
    2306.13649) with the reverse divergence, on samples of the student alone.
    """
    weights_B = minibatch.weights_B
    for batch in minibatch.shard.batches:
        token_loss = partial(_loss, config, batch, weights_B, experience, metrics, is_first=is_first)
        term = None
        if teacher and config.teacher:
            term = TeacherTerm(teacher.logits_of(batch), config.teacher.coefficient * weights_B[batch.sequence_N])
        policy.learn(batch, token_loss, is_sum=loss_is_sum(config), term=term)
        if term and term.kl_N is not None:
            metrics.add_teacher_kl(term.kl_N)
    for batch in minibatch.shard.dummies:  # other processes have more micro-batches, and wait for as many passes here
        policy.learn(batch, lambda scores, _: 0.0 * scores.logprobs_N.sum())


def loss_is_sum(config: TrainGRPOConfig) -> bool:
    """Return whether each token's loss depends on no other token, so that it can be computed in chunks of tokens."""
    weight = config.sampler.correction.weight
    has_token_weight = weight is None or weight.level == "token"
    return has_token_weight and config.loss.ratio == "token" and config.loss.policy_loss != "gmpo"


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
    """Return minus the weighted sum of the objectives of a micro-batch's tokens `rows`; add them to `metrics`."""
    token_N, sequence_N = batch.token_N[rows], batch.sequence_N[rows]
    if is_first:
        experience.old_logprobs_M[token_N] = scores.logprobs_N.detach().double()

    def of_rows(values_M: Tensor) -> Tensor:
        return values_M[token_N].to(scores.logprobs_N.dtype)

    old_logprobs_N, advantages_N = of_rows(experience.old_logprobs_M), of_rows(experience.advantages_M)
    reference_M, teacher_M = experience.reference_logprobs_M, experience.teacher_logprobs_M
    if teacher_M is not None and config.teacher is not None:
        # On samples of pi, the mean of log(pi / q) * grad log pi is grad KL(pi || q). So -log(pi / q) acts as an
        # advantage: on-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation).
        log_ratio_N = old_logprobs_N - of_rows(teacher_M)
        advantages_N = advantages_N - config.teacher.coefficient * log_ratio_N
        metrics.add_teacher_kl(log_ratio_N)
    tokens = Tokens(
        logprobs_N=scores.logprobs_N,
        old_logprobs_N=old_logprobs_N,
        sampler_logprobs_N=of_rows(experience.sampler_logprobs_M),
        reference_logprobs_N=None if reference_M is None else of_rows(reference_M),
        entropy_N=scores.entropy_N,
        advantages_N=advantages_N,
        sequence_N=sequence_N,
        num_tokens_B=torch.tensor(experience.num_tokens_B, device=sequence_N.device),
    )
    terms = token_objective(config.loss, tokens, importance_weights(tokens, config.sampler.correction))
    metrics.add(config.loss, tokens, terms)
    return -(weights_B[sequence_N].to(terms.objective_N.dtype) * terms.objective_N).sum()
