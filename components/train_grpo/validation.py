"""Validation: greedy answers to held-out problems during training, choice of the best policy, and early stopping.

The answers are sampled, graded and counted as in the final evaluation. Validation does not influence training: it draws
no random numbers, and the sampler gets the weights that it would get before the next rollout anyway.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from components.environments.pool import Environments
from components.grading.verifier import Grade, Verdict
from components.policy.parallel import Ranks
from components.rollout.sampler import Completion, Sampler, Sampling
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.page import percent
from components.shared.problem import Problem
from components.shared.progress import say
from components.shared.statistics import score
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.records import History, Row, column_mean

ValidationResult = Mapping[str, Any]
"""The results of one validation, see `Validator.measure`."""
ACCURACY = "validation_accuracy"
"""Column of the curves."""
_RESULT_COLUMNS = ("reward", "accuracy", "worked_fraction", "completion_length_tokens", "kl")

_LIMITED_METRICS = {
    "max_kl": ("kl", "KL divergence from the reference"),
    "min_entropy": ("entropy", "entropy"),
    "max_completion_tokens": ("completion_length_tokens", "mean completion length"),
    "max_truncated_fraction": ("truncated_fraction", "fraction of truncated completions"),
}
"""The column of the curves that each key of `limits` bounds, and its name in messages."""


@dataclass(frozen=True)
class Validator:
    """Measures the policy on held-out problems."""

    config: TrainGRPOConfig
    problems: Sequence[Problem]
    sampler: Sampler
    grade: Callable[[Sequence[Problem], Sequence[Completion], AnswerPolicy], list[Grade]]
    answer_policy: AnswerPolicy
    ranks: Ranks
    environments: Environments | None = None
    """Environments in which the model acts; None for answers of one turn."""

    def measure(self, step: int) -> dict[str, Any]:
        """Return step, accuracy with interval (also by source), mean length and truncated share after `step` steps."""
        self.sampler.update_weights(step)
        shard = self.ranks.shard(self.problems)
        greedy = Sampling(
            num_samples=1,
            temperature=0.0,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=self.config.seed,
            environments=self.environments,
        )
        completions = [group[0] for group in self.sampler.generate(shard, greedy)]
        self.sampler.sleep()
        grades = self.grade(shard, completions, self.answer_policy)
        answers = [
            (problem.source, grade.verdict == Verdict.RIGHT, completion.num_tokens, completion.truncated)
            for problem, grade, completion in zip(shard, grades, completions, strict=True)
        ]
        all_answers = list(chain(*self.ranks.all_gather(answers, "the end of a validation")))
        _, rights, lengths, truncated = zip(*all_answers, strict=True)
        rights_of: dict[str, list[bool]] = {name: [] for name in self.sources}
        for source, is_right, *_ in all_answers:
            rights_of[source].append(is_right)
        return {
            "step": step,
            **score(sum(rights), len(rights)),
            "by_source": {source: score(sum(each), len(each)) for source, each in rights_of.items()},
            "completion_length_tokens": fmean(lengths),
            "truncated_fraction": fmean(truncated),
        }

    @property
    def sources(self) -> list[str]:
        """Sources of the problems, sorted."""
        return sorted({problem.source for problem in self.problems})

    def is_due(self, step: int) -> bool:
        """Return whether the policy is measured after `step` steps."""
        assert self.config.validation
        return step % self.config.validation.every_steps == 0 or step == self.config.num_steps

    def columns(self, measured: ValidationResult | None) -> dict[str, float]:
        """Return the columns of a step: the accuracy, also by source if there are several; NaN without a validation."""
        columns = {ACCURACY: measured["accuracy"] if measured else math.nan}
        if len(self.sources) > 1:
            for source in self.sources:
                columns[f"{ACCURACY}_{source}"] = measured["by_source"][source]["accuracy"] if measured else math.nan
        return columns


def best_validation(validations: Sequence[ValidationResult]) -> ValidationResult | None:
    """Return the validation with the highest accuracy, the earliest if several have it; None if there is none yet.

    The validation of the reference, before the first step, does not count: the gate compares the policy with it.
    """
    trained = [each for each in validations if each["step"] > 0]
    return max(trained, key=lambda each: (each["accuracy"], -each["step"]), default=None)


class EarlyStop(NamedTuple):
    """Why training ends before its last step."""

    reason: str
    fails: bool
    """Whether the run fails, because there is no validated policy as its result."""


def early_stop(config: TrainGRPOConfig, history: History) -> EarlyStop | None:
    """Return why training has to stop after the steps in `history`; None if it goes on.

    This depends only on records that are in the checkpoint: a resumed run stops where an uninterrupted one does.
    """
    leader = best_validation(history.validation)
    if reason := _exceeded_limit(config, history.curves):
        if leader and config.checkpoint.keep_best:
            return EarlyStop(reason, fails=False)
        remedy = "no policy was validated before (train_grpo.validation, checkpoint.keep_best)"
        return EarlyStop(f"{reason}; {remedy}", fails=True)
    if leader is None or config.validation is None or config.validation.patience is None:
        return None
    num_since = sum(each["step"] > leader["step"] for each in history.validation)
    if num_since < config.validation.patience:
        return None
    comparison = f"a better accuracy than the {percent(leader['accuracy'])} of step {leader['step']}"
    return EarlyStop(f"{num_since} validations without {comparison} (train_grpo.validation.patience)", fails=False)


def choose_result(
    config: TrainGRPOConfig, history: History, best_saved: Callable[[], tuple[int, Path] | None]
) -> tuple[Path | None, dict[str, float], dict[str, Any]]:
    """Choose the resulting policy: the best in validation with `checkpoint.keep_best`, else that of the last step.

    `best_saved` returns the step and the weights of the best saved policy. Return the file with the weights of the
    result, None for the last step, the metrics of its step, and a record of the choice.
    """
    last = chosen_step = len(history.curves)
    early = early_stop(config, history) if last < config.num_steps else None
    if early and early.fails:
        raise PipelineError(early.reason)
    weights = None
    if config.validation and config.checkpoint.keep_best:
        saved = best_saved()
        if saved and saved[0] < last:
            chosen_step, weights = saved
    if early:
        say("train_grpo", f"stopped after step {last} of {config.num_steps}: {early.reason}")
    row = history.curves[chosen_step - 1]
    metrics = {name: value for name in _RESULT_COLUMNS if (value := row[name]) is not None}
    if config.validation:
        metrics["policy_step"] = chosen_step
        if (accuracy := row[ACCURACY]) is not None:
            metrics[ACCURACY] = accuracy
        reason = ", the first after step 0 with the best validation accuracy" if config.checkpoint.keep_best else ""
        say("train_grpo", f"the policy is that of step {chosen_step} of {last}{reason}")
    return weights, metrics, {"policy_step": chosen_step, "num_steps": last, "stopped": early.reason if early else None}


def _exceeded_limit(config: TrainGRPOConfig, curves: Sequence[Row]) -> str | None:
    """Return in words the first limit that the mean of the last `over_steps` steps exceeds."""
    rows = curves[-config.limits.over_steps :]
    if len(rows) < config.limits.over_steps:
        return None
    for key, (column, name) in _LIMITED_METRICS.items():
        limit, mean = getattr(config.limits, key), column_mean(rows, column)
        if limit is None or mean is None:
            continue
        side = "below" if key.startswith("min") else "above"
        if (side == "below" and mean < limit) or (side == "above" and mean > limit):
            return f"{name} {mean:.3g} over the last {len(rows)} steps, {side} train_grpo.limits.{key}: {limit:g}"
    return None
