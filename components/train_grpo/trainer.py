"""Iterative GRPO (arXiv 2402.03300, algorithm 1): the loop, in the paper's own order.

Shape suffixes:
    B  completions of the rollout, M  all their completion tokens, end to end
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.flops import FlopCounter, measure_matmul_flops
from components.policy.logprobs import completion_logprobs
from components.policy.lora import merged_state_dict
from components.policy.packing import pack_shard
from components.policy.training import learning_rate, memory_for_passes, memory_for_update
from components.rollout.sampler import Sampler
from components.shared.problem import Problem
from components.shared.progress import Progress, progress, say
from components.shared.system_errors import explain_out_of_memory
from components.train_grpo.ahead import Ahead
from components.train_grpo.config import KLPlacement, TrainGRPOConfig
from components.train_grpo.experience import Experience, experience
from components.train_grpo.judged import Examples, Judged
from components.train_grpo.kl import kl_to_reference
from components.train_grpo.metrics import completion_records, rollout_figures
from components.train_grpo.plain_groups import from_plain, to_plain
from components.train_grpo.prompts import Prompts
from components.train_grpo.reference import Reference
from components.train_grpo.replay import Replay
from components.train_grpo.rollout import Drawn, Group, Rollout, Score, draw, gathered, roll_out, stream
from components.train_grpo.scoring import Scorer, is_masked
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
        policy: Policy,
        reference: Reference | None,
        sampler: Sampler,
        scorer: Scorer,
        prompts: Prompts,
        arithmetic: FlopCounter,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.ranks = policy.ranks
        self.policy = policy
        self.reference = reference
        self.reward_model = scorer.reward_model
        self.prompts = prompts
        self.history = History()
        self.sampler = sampler
        self._score: Score = scorer
        self._ahead = Ahead(self._draw) if config.sampler.overlap else None
        self._reference_is_reset = False
        self._replay = Replay()
        self._judged = Examples()
        self._arithmetic = arithmetic
        self._matrix_rate = measure_matmul_flops(checkpoint.device, checkpoint.model.dtype)

    def run(self, *, steps_done: int, after_step: Callable[[int], None]) -> History:
        """Run all outer iterations, without the steps that were done and restored."""
        steps_per_iteration = self.config.num_steps // self.config.num_iterations
        if not steps_done:
            self._start_reward_model()
        with progress(_STAGE, self.config.num_steps) as shown:
            shown.skip(steps_done)
            for step in range(steps_done + 1, self.config.num_steps + 1):
                iteration, place = divmod(step - 1, steps_per_iteration)
                if iteration and not place:
                    self._begin_iteration(iteration)
                last = iteration + 1 == self.config.num_iterations
                self._step(step, shown, retrained=self.reward_model is not None and not last)
                after_step(step)
        return self.history

    def _begin_iteration(self, iteration: int) -> None:
        """Retrain the reward model on what the last iteration has sampled, and reset the reference."""
        self._retrain_reward_model(iteration)
        self._reset_reference()

    def values(self) -> dict[str, Any]:
        """All that further steps depend on beside the policy and random numbers, as plain values."""
        return {
            "history": asdict(self.history),
            "prompts": self.prompts.state(),
            "replay": self._replay.state(),
            "judged": self._judged.state() if self.ranks.is_main else None,
            "ahead": self._groups_ahead(),
            "reference": self._reset_weights(),
            "reward_model": None if self.reward_model is None else self.reward_model.state_dict(),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from where `values` were taken."""
        self.history = History(**values["history"])
        self.prompts.restore(values["prompts"])
        self._replay.restore(values["replay"])
        self._judged = Examples.restored(values["judged"])
        if self._ahead and values["ahead"] is not None:
            self._ahead.put_back(Drawn([from_plain(each) for each in self.ranks.shard(values["ahead"])], 0.0, 0.0))
        if self.reference is not None and values["reference"] is not None:
            self.reference.load(values["reference"])
            self._reference_is_reset = True
        if self.reward_model is not None:
            self.reward_model.load_state_dict(values["reward_model"])

    def _reset_weights(self) -> dict[str, Tensor] | None:
        """Those of a reference that was reset, in the first process, which writes them."""
        if self.reference is None or not self._reference_is_reset:
            return None
        return self.reference.state(kept=self.ranks.is_main)

    def _groups_ahead(self) -> list[dict[str, Any]] | None:
        """The rollout that is sampled ahead, of all processes; None where there is none."""
        if self._ahead is None or not self._ahead.under_way:
            return None
        shares = self.ranks.all_gather(self._ahead.look().groups, "the end of sampling ahead")
        return [to_plain(group) for share in shares for group in share]

    def _draw(self, problems_P: Sequence[Problem], seed: str) -> Drawn:
        return draw(self.config, self.sampler.generate, self._score, problems_P, seed)

    def _roll_out(self, name: str) -> Rollout:
        seed = f"{self.config.seed}/{name}"
        rollout = roll_out(self.config, self.prompts, self._draw, seed=seed, ranks=self.ranks)
        refuse_unscorable(self.config, rollout.sampled)
        return rollout

    def _rollout_of_step(self, step: int) -> tuple[Rollout, float]:
        """Return the rollout to learn from, and how long the sampler's weights took to be brought up to date."""
        if self._ahead is None:
            sync_s = self.sampler.update_weights(step - 1)
            rollout = self._roll_out(f"step {step}")
            self.sampler.sleep()
            return rollout, sync_s
        if not self._ahead.under_way:
            self.sampler.update_weights(step - 1)
            self._begin_ahead(self._ahead, step)
        drawn = self._ahead.take()
        sync_s = self.sampler.update_weights(step - 1)
        if step < self.config.num_steps:
            self._begin_ahead(self._ahead, step + 1)
        groups = gathered(drawn, self.prompts, self.ranks)
        refuse_unscorable(self.config, groups)
        return Rollout(groups, groups, drawn.sampling_s, drawn.scoring_s), sync_s

    def _begin_ahead(self, ahead: Ahead, step: int) -> None:
        """Begin the rollout of a step with the weights that the sampler has."""
        problems_P = self.ranks.shard(self.prompts.draw(self.config.prompts_per_step))
        ahead.begin(problems_P, stream(f"{self.config.seed}/step {step}", 0, self.ranks))

    def _step(self, step: int, shown: Progress, *, retrained: bool) -> None:
        """Lines 5 to 11: sample and score groups, compute advantages, update the policy.

        What is sampled is kept where the reward model is `retrained` after this iteration.
        """
        started = time.monotonic()
        with self._memory_for_rollout():
            rollout, sync_s = self._rollout_of_step(step)
        if retrained:
            self._judged.extend(self._verdicts(rollout.sampled))
        updated, timing = self._learn(rollout, step) if rollout.trained else self._learn_nothing(step)
        row = {"step": step, **rollout_figures(self.config, rollout, self.checkpoint.config.answer), **updated}
        self.history.curves.append(_known(row))
        self.history.timings.append(
            self._timing(step, rollout, {"sync_s": sync_s, **timing}, time.monotonic() - started)
        )
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
        with self._memory_for_logprobs():
            given, old_logprobs_M, reference_logprobs_M = self._experience(rollout.trained)
        kept = completion_records(self.config, rollout.trained, given, step=step)
        self.history.completions.extend(kept)
        parts = minibatches(self.config, given, device, ranks=self.ranks)
        batches = [batch for part in parts for batch in part.batches]
        if self.reference is not None and reference_logprobs_M is None and parts:
            passes = [batch for part in parts for batch in part.share.all_batches]
            with self._memory_for_logprobs(), self.reference.at_hand() as reference:
                reference_logprobs_M = completion_logprobs(reference, passes, len(given.advantages_M))
        data = token_data(
            given, old_logprobs_M=old_logprobs_M, reference_logprobs_M=reference_logprobs_M, device=device
        )
        referred = time.monotonic()
        with memory_for_update(_STAGE, self.config.engine):
            figures = update(self.config, self.policy, parts, data, self._learning_rate(step))
        update_s = time.monotonic() - referred
        # A backward pass is two products for each one of the forward pass; frozen weights have no gradient.
        products = 2 if self.config.engine.lora else 3
        operations = products * self.config.updates_per_rollout * self._arithmetic.forward_flops(batches)
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
        with self.reference.at_hand() as reference:
            old_M, reference_M = (self._logprobs(scorer, given) for scorer in (self.policy, reference))
        kl_M = kl_to_reference(old_M, reference_M, torch.ones_like(old_M), kl.estimator)
        kl_B = torch.stack([part.sum() for part in kl_M.cpu().split(given.num_tokens_B.tolist())])
        return experience(self.config, groups, kl.coefficient * kl_B), old_M, reference_M

    def _logprobs(self, scorer: Policy | Reference, given: Experience) -> Tensor:
        """Return the log-probability of every completion token (M,): each process computes its share of them."""
        share = pack_shard(
            self.ranks,
            given.sequences_B,
            max_tokens=self.config.engine.micro_batch_tokens,
            device=self.checkpoint.device,
            indices=range(len(given.sequences_B)),
        )
        own_M = completion_logprobs(scorer, share.all_batches, len(given.advantages_M))
        shares = self.ranks.all_gather(own_M.cpu(), "the log-probabilities of a rollout")
        # What several have computed, to keep the others company, is the same but for rounding.
        return torch.stack(shares).nanmean(0).to(self.checkpoint.device)

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
            with self.policy.gather_full_parameters():
                self.reference.load(merged_state_dict(self.checkpoint.model))
            self._reference_is_reset = True
            say(_STAGE, "a new iteration begins: the policy is the reference now")

    def _start_reward_model(self) -> None:
        """Fit a new reward model to rollouts of the reference before anything is learned from its rewards."""
        if self.reward_model is None:
            return
        with self._memory_for_rollout():
            self.sampler.update_weights(0)
            for number in range(self.reward_model.config.initial_rollouts):
                self._judged.extend(self._verdicts(self._roll_out(f"initial {number}").sampled))
        if self._judged:
            self._retrain_reward_model(0)

    def _verdicts(self, groups: Sequence[Group]) -> list[Judged]:
        """What a reward model learns from a rollout: what the verifier said of each step of what is not masked."""
        return [
            Judged(
                scored.completion.tokens,
                tuple(step.end for step in scored.steps),
                tuple(step.reward for step in scored.steps),
            )
            for group in groups
            for scored in group.scored_G
            if not is_masked(self.config, scored.completion)
        ]

    def _retrain_reward_model(self, iteration: int) -> None:
        """Line 12: train the reward model on this iteration's rollouts, with a share of earlier ones among them."""
        if self.reward_model is None:
            return
        new, self._judged = self._judged, Examples()
        seed = self.config.seed + iteration
        mixed = self._replay.mix(new, fraction=self.reward_model.config.replay_fraction, seed=seed)
        with memory_for_passes(_STAGE, self.config.engine, "the training of the reward model"):
            figures = self.reward_model.fit(mixed, num_new=len(new), seed=seed)
        self._replay.add(new)
        self.history.reward_model.append({"iteration": iteration, **_known(figures)})
        say(_STAGE, "reward model trained: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))

    def _memory_for_rollout(self) -> AbstractContextManager[None]:
        """Name what helps where the completions that are sampled, or what scores them, do not fit."""
        sampling, sampler = self.config.sampling, self.config.sampler
        remedies = [f"lower {_STAGE}.sampling.max_new_tokens (it is {sampling.max_new_tokens})"]
        if sampler.vllm:
            remedies.insert(0, f"lower {_STAGE}.sampler.vllm.cache_gib (it is {sampler.vllm.cache_gib:g})")
        elif not sampler.servers:
            remedies.insert(0, f"lower {_STAGE}.sampling.max_batch_size (it is {sampling.max_batch_size})")
        return explain_out_of_memory("the rollout", *remedies)

    def _memory_for_logprobs(self) -> AbstractContextManager[None]:
        """Name what helps where the reference, or a forward pass over the rollout, does not fit."""
        placed = self.config.reference
        placement = [f"set {_STAGE}.reference: sharded or offloaded (it is {placed})"] if placed == "whole" else []
        return memory_for_passes(_STAGE, self.config.engine, "the log-probabilities of a rollout", *placement)

    def _timing(self, step: int, rollout: Rollout, timing: dict[str, float], step_s: float) -> dict[str, float]:
        lengths = [
            len(scored.completion.tokens.completion_ids) for group in rollout.sampled for scored in group.scored_G
        ]
        phases = {"sampling_s": rollout.sampling_s, "scoring_s": rollout.scoring_s, **timing, "step_s": step_s}
        return {
            "step": step,
            **{name: round(value, 4) for name, value in phases.items()},
            **self._slowest(rollout),
            "tokens_per_s": round(sum(lengths) / step_s, 1),
        }

    def _slowest(self, rollout: Rollout) -> dict[str, float]:
        """Return which process the others waited for at the end of sampling and scoring, and how long."""
        if self.ranks.world_size == 1:
            return {}
        own_s_R = self.ranks.all_gather(rollout.sampling_s + rollout.scoring_s, "the timing of a rollout")
        slowest = max(own_s_R)
        return {
            "slowest_rank": own_s_R.index(slowest),
            "slowest_rank_behind_median_s": round(slowest - statistics.median_low(own_s_R), 4),
        }


def _known(figures: Mapping[str, float]) -> dict[str, float | None]:
    """The figures with None for what could not be measured, as JSON has no NaN."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}
