"""What is recorded of a step: the metrics of its rollout and of its update, and completions to be read by people."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.grading.verifier import Reason, Verdict
from components.policy.training import write_curves
from components.rollout.sampler import Completion
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.live import FIRST_ROLLOUT
from components.shared.tools import ToolsConfig
from components.train_grpo.config import LossConfig, TrainGRPOConfig, reward_column
from components.train_grpo.objective import TokenObjective, Tokens, clipped
from components.train_grpo.rollouts import Rollout, differs
from components.train_grpo.scoring import Group, Scored

Row = Mapping[str, float | None]
"""The metrics of a step, None for what could not be measured, as JSON has no NaN."""

_LIMITS = ("tokens", "turns", "context")
"""Limits that truncate a trajectory: sampled tokens, `tools.max_turns`, or the context of the model."""
_MAX_PARTS = 20
"""Parts of the reward with a column, in a run: an environment could give any number of names."""
_PART_PREFIX = "reward_environment_"
_TOKEN_MEANS = (
    *("kl", "entropy", "clip_high_fraction", "clip_low_fraction"),
    *("importance_weight", "masked_token_fraction", "sampler_mismatch"),
)


@dataclass
class History:
    """The records of all steps of a run."""

    curves: list[dict[str, float | None]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    reward_model: list[dict[str, float | None]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    first_rollout: list[str] = field(default_factory=list)
    """Whether the policy can learn, judging by the first rollout."""

    @property
    def rows(self) -> list[dict[str, float | None]]:
        """The metrics of each step with its timings."""
        return [{**curve, **timing} for curve, timing in zip(self.curves, self.timings, strict=True)]

    @property
    def columns(self) -> list[str]:
        """The columns of the last step, which has all that the steps before had."""
        return list(self.curves[-1]) if self.curves else []

    def of_step(self, step: int) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """Return the metrics and timings of the last step, and its completions."""
        completions = takewhile(lambda each: each["step"] == step, reversed(self.completions))
        return {**self.curves[-1], **self.timings[-1]}, list(completions)[::-1]

    def write(self, training: Path, timings: Path) -> None:
        """Write all records as JSON lines, and the curves as CSV too."""
        write_curves(training, self.curves)
        if self.validation:
            jsonl.write_rows(training / "validation.jsonl", self.validation)
        jsonl.write_rows(training / "completions.jsonl", self.completions)
        (training / FIRST_ROLLOUT).write_text("".join(f"{line}\n" for line in self.first_rollout), encoding="utf-8")
        if self.reward_model:
            jsonl.write_rows(training / "reward_model.jsonl", self.reward_model)
        jsonl.write_rows(timings / "timings.jsonl", self.timings)


def row_of(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics with None for NaN."""
    return {name: _or_none(value) for name, value in metrics.items()}


# The rollout ----------------------------------------------------------------------------------------------------------


def rollout_metrics(config: TrainGRPOConfig, rollout: Rollout, policy: AnswerPolicy) -> dict[str, float]:
    """Return the metrics of all sampled completions, also of those that are not trained on.

    Rewards and accuracy are means over what could be scored, a reward's over the problems whose source has it;
    `policy` says where an answer counts.
    """
    scored = [scored for group in rollout.sampled for scored in group.scored_G]
    weights_P = [config.reward.weights_of(group.problem.source) for group in rollout.sampled]
    rewards = [
        sum(each.combined(weights))
        for group, weights in zip(rollout.sampled, weights_P, strict=True)
        for each in group.scored_G
    ]
    lengths = [each.completion.num_tokens for each in scored]
    num_scorable = sum(group.num_scorable for group in rollout.sampled)
    num_groups = len(rollout.sampled) or math.nan
    zero_variance = [group for group in rollout.sampled if not differs(config, group)]
    all_right = sum(group.num_right == len(group.scored_G) for group in zero_variance)
    all_wrong = sum(group.num_right == 0 and group.num_scorable == len(group.scored_G) for group in zero_variance)
    return {
        "reward": mean(rewards),
        **{
            reward_column(name): mean([x for each in scored for x in each.rewards.get(name, ())])
            for name in config.reward.names
        },
        "accuracy": sum(group.num_right for group in rollout.sampled) / num_scorable if num_scorable else math.nan,
        "worked_fraction": mean([each.completion.is_worked(policy) for each in scored]),
        "completion_length_tokens": mean(lengths),
        "completion_length_max_tokens": max(lengths, default=math.nan),
        "truncated_fraction": mean([each.completion.truncated for each in scored]),
        "unanswered_fraction": mean([is_unanswered(each) for each in scored]),
        "unscorable_fraction": mean([each.unscorable is not None for each in scored]),
        "reward_failures": sum(each.failure is not None for each in scored),
        "distinct_answers": mean([_distinct_answers(group) for group in rollout.sampled]),
        "groups_sampled": len(rollout.sampled),
        "groups_trained": len(rollout.trained),
        "groups_without_spread_fraction": len(zero_variance) / num_groups,
        "groups_all_right_fraction": all_right / num_groups,
        "groups_all_wrong_fraction": all_wrong / num_groups,
    }


def is_unanswered(scored: Scored) -> bool:
    """Tell whether a completion came to its end without an answer where the model's config looks for it."""
    return scored.completion.finished and scored.grade.reason is Reason.NO_ANSWER


def trajectory_metrics(
    config: TrainGRPOConfig, tools: ToolsConfig, rollout: Rollout, columns_before: Collection[str] = ()
) -> dict[str, float]:
    """Return the metrics of all sampled completions as trajectories of several turns.

    `columns_before` are those of the steps before, which keep their columns for parts of the reward.
    """
    completions = [scored.completion for group in rollout.sampled for scored in group.scored_G]
    calls = [sum(turn.is_call for turn in each.turns) for each in completions]
    truncated = [_limit_reached(config, tools, each) for each in completions if each.truncated]
    shares = {limit: truncated.count(limit) / (len(completions) or math.nan) for limit in _LIMITS}
    return {
        "turns": mean([len(each.turns) for each in completions]),
        "turns_max": max((len(each.turns) for each in completions), default=math.nan),
        "tool_calls": mean(calls),
        "tool_use_fraction": mean([count > 0 for count in calls]),
        "environment_tokens": mean([each.num_environment_tokens for each in completions]),
        "environment_failures": sum(each.failure is not None for each in completions),
        **{f"truncated_by_{limit}_fraction": share for limit, share in shares.items()},
        **_reward_parts(config, completions, columns_before),
    }


def _reward_parts(
    config: TrainGRPOConfig, completions: Sequence[Completion], columns_before: Collection[str]
) -> dict[str, float]:
    """Return the means of the parts of the reward that environments gave, each summed over the turns of a trajectory.

    A part that had a column before has one in every later step. PipelineError where two parts would share a column.
    """
    others = {reward_column(name): name for name in config.reward.names}
    columns: dict[str, str] = {}
    for part in sorted({name for each in completions for turn in each.turns for name in turn.rewards}):
        column = reward_column(f"environment:{part}")
        if (other := columns.get(column, others.get(column))) is not None:
            raise PipelineError(
                f"the environment's reward `{part}` and the reward `{other}` would share the column `{column}` of the "
                "curves: rename one of them"
            )
        columns[column] = part
    before = [column for column in columns_before if column.startswith(_PART_PREFIX) and column not in others]
    parts = {column: columns.get(column) for column in list(dict.fromkeys([*before, *columns]))[:_MAX_PARTS]}
    return {
        column: mean([_reward_part(each, part) if part is not None else 0.0 for each in completions])
        for column, part in parts.items()
    }


def _reward_part(completion: Completion, part: str) -> float:
    return sum(turn.rewards.get(part, 0.0) for turn in completion.turns)


def _limit_reached(config: TrainGRPOConfig, tools: ToolsConfig, completion: Completion) -> str:
    """Return which limit a truncated trajectory has reached."""
    if completion.num_tokens >= config.max_sampled_tokens:
        return "tokens"
    return "turns" if len(completion.turns) >= tools.max_turns else "context"


def staleness_metrics(config: TrainGRPOConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Return how many updates old the tokens of a rollout are that a step learns from; nothing without staleness.

    Partial rollouts add the share of completions that were truncated to keep the bound, and the groups in flight.
    """
    if not config.sampler.max_staleness:
        return {}
    completions = [scored.completion for group in rollout.trained for scored in group.scored_G]
    ages = [step - 1 - version for completion in completions for version in completion.versions]
    figures = {"staleness_mean": mean(ages), "staleness_max": max(ages, default=math.nan)}
    if config.sampler.segment_tokens is None:
        return figures
    limit, is_earlier = config.max_sampled_tokens, config.max_sampled_tokens < config.sampling.max_new_tokens
    truncated = [is_earlier and each.truncated and each.num_tokens >= limit for each in completions]
    return {**figures, "stale_truncated_fraction": mean(truncated), "groups_in_flight": rollout.groups_in_flight}


def _distinct_answers(group: Group) -> float:
    """Return the number of different final answers of a group, over its size.

    Right answers are the same one. Others are compared as text without spaces and case: parsing what a model wrote has
    no limit on time in this process.
    """
    grades = [scored.grade for scored in group.scored_G]
    wrong = {
        "".join(grade.extracted.split()).casefold()
        for grade in grades
        if grade.extracted is not None and grade.verdict is not Verdict.RIGHT
    }
    return (len(wrong) + any(grade.verdict is Verdict.RIGHT for grade in grades)) / len(grades)


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are numbers; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def completion_records(
    config: TrainGRPOConfig, groups: Sequence[Group], advantages_M: Tensor, *, step: int
) -> Iterator[dict[str, Any]]:
    """Yield the first completions of a rollout with their rewards, to be read by people."""
    first = 0
    samples = [(group.problem, number, scored) for group in groups for number, scored in enumerate(group.scored_G)]
    for problem, number, scored in samples[: config.logged_completions_per_step]:
        completion, grade = scored.completion, scored.grade
        yield {
            "step": step,
            "id": problem.id,
            "sample": number,
            "question": problem.conversation,
            "answer": problem.answer,
            "completion": completion.text,
            **({"turns": completion.turn_records()} if completion.turns else {}),
            "extracted": grade.extracted,
            "verdict": grade.verdict.value,
            "reason": grade.reason.value,
            "detail": grade.detail,
            "num_tokens": completion.num_tokens,
            "finished": completion.finished,
            "reward": _or_none(sum(scored.combined(config.reward.weights_of(problem.source)))),
            "rewards": {name: [_or_none(value) for value in values] for name, values in scored.rewards.items()},
            "reward_failure": scored.failure.message if scored.failure else None,
            **({"environment_failure": completion.failure} if completion.turns else {}),
            # That of the first token, which every step of the completion adds to.
            "advantage": float(advantages_M[first]) if completion.num_tokens else 0.0,
        }
        first += completion.num_tokens


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


# The update -----------------------------------------------------------------------------------------------------------


class UpdateMetrics:
    """Sums and extremes over the completion tokens that are in the loss of one pass through a rollout."""

    def __init__(self) -> None:
        self._sums = torch.zeros(1 + len(_TOKEN_MEANS), dtype=torch.float64)
        """The number of tokens, then the sums of what is averaged over them."""
        self._teacher_kl = torch.full((), torch.nan, dtype=torch.float64)
        """Sum of the divergences from the teacher."""
        self._maxima = torch.full((3,), torch.nan, dtype=torch.float64)
        """Maxima of the sampler's mismatch, the ratio, and minus the ratio."""

    @property
    def mean_mismatch(self) -> float:
        """Mean absolute difference of the sampler's log-probabilities from the trainer's so far, in nats."""
        return float(self._sums[-1] / self._sums[0])

    @torch.no_grad()
    def add(self, loss: LossConfig, tokens: Tokens, terms: TokenObjective) -> None:
        """Add the tokens of a micro-batch."""
        ratio_N = terms.ratio_N
        unknown_N = torch.full_like(ratio_N, torch.nan)
        kl_N = unknown_N if terms.kl_N is None else terms.kl_N
        weight_N, masked_N = (unknown_N,) * 2 if terms.weight_N is None else (terms.weight_N, terms.weight_N == 0)
        high_N, low_N = clipped(loss, tokens, ratio_N)
        mismatch_N = (tokens.old_logprobs_N - tokens.sampler_logprobs_N).abs()
        summed = (torch.ones_like(ratio_N), kl_N, tokens.entropy_N, high_N, low_N, weight_N, masked_N, mismatch_N)
        self._sums += torch.stack([values_N.double() for values_N in summed]).sum(1).cpu()
        largest = torch.stack([mismatch_N, ratio_N, -ratio_N]).amax(1)
        self._maxima = torch.fmax(self._maxima, largest.double().cpu())

    def add_teacher_kl(self, kl_N: Tensor) -> None:
        """Add the divergences of the tokens of a micro-batch from the teacher."""
        self._teacher_kl = self._teacher_kl.nan_to_num(0.0) + kl_N.double().sum().cpu()

    @staticmethod
    def merged(of_ranks: "Sequence[UpdateMetrics]") -> "UpdateMetrics":
        """Return the metrics over the tokens of all processes."""
        merged = UpdateMetrics()
        for each in of_ranks:
            merged._sums += each._sums
            known = torch.stack([merged._teacher_kl, each._teacher_kl])
            merged._teacher_kl = torch.where(known.isnan().all(), torch.nan, known.nansum())
            merged._maxima = torch.fmax(merged._maxima, each._maxima)
        return merged

    def figures(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return means over tokens, extremes, and the means of what the optimizer steps returned."""
        means = (self._sums[1:] / self._sums[0]).tolist()
        mismatch_max, ratio_max, minus_ratio_min = self._maxima.tolist()
        return {
            **dict(zip(_TOKEN_MEANS, means, strict=True)),
            "teacher_kl": float(self._teacher_kl / self._sums[0]),
            "sampler_mismatch_max": mismatch_max,
            "ratio_min": -minus_ratio_min,
            "ratio_max": ratio_max,
            **{name: mean([step[name] for step in steps]) for name in steps[0]},
        }


def figures_without_update(learning_rate: float) -> dict[str, float]:
    """Return the figures of a rollout that had nothing to learn from: nothing was changed, and NaN was measured."""
    return UpdateMetrics().figures([{"loss": 0.0, "gradient_norm": 0.0, "learning_rate": learning_rate}])
