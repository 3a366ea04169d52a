"""The metrics of completions as trajectories of several turns, where the model acts in an environment."""

import math
from collections.abc import Collection, Sequence

from components.rollout.sampler import Completion
from components.shared.errors import PipelineError
from components.shared.tools import ToolsConfig
from components.train_grpo.config import TrainGRPOConfig, reward_column
from components.train_grpo.metrics import mean
from components.train_grpo.rollouts import Rollout

_LIMITS = ("tokens", "turns", "context")
"""Limits that truncate a trajectory: sampled tokens, `tools.max_turns`, or the context of the model."""
_MAX_PARTS = 20
"""Parts of the reward with a column, in a run: an environment could give any number of names."""
_PART_PREFIX = "reward_environment_"


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
    """Return the means of the parts of the reward that environments gave, each summed over all turns."""
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
    parts = {column: columns.get(column, "") for column in list(dict.fromkeys([*before, *columns]))[:_MAX_PARTS]}
    return {  # no part has an empty name
        column: mean([sum(turn.rewards.get(part, 0.0) for turn in each.turns) for each in completions])
        for column, part in parts.items()
    }


def _limit_reached(config: TrainGRPOConfig, tools: ToolsConfig, completion: Completion) -> str:
    """Return which limit a truncated trajectory has reached."""
    if completion.num_tokens >= config.max_sampled_tokens:
        return "tokens"
    return "turns" if len(completion.turns) >= tools.max_turns else "context"
