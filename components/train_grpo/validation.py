"""Validation: greedy answers to held-out problems during training, which policy is the best, and when to stop early.

The answers are sampled, graded and counted as in the final evaluation. Validation does not influence training: it draws
no random number, and the sampler gets the weights that it would get before the next rollout anyway.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from components.environments.pool import Environments
from components.grading.verifier import Grade, Verdict
from components.policy.parallel import Ranks
from components.rollout.sampler import Completion, Sampler, Sampling
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem
from components.shared.statistics import score
from components.train_grpo.config import TrainGRPOConfig

Measured = Mapping[str, Any]
"""What one validation measured: see `Validator.measure`."""
ACCURACY = "validation_accuracy"
"""Column of the curves."""

_LIMITED = {
    "max_kl": ("kl", "KL divergence from the reference"),
    "min_entropy": ("entropy", "entropy"),
    "max_completion_tokens": ("completion_length_tokens", "mean completion length"),
    "max_truncated_fraction": ("truncated_fraction", "fraction of truncated completions"),
}
"""Column of the curves behind each limit, and what it is called."""


@dataclass(frozen=True)
class Validator:
    """Measures the policy on problems that it is not trained on."""

    config: TrainGRPOConfig
    problems: Sequence[Problem]
    sampler: Sampler
    grade: Callable[[Sequence[Problem], Sequence[Completion], AnswerPolicy], list[Grade]]
    policy: AnswerPolicy
    ranks: Ranks
    environments: Environments | None = None
    """What the policy acts in; None for answers of one turn."""

    def measure(self, step: int) -> dict[str, Any]:
        """Return the accuracy of the policy after `step` steps, with its interval and by source, and how it answers."""
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
        grades = self.grade(shard, completions, self.policy)
        answers = [
            (problem.source, grade.verdict == Verdict.RIGHT, completion.num_tokens, completion.truncated)
            for problem, grade, completion in zip(shard, grades, completions, strict=True)
        ]
        every = [each for part in self.ranks.all_gather(answers, "the end of a validation") for each in part]
        by_source = {source: [right for name, right, *_ in every if name == source] for source in self.sources}
        return {
            "step": step,
            **score(sum(right for _, right, _, _ in every), len(every)),
            "by_source": {source: score(sum(rights), len(rights)) for source, rights in by_source.items()},
            "completion_length_tokens": fmean(tokens for _, _, tokens, _ in every),
            "truncated_fraction": fmean(truncated for _, _, _, truncated in every),
        }

    @property
    def sources(self) -> list[str]:
        """Sources of the problems."""
        return sorted({problem.source for problem in self.problems})

    def is_due(self, step: int) -> bool:
        """Return whether the policy is measured after `step` steps."""
        assert self.config.validation
        return step % self.config.validation.every_steps == 0 or step == self.config.num_steps

    def columns(self, measured: Measured | None) -> dict[str, float]:
        """Return the columns of a step's row: the accuracy, also by source where there are several; NaN without one."""
        accuracies = {ACCURACY: measured["accuracy"] if measured else float("nan")}
        for source in self.sources if len(self.sources) > 1 else ():
            accuracies[f"{ACCURACY}_{source}"] = measured["by_source"][source]["accuracy"] if measured else float("nan")
        return accuracies


def best(validations: Sequence[Measured]) -> Measured | None:
    """Return the validation with the highest accuracy, ties going to the earliest; None before the first step is done.

    The one before the first step, of the reference, is for comparison: the gate decides whether the policy is better.
    """
    trained = [each for each in validations if each["step"] > 0]
    return max(trained, key=lambda each: (each["accuracy"], -each["step"]), default=None)


class Stop(NamedTuple):
    """Why training ends before its last step."""

    reason: str
    fails: bool
    """Whether the run fails, for lack of an earlier validated policy."""


def early_stop(
    config: TrainGRPOConfig, curves: Sequence[Mapping[str, float | None]], validations: Sequence[Measured]
) -> Stop | None:
    """Return why training has to stop after the steps in `curves`, if it has to.

    All of it is derived from records that are in the checkpoint: a resumed run stops where an uninterrupted one does.
    """
    leader = best(validations)
    if reason := _exceeded(config, curves):
        if leader and config.checkpoint.keep_best:
            return Stop(reason, fails=False)
        return Stop(
            f"{reason}; no policy was validated before (train_grpo.validation, checkpoint.keep_best)", fails=True
        )
    patience = config.validation.patience if config.validation else None
    since = sum(each["step"] > leader["step"] for each in validations) if leader else 0
    if leader and patience is not None and since >= patience:
        return Stop(
            f"{since} validations without a better accuracy than the {leader['accuracy']:.1%} of step "
            f"{leader['step']} (train_grpo.validation.patience)",
            fails=False,
        )
    return None


def _exceeded(config: TrainGRPOConfig, curves: Sequence[Mapping[str, float | None]]) -> str | None:
    """Return the first limit that the last steps exceed, in words."""
    limits = config.limits
    rows = curves[-limits.over_steps :]
    for key, (column, name) in _LIMITED.items():
        limit = getattr(limits, key)
        known = [value for row in rows if (value := row[column]) is not None]
        if limit is None or not known or len(rows) < limits.over_steps:
            continue
        mean = fmean(known)
        if (mean < limit) if key.startswith("min") else (mean > limit):
            side = "below" if key.startswith("min") else "above"
            return f"{name} {mean:.3g} over the last {len(rows)} steps, {side} train_grpo.limits.{key}: {limit:g}"
    return None
