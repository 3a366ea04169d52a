"""Metrics of the trajectories of a model that acts in an environment."""

import math
from collections.abc import Collection, Sequence

from components.rollout.sampler import Completion
from components.shared.errors import PipelineError
from components.shared.tools import ToolsConfig
from components.train_grpo.config import TrainGRPOConfig, reward_column
from components.train_grpo.metrics import mean
from components.train_grpo.rollouts import Rollout

_LIMITS = ("tokens", "turns", "context")
"""Limits that truncate a trajectory: sampled tokens, `tools.max_turns`, and the model's context."""
_MAX_PARTS = 20
"""Parts of the environment's reward that have a column; there may be any number of parts."""
_PART_PREFIX = "reward_environment_"


def trajectory_metrics(
    config: TrainGRPOConfig, tools: ToolsConfig, rollout: Rollout, columns_before: Collection[str] = ()
) -> dict[str, float]:
    """Return the metrics of all sampled trajectories.

    `columns_before` are the columns of earlier steps: those for parts of the reward are kept.
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
    """Return the mean over completions of each part of the environment's reward, summed over their turns."""
    others = {reward_column(name): name for name in config.reward.names}
    part_of: dict[str, str] = {}
    for part in sorted({name for each in completions for turn in each.turns for name in turn.rewards}):
        column = reward_column(f"environment:{part}")
        other = part_of.get(column, others.get(column))
        if other is not None:
            raise PipelineError(
                f"the environment's reward `{part}` and the reward `{other}` would share the column `{column}` of the "
                "curves: rename one of them"
            )
        part_of[column] = part
    before = [column for column in columns_before if column.startswith(_PART_PREFIX) and column not in others]
    means = {}
    for column in list(dict.fromkeys([*before, *part_of]))[:_MAX_PARTS]:
        part = part_of.get(column, "")  # no part is called "": one that is missing in this rollout has the mean 0
        means[column] = mean([sum(turn.rewards.get(part, 0.0) for turn in each.turns) for each in completions])
    return means


def _limit_reached(config: TrainGRPOConfig, tools: ToolsConfig, completion: Completion) -> str:
    """Return which of `_LIMITS` a truncated trajectory has reached."""
    if completion.num_tokens >= config.sampling.max_new_tokens:
        return "tokens"
    return "turns" if len(completion.turns) >= tools.max_turns else "context"
