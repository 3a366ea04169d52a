"""Iterative GRPO (arXiv 2402.03300, algorithm 1): the loop, in the paper's own order.

Shape suffixes as in objective.py: B completions of the rollout, M all their completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.logprobs import completion_logprobs
from components.policy.lora import merged_state_dict
from components.policy.packing import MicroBatch, TokenSequence, pack_shard
from components.policy.training import learning_rate, memory_for_passes, memory_for_update
from components.shared.progress import Progress, progress, say
from components.train_grpo.config import KLPlacement, ReferencePlacement, TrainGRPOConfig
from components.train_grpo.metrics import (
    History,
    UpdateMetrics,
    completion_records,
    rollout_metrics,
    row_of,
)
from components.train_grpo.monitoring import StepTimer, UtilisationMeter, require_scorable
from components.train_grpo.objective import kl_to_reference
from components.train_grpo.reference import Reference
from components.train_grpo.reward_model import RewardModelTraining
from components.train_grpo.rollouts import Group, Rollout, Rollouts
from components.train_grpo.update import Experience, Minibatch, make_experience, split_minibatches, update

_STAGE = "train_grpo"


class Trainer:
    """A run: the policy under training, what it learns from, and the reference it is kept close to."""

    def __init__(
        self,
        config: TrainGRPOConfig,
        checkpoint: Checkpoint,
        *,
        policy: Policy,
        rollouts: Rollouts,
        reference: Reference | None,
        reward_model: RewardModelTraining | None,
        utilisation: UtilisationMeter,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.policy = policy
        self.rollouts = rollouts
        self.reference = reference
        self.reward_model = reward_model
        self.history = History()
        self._utilisation = utilisation
        self._ranks = policy.ranks

    def run(self, *, steps_done: int, after_step: Callable[[int], None]) -> History:
        """Run algorithm 1 from after `steps_done` steps to its end."""
        config = self.config
        steps_per_iteration = config.num_steps // config.num_iterations
        if not steps_done and self.reward_model:
            self._fit_first_reward_model(self.reward_model)
        with progress(_STAGE, config.num_steps) as bar:
            bar.skip(steps_done)
            for step in range(steps_done + 1, config.num_steps + 1):
                iteration, place = divmod(step - 1, steps_per_iteration)
                if iteration and not place:
                    self._begin_iteration(iteration)  # lines 2, 3 and 12
                timer = StepTimer()
                rollout = self.rollouts.of_step(step)  # lines 5 to 7
                require_scorable(config, rollout.sampled)
                if self.reward_model and iteration + 1 < config.num_iterations:
                    self.reward_model.collect(rollout.sampled)
                figures, batches = self._learn(rollout.trained, step, timer)  # lines 8 to 11
                self._record(step, rollout, figures, batches, timer, bar)
                after_step(step)
        return self.history

    def _begin_iteration(self, iteration: int) -> None:
        """Retrain the reward model on the completions of the last iteration, and make the policy the reference."""
        if self.reward_model:
            self.history.reward_model.append(row_of(self.reward_model.retrain(iteration)))
        if self.reference:
            with self.policy.gather_full_parameters():
                self.reference.load(merged_state_dict(self.checkpoint.model))
            say(_STAGE, "a new iteration begins: the policy is the reference now")

    def _fit_first_reward_model(self, training: RewardModelTraining) -> None:
        """Fit a new reward model to rollouts of the reference, before anything is learned from its rewards."""
        for number in range(training.model.config.initial_rollouts):
            rollout = self.rollouts.of_reference(number)
            require_scorable(self.config, rollout.sampled)
            training.collect(rollout.sampled)
        if training.collected:
            self.history.reward_model.append(row_of(training.retrain(0)))

    def _learn(
        self, groups: Sequence[Group], step: int, timer: StepTimer
    ) -> tuple[dict[str, float], Sequence[MicroBatch]]:
        """Compute advantages and update the policy; return the metrics and micro-batches of the update."""
        rate = self._learning_rate(step)
        if not groups:  # dynamic sampling has replaced all of them
            return UpdateMetrics.of_no_update(rate), []
        with timer.phase("reference_s"):
            experience, minibatches = self._prepare(groups)
        self.history.completions += completion_records(self.config, groups, experience.advantages_M, step=step)
        with timer.phase("update_s"), memory_for_update(_STAGE, self.config.engine):
            figures = update(self.config, self.policy, minibatches, experience, rate)
        return figures, [batch for minibatch in minibatches for batch in minibatch.shard.batches]

    def _prepare(self, groups: Sequence[Group]) -> tuple[Experience, list[Minibatch]]:
        """Return what the update learns from, with the log-probabilities of the reference."""
        kl, device = self.config.loss.kl, self.checkpoint.device
        if self.reference is None or kl.placement is KLPlacement.LOSS:
            experience = make_experience(self.config, groups, device)
        else:
            sequences_B = [scored.completion.tokens for group in groups for scored in group.scored_G]
            with self._memory_for_logprobs(), self.reference.onloaded() as reference:
                old_M, reference_M = (self._logprobs(scorer, sequences_B) for scorer in (self.policy, reference))
            experience = make_experience(
                self.config, groups, device, self._kl_penalties(old_M, reference_M, sequences_B)
            )
            experience.old_logprobs_M, experience.reference_logprobs_M = old_M, reference_M
        minibatches = split_minibatches(self.config, experience, ranks=self._ranks)
        if self.reference is not None and experience.reference_logprobs_M is None and minibatches:
            batches = [batch for minibatch in minibatches for batch in minibatch.shard.all_batches]
            with self._memory_for_logprobs(), self.reference.onloaded() as reference:
                experience.reference_logprobs_M = completion_logprobs(reference, batches, len(experience.advantages_M))
        return experience, minibatches

    def _kl_penalties(self, old_M: Tensor, reference_M: Tensor, sequences_B: Sequence[TokenSequence]) -> Tensor:
        """Return what each completion's reward is reduced by: beta times the sum of its tokens' KL estimates."""
        kl = self.config.loss.kl
        kl_M = kl_to_reference(old_M, reference_M, torch.ones_like(old_M), kl.estimator)
        parts = kl_M.cpu().split([len(sequence.completion_ids) for sequence in sequences_B])
        return kl.coefficient * torch.stack([part.sum() for part in parts])

    def _logprobs(self, scorer: Policy | Reference, sequences_B: Sequence[TokenSequence]) -> Tensor:
        """Return the log-probability of every completion token (M,): each process computes those of its shard."""
        shard = pack_shard(
            self._ranks,
            sequences_B,
            max_tokens=self.config.engine.micro_batch_tokens,
            device=self.checkpoint.device,
            indices=range(len(sequences_B)),
        )
        num_tokens = sum(len(sequence.completion_ids) for sequence in sequences_B)
        of_shard_M = completion_logprobs(scorer, shard.all_batches, num_tokens)
        of_ranks = self._ranks.all_gather(of_shard_M.cpu(), "the log-probabilities of a rollout")
        # Tokens of dummy batches were computed by several processes: the values differ only by rounding.
        return torch.stack(of_ranks).nanmean(0).to(self.checkpoint.device)

    def _record(
        self,
        step: int,
        rollout: Rollout,
        figures: Mapping[str, float],
        batches: Sequence[MicroBatch],
        timer: StepTimer,
        bar: Progress,
    ) -> None:
        row = {"step": step, **rollout_metrics(self.config, rollout, self.checkpoint.config.answer), **figures}
        self.history.curves.append(row_of(row))
        update_s = timer.seconds["update_s"]
        utilisation = self._utilisation.of_update(batches, update_s) if update_s else 0.0
        timing = timer.row(step, rollout, utilisation=utilisation, ranks=self._ranks)
        self.history.timings.append(timing)
        bar.advance(
            reward=row["reward"],
            accuracy=row["accuracy"],
            length=row["completion_length_tokens"],
            kl=row["kl"],
            tokens_per_s=timing["tokens_per_s"],
        )

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step - 1,
            peak=self.config.learning_rate,
            warmup_steps=self.config.warmup_steps,
            num_steps=self.config.num_steps,
            final_fraction=self.config.final_learning_rate_fraction,
        )

    def _memory_for_logprobs(self) -> AbstractContextManager[None]:
        """Name the keys that lower the memory for the reference or a forward pass where it runs out."""
        placement = self.config.reference
        remedies = []
        if placement is ReferencePlacement.REPLICATED:
            remedies = [f"set {_STAGE}.reference: sharded or offloaded (it is {placement})"]
        return memory_for_passes(_STAGE, self.config.engine, "the log-probabilities of a rollout", *remedies)

    def state(self) -> dict[str, Any]:
        """Return all that further steps depend on beside the policy and random numbers, as plain values."""
        return {
            "history": asdict(self.history),
            "rollouts": self.rollouts.state(),
            "reference": self.reference and self.reference.state(main=self._ranks.is_main),
            "reward_model": self.reward_model and self.reward_model.state(main=self._ranks.is_main),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.history = History(**state["history"])
        self.rollouts.restore(state["rollouts"])
        if self.reference and state["reference"] is not None:
            self.reference.load(state["reference"])
        if self.reward_model:
            self.reward_model.restore(state["reward_model"])
