"""The metrics of a step: those of its rollout, and those of its update."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from components.grading.verifier import Reason, Verdict
from components.rollout.sampler import Completion
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.tools import ToolsConfig
from components.train_grpo.config import LossConfig, TrainGRPOConfig, reward_column
from components.train_grpo.objective import TokenObjective, Tokens, beyond_clip
from components.train_grpo.rollouts import Rollout, rewards_differ
from components.train_grpo.scoring import Group, ScoredCompletion

_TOKEN_MEANS = (
    *("kl", "entropy", "clip_high_fraction", "clip_low_fraction"),
    *("importance_weight", "masked_token_fraction", "sampler_mismatch"),
)
"""Metrics that are means over tokens, in the order of `UpdateMetrics.add`."""
_TRAJECTORY_LIMITS = ("tokens", "turns", "context")
"""Limits that truncate a trajectory: sampled tokens, `tools.max_turns`, and the model's context."""
_MAX_PARTS = 20
"""Parts of the environment's reward that have a column; there may be any number of parts."""
_PART_PREFIX = "reward_environment_"


# The rollout ----------------------------------------------------------------------------------------------------------


def rollout_metrics(config: TrainGRPOConfig, rollout: Rollout, answer_policy: AnswerPolicy) -> dict[str, float]:
    """Return the metrics of all sampled completions, also of those that are not trained on.

    Rewards and accuracy are means over the completions that could be scored, for each reward over those of the problems
    whose source has it. `answer_policy` says where in a completion an answer counts.
    """
    scored = [each for group in rollout.sampled for each in group.scored_G]
    rewards: list[float] = []
    for group in rollout.sampled:
        weights = config.reward.weights_of(group.problem.source)
        rewards += [sum(each.combined(weights)) for each in group.scored_G]
    lengths = [each.completion.num_tokens for each in scored]
    num_scorable = sum(group.num_scorable for group in rollout.sampled)
    num_groups = len(rollout.sampled)
    without_spread = [group for group in rollout.sampled if not rewards_differ(config, group)]
    all_right = sum(group.num_right == len(group.scored_G) for group in without_spread)
    all_wrong = sum(group.num_right == 0 and group.num_scorable == len(group.scored_G) for group in without_spread)
    return {
        "reward": mean(rewards),
        **{
            reward_column(name): mean([value for each in scored for value in each.rewards.get(name, ())])
            for name in config.reward.names
        },
        "accuracy": sum(group.num_right for group in rollout.sampled) / num_scorable if num_scorable else math.nan,
        "worked_fraction": mean([each.completion.is_worked(answer_policy) for each in scored]),
        "completion_length_tokens": mean(lengths),
        "completion_length_max_tokens": max(lengths),
        "truncated_fraction": mean([each.completion.truncated for each in scored]),
        "unanswered_fraction": mean([is_unanswered(each) for each in scored]),
        "unscorable_fraction": mean([each.why_unscorable is not None for each in scored]),
        "reward_failures": sum(each.failure is not None for each in scored),
        "distinct_answers": mean([_distinct_answers(group) for group in rollout.sampled]),
        "groups_sampled": num_groups,
        "groups_trained": len(rollout.trained),
        "groups_without_spread_fraction": len(without_spread) / num_groups,
        "groups_all_right_fraction": all_right / num_groups,
        "groups_all_wrong_fraction": all_wrong / num_groups,
    }


def is_unanswered(scored: ScoredCompletion) -> bool:
    """Return whether a completion finished without an answer in the place where the model's config expects one."""
    return scored.completion.finished and scored.grade.reason is Reason.NO_ANSWER


def staleness_metrics(config: TrainGRPOConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Return the ages, in updates, of the tokens that a step learns from; {} without staleness."""
    if not config.sampler.max_staleness:
        return {}
    completions = [scored.completion for group in rollout.trained for scored in group.scored_G]
    ages = [step - 1 - version for completion in completions for version in completion.versions]
    return {"staleness_mean": mean(ages), "staleness_max": max(ages, default=math.nan)}


def _distinct_answers(group: Group) -> float:
    """Return the number of different final answers of a group divided by its size.

    All right answers count as one. Others are compared as text without spaces and case: to parse them as mathematics
    could take any time, which this process does not limit.
    """
    answers: set[str | None] = set()
    for scored in group.scored_G:
        if scored.grade.verdict is Verdict.RIGHT:
            answers.add(None)  # stands for the right answer
        elif scored.grade.extracted is not None:
            answers.add("".join(scored.grade.extracted.split()).casefold())
    return len(answers) / len(group.scored_G)


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without such values."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


# The trajectories of a model that acts in an environment --------------------------------------------------------------


def trajectory_metrics(
    config: TrainGRPOConfig, tools: ToolsConfig, rollout: Rollout, columns_before: Collection[str] = ()
) -> dict[str, float]:
    """Return the metrics of all sampled trajectories.

    `columns_before` are the columns of earlier steps: those for parts of the reward are kept.
    """
    completions = [scored.completion for group in rollout.sampled for scored in group.scored_G]
    calls = [sum(turn.is_call for turn in each.turns) for each in completions]
    truncated = [_limit_reached(config, tools, each) for each in completions if each.truncated]
    shares = {limit: truncated.count(limit) / len(completions) for limit in _TRAJECTORY_LIMITS}
    return {
        "turns": mean([len(each.turns) for each in completions]),
        "turns_max": max(len(each.turns) for each in completions),
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
    """Return the mean over completions of each part of the environment's reward, summed over their turns."""
    others = {reward_column(name): name for name in config.reward.names}
    turns = [turn for each in completions for turn in each.turns]
    part_of_column: dict[str, str] = {}
    for part in sorted({part for turn in turns for part in turn.rewards}):
        column = reward_column(f"environment:{part}")
        other = part_of_column.get(column, others.get(column))
        if other is not None:
            raise PipelineError(
                f"the environment's reward `{part}` and the reward `{other}` would share the column `{column}` of the "
                "curves: rename one of them"
            )
        part_of_column[column] = part
    before = [column for column in columns_before if column.startswith(_PART_PREFIX) and column not in others]
    columns = list(dict.fromkeys([*before, *part_of_column]))[:_MAX_PARTS]
    means = dict.fromkeys(columns, 0.0)  # a part that this rollout lacks has the mean 0
    for column, part in part_of_column.items():
        if column in means:
            means[column] = mean([sum(turn.rewards.get(part, 0.0) for turn in each.turns) for each in completions])
    return means


def _limit_reached(config: TrainGRPOConfig, tools: ToolsConfig, completion: Completion) -> str:
    """Return which of `_TRAJECTORY_LIMITS` a truncated trajectory has reached."""
    if completion.num_tokens >= config.sampling.max_new_tokens:
        return "tokens"
    return "turns" if len(completion.turns) >= tools.max_turns else "context"


# The update -----------------------------------------------------------------------------------------------------------


class UpdateMetrics:
    """Sums and extremes over the completion tokens that are in the loss of one pass through a rollout."""

    def __init__(self) -> None:
        self._sums = torch.zeros(1 + len(_TOKEN_MEANS), dtype=torch.float64)
        """The number of tokens, then the sums over them of each of `_TOKEN_MEANS`."""
        self._teacher_kl: list[float] = []
        """KL divergence from the teacher, summed over the tokens of each micro-batch."""
        self._maxima = torch.full((3,), torch.nan, dtype=torch.float64)
        """Maxima of the sampler's mismatch, of the ratio, and of minus the ratio; NaN before the first token."""

    @property
    def mean_mismatch(self) -> float:
        """Mean absolute difference between the log-probabilities of sampler and trainer, in nats per token."""
        return float(self._sums[-1] / self._sums[0])

    @torch.no_grad()
    def add(self, loss: LossConfig, tokens: Tokens, terms: TokenObjective) -> None:
        """Add the tokens of a micro-batch."""
        ratio_N = terms.ratio_N
        unknown_N = torch.full_like(ratio_N, torch.nan)
        kl_N = unknown_N if terms.kl_N is None else terms.kl_N
        weight_N = unknown_N if terms.weight_N is None else terms.weight_N
        masked_N = unknown_N if terms.weight_N is None else terms.weight_N == 0
        high_N, low_N = beyond_clip(loss, tokens, ratio_N)
        mismatch_N = (tokens.old_logprobs_N - tokens.sampler_logprobs_N).abs()
        columns = (torch.ones_like(ratio_N), kl_N, tokens.entropy_N, high_N, low_N, weight_N, masked_N, mismatch_N)
        self._sums += torch.stack([values_N.double() for values_N in columns]).sum(1).cpu()
        largest = torch.stack([mismatch_N, ratio_N, -ratio_N]).amax(1)
        self._maxima = torch.fmax(self._maxima, largest.double().cpu())  # fmax ignores the initial NaN

    def add_teacher_kl(self, kl_N: Tensor) -> None:
        """Add the KL divergence from the teacher of each token of a micro-batch."""
        self._teacher_kl.append(float(kl_N.double().sum()))

    @staticmethod
    def merged(of_ranks: "Sequence[UpdateMetrics]") -> "UpdateMetrics":
        """Return the metrics over the tokens of all processes."""
        merged = UpdateMetrics()
        for each in of_ranks:
            merged._sums += each._sums
            merged._teacher_kl += each._teacher_kl
            merged._maxima = torch.fmax(merged._maxima, each._maxima)
        return merged

    def figures(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return means and extremes over tokens, and the means over `steps` of what the optimizer steps returned."""
        means = (self._sums[1:] / self._sums[0]).tolist()
        mismatch_max, ratio_max, minus_ratio_min = self._maxima.tolist()
        return {
            **dict(zip(_TOKEN_MEANS, means, strict=True)),
            "teacher_kl": sum(self._teacher_kl) / float(self._sums[0]) if self._teacher_kl else math.nan,
            "sampler_mismatch_max": mismatch_max,
            "ratio_min": -minus_ratio_min,
            "ratio_max": ratio_max,
            **{name: mean([step[name] for step in steps]) for name in steps[0]},
        }


def metrics_without_update(learning_rate: float) -> dict[str, float]:
    """Return the metrics of a step without an update: loss and gradient norm 0, the learning rate, otherwise NaN."""
    return UpdateMetrics().figures([{"loss": 0.0, "gradient_norm": 0.0, "learning_rate": learning_rate}])
