"""Iterative GRPO (arXiv 2402.03300, algorithm 1): the loop, in the paper's own order.

Shape suffixes as in objective.py: B completions of the rollout, M all their completion tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.policy.checkpoint import Checkpoint, save
from components.policy.engine import Policy
from components.policy.logprobs import completion_logprobs
from components.policy.lora import merged_state_dict
from components.policy.packing import MicroBatch
from components.policy.training import explain_memory_for_passes, explain_memory_for_update, learning_rate
from components.shared import jsonl
from components.shared.page import percent
from components.shared.progress import Progress, progress, say
from components.shared.work import MODEL
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.corrections import MASKED_COMPLETIONS, mask_completions, old_logprobs
from components.train_grpo.metrics import metrics_without_update, rollout_metrics, staleness_metrics, trajectory_metrics
from components.train_grpo.monitoring import Profiler, StepTimer, check_first, require_scorable, try_largest_pass
from components.train_grpo.records import History, completion_records, row_of
from components.train_grpo.reference import AdapterReference, Reference
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rollouts import Rollout, Rollouts
from components.train_grpo.scoring import Group
from components.train_grpo.teacher import TeacherServer
from components.train_grpo.update import Experience, Minibatch, make_experience, split_minibatches, update
from components.train_grpo.validation import ValidationResult, Validator, early_stop

_STAGE = "train_grpo"
_SHOWN_FROM = 0.05
"""The progress line shows the share of truncated completions, or of those without an answer, if it is at least this."""
_SHARD_SIZE = "512MB"
"""File size of exported weights: those of weights without adapters are equal in all exports, and stored only once."""


@dataclass
class Trainer:
    """The state of a run: the policy, what it learns from, and the reference that the KL penalty keeps it close to."""

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
    """None in every process but the main one."""
    history: History = field(default_factory=History)
    _has_tried_largest_pass: bool = field(default=False, init=False)

    def run(self, *, steps_done: int, after_step: Callable[[int], None]) -> None:
        """Take the steps after `steps_done` up to the last one or `early_stop`; call `after_step` after each."""
        if steps_done == 0 and self.reward_model:
            self._fit_first_reward_model(self.reward_model)
        if steps_done == 0 and self.validator:
            self._validate(self.validator, 0)
        with progress(_STAGE, self.config.num_steps) as bar:
            bar.skip(steps_done)
            for step in range(steps_done + 1, self.config.num_steps + 1):
                if early_stop(self.config, self.history):
                    break
                self._step(step, bar)
                after_step(step)

    def _step(self, step: int, bar: Progress) -> None:
        """Sample, score, learn and record; the comments name the lines of algorithm 1."""
        config = self.config
        iteration, steps_into_iteration = divmod(step - 1, config.num_steps // config.num_iterations)
        if iteration > 0 and steps_into_iteration == 0:
            self._begin_iteration(iteration)  # lines 2, 3 and 12
        self.timer.start()
        with self.profiler.step(step) if self.profiler else nullcontext():
            rollout = self.rollouts.of_step(step)  # lines 5 to 7
            self._check(step, rollout)
            is_last_iteration = iteration + 1 == config.num_iterations
            if self.reward_model and not is_last_iteration:  # it is retrained between iterations
                self.reward_model.collect(rollout.sampled)
            metrics, batches = self._learn(rollout.trained, step)  # lines 8 to 11
        if self.validator:
            with self.timer.phase("validation_s"):
                validation = self._validate(self.validator, step) if self.validator.is_due(step) else None
            metrics |= self.validator.columns(validation)
        self._record(step, rollout, metrics, batches, bar)

    def _check(self, step: int, rollout: Rollout) -> None:
        """Raise PipelineError if the run cannot learn or, before the first update, if the largest pass does not fit."""
        require_scorable(self.config, rollout.sampled)
        if step == 1:
            is_main = self.policy.ranks.is_main
            self.history.first_rollout = check_first(self.config, rollout.sampled, is_main=is_main)
        if not self._has_tried_largest_pass:  # in a new or a resumed run
            try_largest_pass(self.config, self.policy, self.checkpoint, rollout)
            self._has_tried_largest_pass = True

    def _fit_first_reward_model(self, reward_model: RewardModel) -> None:
        """Fit the reward model to rollouts of the reference, before the policy learns from its rewards."""
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

    def _validate(self, validator: Validator, step: int) -> ValidationResult:
        """Measure the policy after a step on held-out problems; record, print and return the result."""
        with self.rollouts.memory_for_rollout():
            self.rollouts.finish_prefetch()
            measured = validator.measure(step)
        self.history.validation.append(measured)
        accuracy, (low, high) = measured["accuracy"], measured["interval"]
        interval = f"95 % interval {100 * low:.1f} to {100 * high:.1f}"
        say(_STAGE, f"step {step}: validation accuracy {100 * accuracy:.1f} % ({interval})")
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
            # Dynamic sampling has dropped all groups, or every prompt fills the context.
            masked = {MASKED_COMPLETIONS: math.nan} if config.sampler.correction.masks_completions else {}
            return metrics_without_update(rate) | masked, []
        with self.timer.phase("reference_s"):
            experience, minibatches = self._prepare_update(groups)
        self.history.completions += completion_records(config, groups, experience.advantages_M, step=step)
        local_teacher = self.teacher if isinstance(self.teacher, Reference) else None
        onloaded = local_teacher.onloaded() if local_teacher else nullcontext()
        with self.timer.phase("update_s"), explain_memory_for_update(_STAGE, config.engine), onloaded:
            teacher_model = local_teacher.scorer if local_teacher else None
            metrics = update(config, self.policy, minibatches, experience, rate, teacher_model)
        return metrics, [batch for minibatch in minibatches for batch in minibatch.shard.batches]

    def _prepare_update(self, groups: Sequence[Group]) -> tuple[Experience, list[Minibatch]]:
        """Return the experience, scored by the reference and a teacher server, and this process's mini-batches."""
        experience = make_experience(self.config, groups, self.checkpoint.device)
        if self.config.sampler.correction.masks_completions:
            with self._memory_for_logprobs():
                experience.old_logprobs_M = old_logprobs(self.config, self.policy, self.checkpoint, experience)
            mask_completions(self.config, experience)
        padded = self.checkpoint.is_padded
        minibatches = split_minibatches(self.config, experience, ranks=self.policy.ranks, padded=padded)
        if isinstance(self.teacher, TeacherServer):
            batches = [batch for minibatch in minibatches for batch in minibatch.shard.batches]
            own_indices = {index for batch in batches for index in batch.sequence_N.tolist()}
            teacher_M = self.teacher.logprobs(experience.sequences_B, own_indices)
            experience.teacher_logprobs_M = teacher_M.to(self.checkpoint.device)
        if self.reference and minibatches:
            batches = [batch for minibatch in minibatches for batch in minibatch.shard.all_batches]
            with self._memory_for_logprobs(), self.reference.onloaded() as reference:
                experience.reference_logprobs_M = completion_logprobs(reference, batches, len(experience.advantages_M))
        return experience, minibatches

    def _memory_for_logprobs(self) -> AbstractContextManager[None]:
        """Name the config keys to change if the block, the reference or a forward pass, runs out of memory."""
        replicated = self.config.reference_placement == "replicated"
        remedies = [f"set {_STAGE}.reference: sharded or offloaded (it is replicated)"] if replicated else []
        return explain_memory_for_passes(_STAGE, self.config.engine, "the log-probabilities of a rollout", *remedies)

    def _record(
        self, step: int, rollout: Rollout, metrics: Mapping[str, float], batches: Sequence[MicroBatch], bar: Progress
    ) -> None:
        """Add a step's metrics and timing to the history, and show some of them on the progress line."""
        config, tools = self.config, self.checkpoint.config.tools
        earlier_columns = self.history.curves[-1] if self.history.curves else ()  # the last row has all of them
        row = {
            "step": step,
            **rollout_metrics(config, rollout, self.checkpoint.config.answer),
            **(trajectory_metrics(config, tools, rollout, earlier_columns) if tools else {}),
            **staleness_metrics(config, rollout, step),
            **metrics,
        }
        timing = self.timer.row(step, rollout, batches, self.policy.ranks)
        self.history.curves.append(row_of(row))
        self.history.timings.append(timing)
        shown: dict[str, float | str] = {"reward": row["reward"], "length": row["completion_length_tokens"]}
        if config.reward.weights != {"accuracy": 1.0}:  # else it is the reward
            shown["accuracy"] = percent(row["accuracy"])
        for name, column in (("truncated", "truncated_fraction"), ("no_answer", "unanswered_fraction")):
            if row[column] >= _SHOWN_FROM:
                shown[name] = percent(row[column])
        if self.reference:
            shown["kl"] = row["kl"]
        if self.teacher:
            shown["teacher_kl"] = row["teacher_kl"]
        bar.advance(**shown, tokens_per_s=timing["tokens_per_s"])

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model, with the metrics of the last step."""
        save(self.checkpoint, folder / MODEL, max_shard_size=_SHARD_SIZE)
        jsonl.write_json(folder / "metrics.json", self.history.curves[-1])

    def state(self) -> dict[str, Any]:
        """Return as plain values all state of the run but policy, random numbers and reward model."""
        return {
            "history": asdict(self.history),
            "rollouts": self.rollouts.state(),
            "reference": self.reference.state(main=self.policy.ranks.is_main) if self.reference else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.history = History(**state["history"])
        self.rollouts.restore(state["rollouts"])
        if isinstance(self.reference, Reference) and state["reference"] is not None:
            self.reference.load(state["reference"])
