"""Iterative GRPO (arXiv 2402.03300, algorithm 1): the loop, in the paper's own order.

Shape suffixes:
    B  completions of the rollout, M  all their completion tokens, end to end
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.policy.engine import PolicyEngine
from components.policy.flops import Arithmetic, matrix_rate
from components.policy.logprobs import CompletionScorer, completion_logprobs
from components.policy.schedule import learning_rate
from components.policy.sequences import MicroBatch, micro_batches
from components.rollout.completion import Generate
from components.rollout.transformers_engine import TransformersEngine
from components.shared.progress import Progress, progress, say
from components.train_grpo.config import KLPlacement, TrainGRPOConfig
from components.train_grpo.experience import Experience, experience
from components.train_grpo.kl import kl_to_reference
from components.train_grpo.metrics import completion_records, rollout_figures
from components.train_grpo.prompts import Prompts
from components.train_grpo.replay import Replay
from components.train_grpo.reward_model import Judged
from components.train_grpo.rollout import Group, Rollout, Score, roll_out
from components.train_grpo.scoring import Scorer
from components.train_grpo.tally import Tally
from components.train_grpo.unscorable import refuse_unscorable
from components.train_grpo.update import minibatches, token_data, update

_STAGE = "train_grpo"


@dataclass
class History:
    """What a run leaves behind beside the policy."""

    curves: list[dict[str, float | None]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    reward_model: list[dict[str, float | None]] = field(default_factory=list)


class Trainer:
    """A run: the policy under training, the reference it is tethered to, and what rewards it."""

    def __init__(
        self,
        config: TrainGRPOConfig,
        checkpoint: Checkpoint,
        *,
        policy: PolicyEngine,
        reference: CompletionScorer | None,
        scorer: Scorer,
        prompts: Prompts,
        arithmetic: Arithmetic,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.policy = policy
        self.reference = reference
        self.reward_model = scorer.reward_model
        self.prompts = prompts
        self.history = History()
        self.generate: Generate = TransformersEngine(checkpoint, config.sampling.max_batch_size)
        self._score: Score = scorer
        self._replay = Replay()
        self._judged: list[Judged] = []
        self._arithmetic = arithmetic
        self._matrix_rate = matrix_rate(checkpoint.device, checkpoint.model.dtype)

    def run(self) -> History:
        """Run all outer iterations."""
        steps_per_iteration = self.config.num_steps // self.config.num_iterations
        self._start_reward_model()
        with progress(_STAGE, self.config.num_steps) as shown:
            for iteration in range(self.config.num_iterations):
                if iteration:
                    self._reset_reference()
                retrained = self.reward_model is not None and iteration + 1 < self.config.num_iterations
                for step in range(steps_per_iteration):
                    self._step(iteration * steps_per_iteration + step + 1, shown, retrained=retrained)
                if retrained:
                    self._retrain_reward_model(iteration + 1)
        return self.history

    def _roll_out(self, name: str) -> Rollout:
        seed = f"{self.config.seed}/{name}"
        rollout = roll_out(self.config, self.prompts, self.generate, self._score, seed=seed)
        refuse_unscorable(self.config, rollout.sampled)
        return rollout

    def _step(self, step: int, shown: Progress, *, retrained: bool) -> None:
        """Lines 5 to 11: sample and score groups, compute advantages, update the policy.

        What is sampled is kept where the reward model is `retrained` after this iteration.
        """
        started = time.monotonic()
        rollout = self._roll_out(f"step {step}")
        if retrained:
            self._judged += _verdicts(rollout.sampled)
        updated, timing = self._learn(rollout, step) if rollout.trained else self._learn_nothing(step)
        row = {"step": step, **rollout_figures(self.config, rollout, self.checkpoint.config.answer), **updated}
        self.history.curves.append(_known(row))
        self.history.timings.append(self._timing(step, rollout, timing, time.monotonic() - started))
        shown.advance(
            reward=row["reward"],
            accuracy=row["accuracy"],
            length=row["completion_length_tokens"],
            kl=row["kl"],
            tokens_per_s=self.history.timings[-1]["tokens_per_s"],
        )

    def _learn(self, rollout: Rollout, step: int) -> tuple[dict[str, float], dict[str, float]]:
        started = time.monotonic()
        device = self.checkpoint.device
        given, old_logprobs_M, reference_logprobs_M = self._experience(rollout.trained)
        kept = completion_records(self.config, rollout.trained, given, step=step)
        self.history.completions.extend(kept)
        parts = minibatches(self.config, given, device)
        batches = [batch for part in parts for batch in part.batches]
        if self.reference is not None and reference_logprobs_M is None and batches:
            reference_logprobs_M = completion_logprobs(self.reference, batches, len(given.advantages_M))
        data = token_data(
            given, old_logprobs_M=old_logprobs_M, reference_logprobs_M=reference_logprobs_M, device=device
        )
        referred = time.monotonic()
        figures = update(self.config, self.policy, parts, data, self._learning_rate(step))
        update_s = time.monotonic() - referred
        # A backward pass is two products for each one of the forward pass.
        operations = 3 * self.config.updates_per_rollout * self._arithmetic.forward_operations(batches)
        utilisation = operations / update_s / self._matrix_rate
        timing = {"reference_s": referred - started, "update_s": update_s, "update_flop_utilisation": utilisation}
        return figures, timing

    def _learn_nothing(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Pass over a rollout of which dynamic sampling has kept no group."""
        figures = Tally.of_nothing(self._learning_rate(step))
        return figures, {"reference_s": 0.0, "update_s": 0.0, "update_flop_utilisation": 0.0}

    def _experience(self, groups: Sequence[Group]) -> tuple[Experience, Tensor | None, Tensor | None]:
        """Compute advantages, and log-probabilities where the reward needs them: of the old policy and the reference.

        They are needed before anything else only for the KL in the reward, which is summed over each completion.
        """
        given = experience(self.config, groups)
        kl = self.config.loss.kl
        if self.reference is None or kl.placement is KLPlacement.LOSS:
            return given, None, None
        batches = self._micro_batches(given)
        old_M, reference_M = (
            completion_logprobs(scorer, batches, len(given.advantages_M)) for scorer in (self.policy, self.reference)
        )
        kl_M = kl_to_reference(old_M, reference_M, torch.ones_like(old_M), kl.estimator)
        kl_B = torch.stack([part.sum() for part in kl_M.cpu().split(given.num_tokens_B.tolist())])
        return experience(self.config, groups, kl.coefficient * kl_B), old_M, reference_M

    def _micro_batches(self, given: Experience) -> list[MicroBatch]:
        return micro_batches(
            given.sequences_B, max_tokens=self.config.engine.micro_batch_tokens, device=self.checkpoint.device
        )

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step - 1,
            peak=self.config.learning_rate,
            warmup_steps=self.config.warmup_steps,
            num_steps=self.config.num_steps,
            final_fraction=self.config.final_learning_rate_fraction,
        )

    def _reset_reference(self) -> None:
        """Line 3: the policy becomes the reference."""
        if self.reference is not None:
            with self.policy.whole_weights():
                self.reference.model.load_state_dict(self.checkpoint.model.state_dict())
            say(_STAGE, "a new iteration begins: the policy is the reference now")

    def _start_reward_model(self) -> None:
        """Fit a new reward model to rollouts of the reference before anything is learned from its rewards."""
        if self.reward_model is None:
            return
        for number in range(self.reward_model.config.initial_rollouts):
            self._judged += _verdicts(self._roll_out(f"initial {number}").sampled)
        if self._judged:
            self._retrain_reward_model(0)

    def _retrain_reward_model(self, iteration: int) -> None:
        """Line 12: train the reward model on this iteration's rollouts, with a share of earlier ones among them."""
        if self.reward_model is None:
            return
        new, self._judged = self._judged, []
        seed = self.config.seed + iteration
        mixed = self._replay.mix(new, fraction=self.reward_model.config.replay_fraction, seed=seed)
        figures = self.reward_model.fit(mixed, num_new=len(new), seed=seed)
        self._replay.add(new)
        self.history.reward_model.append({"iteration": iteration, **_known(figures)})
        say(_STAGE, "reward model trained: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))

    def _timing(self, step: int, rollout: Rollout, timing: dict[str, float], step_s: float) -> dict[str, float]:
        lengths = [
            len(scored.completion.tokens.completion_ids) for group in rollout.sampled for scored in group.scored_G
        ]
        phases = {"sampling_s": rollout.sampling_s, "scoring_s": rollout.scoring_s, **timing, "step_s": step_s}
        return {
            "step": step,
            **{name: round(value, 4) for name, value in phases.items()},
            "tokens_per_s": round(sum(lengths) / step_s, 1),
        }


def _known(figures: Mapping[str, float]) -> dict[str, float | None]:
    """The figures with None for what could not be measured, as JSON has no NaN."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def _verdicts(groups: Sequence[Group]) -> list[Judged]:
    """What a reward model learns from a rollout: what the verifier said of each step."""
    return [
        Judged(
            scored.completion.tokens,
            tuple(step.end for step in scored.steps),
            tuple(step.reward for step in scored.steps),
        )
        for group in groups
        for scored in group.scored_G
    ]
