"""Iterative GRPO (arXiv 2402.03300, algorithm 1): the loop, in the paper's own order.

Shape suffixes as in objective.py: B completions of the rollout, M all their completion tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from components.policy.checkpoint import Checkpoint, save
from components.policy.engine import Policy
from components.policy.logprobs import completion_logprobs
from components.policy.lora import merged_state_dict
from components.policy.packing import MicroBatch
from components.policy.training import learning_rate, memory_for_passes, memory_for_update
from components.shared import jsonl
from components.shared.progress import Progress, progress, say
from components.shared.work import MODEL
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.corrections import MASKED_COMPLETIONS, mask_completions, old_logprobs
from components.train_grpo.metrics import (
    figures_without_update,
    rollout_metrics,
    staleness_metrics,
)
from components.train_grpo.monitoring import (
    Profiler,
    StepTimer,
    check_first,
    require_scorable,
    try_largest_pass,
)
from components.train_grpo.records import History, completion_records, row_of
from components.train_grpo.reference import AdapterReference, Reference
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rollouts import Rollout, Rollouts
from components.train_grpo.scoring import Group
from components.train_grpo.teacher import TeacherServer
from components.train_grpo.trajectories import trajectory_metrics
from components.train_grpo.update import (
    Experience,
    Minibatch,
    make_experience,
    split_minibatches,
    update,
)
from components.train_grpo.validation import Measured, Validator, early_stop

_STAGE = "train_grpo"
_SHOWN_FROM = 0.05
"""Share of completions that are truncated, or without an answer, which a line of progress names."""
_SHARD_SIZE = "512MB"
"""Size of the files of an exported model: those that training does not change are stored once."""


@dataclass
class Trainer:
    """A run: the policy under training, what it learns from, and the reference it is kept close to."""

    config: TrainGRPOConfig
    checkpoint: Checkpoint
    policy: Policy
    rollouts: Rollouts
    reference: Reference | AdapterReference | None
    reward_model: RewardModel | None
    timer: StepTimer
    validator: Validator | None = None
    teacher: Reference | TeacherServer | None = None
    profiler: Profiler | None = None
    """None in all but the main process."""
    history: History = field(default_factory=History)
    _has_tried: bool = field(default=False, init=False)

    def run(self, *, steps_done: int, after_step: Callable[[int], None]) -> None:
        """Run algorithm 1 from after `steps_done` steps to its end, or until there is a reason to stop early."""
        if not steps_done and self.reward_model:
            self._fit_first_reward_model(self.reward_model)
        if not steps_done and self.validator:
            self._validate(self.validator, 0)
        with progress(_STAGE, self.config.num_steps) as bar:
            bar.skip(steps_done)
            for step in range(steps_done + 1, self.config.num_steps + 1):
                if early_stop(self.config, self.history.curves, self.history.validation):
                    break
                self._step(step, bar)
                after_step(step)

    def _step(self, step: int, bar: Progress) -> None:
        """Sample, score and learn; the numbers are lines of algorithm 1."""
        config = self.config
        iteration, place = divmod(step - 1, config.num_steps // config.num_iterations)
        if iteration and not place:
            self._begin_iteration(iteration)  # lines 2, 3 and 12
        self.timer.start()
        with self.profiler.step(step) if self.profiler else nullcontext():
            rollout = self.rollouts.of_step(step)  # lines 5 to 7
            self._check(step, rollout)
            if self.reward_model and iteration + 1 < config.num_iterations:
                self.reward_model.collect(rollout.sampled)
            figures, batches = self._learn(rollout.trained, step)  # lines 8 to 11
        if self.validator:
            with self.timer.phase("validation_s"):
                measured = self._validate(self.validator, step) if self.validator.is_due(step) else None
            figures |= self.validator.columns(measured)
        self._record(step, rollout, figures, batches, bar)

    def _check(self, step: int, rollout: Rollout) -> None:
        """End a run that cannot learn, and before its first update one whose largest micro-batch does not fit."""
        require_scorable(self.config, rollout.sampled)
        if step == 1:
            is_main = self.policy.ranks.is_main
            self.history.first_rollout = check_first(self.config, rollout.sampled, is_main=is_main)
        if rollout.sampled and not self._has_tried:
            try_largest_pass(self.config, self.policy, self.checkpoint, rollout)
            self._has_tried = True

    def _fit_first_reward_model(self, reward_model: RewardModel) -> None:
        """Fit a reward model to rollouts of the reference, before anything learns from its rewards."""
        settings = reward_model.settings
        for number in range(settings.initial_rollouts):
            rollout = self.rollouts.of_reference(number)
            require_scorable(self.config, rollout.sampled)
            reward_model.collect(rollout.sampled)
        if settings.initial_rollouts:
            self.history.reward_model.append(row_of(reward_model.retrain(0)))

    def _begin_iteration(self, iteration: int) -> None:
        """Retrain the reward model on the completions of the last iteration, and make the policy the reference."""
        if self.reward_model:
            self.history.reward_model.append(row_of(self.reward_model.retrain(iteration)))
        if isinstance(self.reference, Reference):
            with self.policy.gather_full_parameters():
                self.reference.load(merged_state_dict(self.checkpoint.model))
            say(_STAGE, "a new iteration begins: the policy is the reference now")

    def _validate(self, validator: Validator, step: int) -> Measured:
        """Measure the policy after a step on held-out problems, and record it."""
        with self.rollouts.memory():
            self.rollouts.finish_prefetch()
            measured = validator.measure(step)
        self.history.validation.append(measured)
        accuracy, low, high = (100 * each for each in (measured["accuracy"], *measured["interval"]))
        say(_STAGE, f"step {step}: validation accuracy {accuracy:.1f} % (95 % interval {low:.1f} to {high:.1f})")
        return measured

    def _learn(self, groups: Sequence[Group], step: int) -> tuple[dict[str, float], Sequence[MicroBatch]]:
        """Compute advantages and update the policy; return the metrics and micro-batches of the update."""
        config = self.config
        rate = learning_rate(
            step - 1,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            num_steps=config.num_steps,
            final_fraction=config.final_learning_rate_fraction,
            schedule=config.schedule,
        )
        if not any(scored.completion.num_tokens for group in groups for scored in group.scored_G):
            # Dynamic sampling has replaced all groups, or every prompt fills the context.
            masked = {MASKED_COMPLETIONS: math.nan} if config.sampler.correction.masks_completions else {}
            return figures_without_update(rate) | masked, []
        with self.timer.phase("reference_s"):
            experience, minibatches = self._prepare(groups)
        self.history.completions += completion_records(config, groups, experience.advantages_M, step=step)
        teacher = self.teacher if isinstance(self.teacher, Reference) else None
        onloaded = teacher.onloaded() if teacher else nullcontext()
        with self.timer.phase("update_s"), memory_for_update(_STAGE, config.engine), onloaded:
            figures = update(config, self.policy, minibatches, experience, rate, teacher.scorer if teacher else None)
        return figures, [batch for minibatch in minibatches for batch in minibatch.shard.batches]

    def _prepare(self, groups: Sequence[Group]) -> tuple[Experience, list[Minibatch]]:
        """Return what the update learns from, with the log-probabilities of the reference and of a teacher's server."""
        experience = make_experience(self.config, groups, self.checkpoint.device)
        if self.config.sampler.correction.masks_completions:
            with self._memory_for_logprobs():
                experience.old_logprobs_M = old_logprobs(self.config, self.policy, self.checkpoint, experience)
            mask_completions(self.config, experience)
        padded = self.checkpoint.is_padded
        minibatches = split_minibatches(self.config, experience, ranks=self.policy.ranks, padded=padded)
        if isinstance(self.teacher, TeacherServer):
            own = {b for each in minibatches for batch in each.shard.batches for b in batch.sequence_N.tolist()}
            teacher_M = self.teacher.logprobs(experience.sequences_B, own)
            experience.teacher_logprobs_M = teacher_M.to(self.checkpoint.device)
        if self.reference and minibatches:
            batches = [batch for minibatch in minibatches for batch in minibatch.shard.all_batches]
            with self._memory_for_logprobs(), self.reference.onloaded() as reference:
                experience.reference_logprobs_M = completion_logprobs(reference, batches, len(experience.advantages_M))
        return experience, minibatches

    def _memory_for_logprobs(self) -> AbstractContextManager[None]:
        """Name the keys that lower the memory for the reference or a forward pass where it runs out."""
        replicated = self.config.reference_placement == "replicated"
        remedies = [f"set {_STAGE}.reference: sharded or offloaded (it is replicated)"] if replicated else []
        return memory_for_passes(_STAGE, self.config.engine, "the log-probabilities of a rollout", *remedies)

    def _record(
        self, step: int, rollout: Rollout, figures: Mapping[str, float], batches: Sequence[MicroBatch], bar: Progress
    ) -> None:
        config, tools = self.config, self.checkpoint.config.tools
        row = {
            "step": step,
            **rollout_metrics(config, rollout, self.checkpoint.config.answer),
            **(trajectory_metrics(config, tools, rollout, self.history.columns) if tools else {}),
            **staleness_metrics(config, rollout, step),
            **figures,
        }
        timing = self.timer.row(step, rollout, batches, self.policy.ranks)
        self.history.curves.append(row_of(row))
        self.history.timings.append(timing)
        shown = {"reward": "reward", "length": "completion_length_tokens"}
        if config.reward.weights != {"accuracy": 1.0}:
            shown["accuracy"] = "accuracy"
        for name, column in (("truncated", "truncated_fraction"), ("no_answer", "unanswered_fraction")):
            if row[column] >= _SHOWN_FROM:
                shown[name] = column
        if self.reference:
            shown["kl"] = "kl"
        if self.teacher:
            shown["teacher_kl"] = "teacher_kl"
        bar.advance(**{name: row[column] for name, column in shown.items()}, tokens_per_s=timing["tokens_per_s"])

    def export(self, folder: Path) -> None:
        """Write the policy as a model that others can load, with the metrics of the last step."""
        save(self.checkpoint, folder / MODEL, max_shard_size=_SHARD_SIZE)
        jsonl.write_json(folder / "metrics.json", self.history.curves[-1])

    def state(self) -> dict[str, Any]:
        """Return all that further steps depend on beside the policy and random numbers, as plain values."""
        return {
            "history": asdict(self.history),
            "rollouts": self.rollouts.state(),
            "reference": self.reference and self.reference.state(main=self.policy.ranks.is_main),
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of the reward model, if there is one: see `Resumption.after_step`."""
        return self.reward_model.tensors() if self.reward_model else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.history = History(**state["history"])
        self.rollouts.restore(state["rollouts"])
        if isinstance(self.reference, Reference) and state["reference"] is not None:
            self.reference.load(state["reference"])
