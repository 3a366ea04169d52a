"""What a rollout says about the policy, for people: one row per step, and the completions behind it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from components.grading.verifier import has_reasoning
from components.shared.answer_policy import AnswerPolicy
from components.train_grpo.config import TrainGRPOConfig, reward_column
from components.train_grpo.experience import Experience
from components.train_grpo.rollout import Group, Rollout, differs
from components.train_grpo.scoring import Scored


def rollout_figures(config: TrainGRPOConfig, rollout: Rollout, policy: AnswerPolicy) -> dict[str, float]:
    """Return the metrics of everything that was sampled, also of what is not trained on.

    Rewards and accuracy are means over what could be scored; `policy` says where an answer counts.
    """
    scored = [scored for group in rollout.sampled for scored in group.scored_G]
    weights = config.reward.weights
    lengths = [len(each.completion.tokens.completion_ids) for each in scored]
    scorable = sum(group.num_scorable for group in rollout.sampled)
    return {
        "reward": mean([sum(each.combined(weights)) for each in scored]),
        **{reward_column(name): mean([x for each in scored for x in each.rewards[name]]) for name in weights},
        "accuracy": sum(group.num_right for group in rollout.sampled) / scorable if scorable else math.nan,
        "worked_fraction": mean([has_reasoning(each.completion.text, policy) for each in scored]),
        "completion_length_tokens": mean(lengths),
        "completion_length_max_tokens": max(lengths),
        "truncated_fraction": mean([not each.completion.finished for each in scored]),
        "unscorable_fraction": mean([each.unscorable is not None for each in scored]),
        "reward_failures": sum(each.failure is not None for each in scored),
        **_spread(config, rollout),
    }


def _spread(config: TrainGRPOConfig, rollout: Rollout) -> dict[str, float]:
    """How many groups had nothing to teach, and why."""
    level = [group for group in rollout.sampled if not differs(config, group)]
    all_right = sum(group.num_right == len(group.scored_G) for group in level)
    all_wrong = sum(group.num_right == 0 and group.num_scorable == len(group.scored_G) for group in level)
    num_sampled = len(rollout.sampled)
    return {
        "groups_sampled": num_sampled,
        "groups_trained": len(rollout.trained),
        "groups_without_spread_fraction": len(level) / num_sampled,
        "groups_all_right_fraction": all_right / num_sampled,
        "groups_all_wrong_fraction": all_wrong / num_sampled,
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are numbers; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def completion_records(
    config: TrainGRPOConfig, groups: Sequence[Group], given: Experience, *, step: int
) -> Iterator[dict[str, Any]]:
    """Yield the first completions of a rollout with their rewards, to be read by people."""
    advantages_B = given.advantages_M.split(given.num_tokens_B.tolist())
    scored_B = [(group, sample, scored) for group in groups for sample, scored in enumerate(group.scored_G)]
    kept = zip(scored_B, advantages_B, strict=True)
    for (group, sample, scored), advantages in list(kept)[: config.completions_kept_per_step]:
        yield {
            "step": step,
            "id": group.problem.id,
            "sample": sample,
            "question": group.problem.question,
            "answer": group.problem.answer,
            "completion": scored.completion.text,
            "extracted": scored.grade.extracted,
            "verdict": scored.grade.verdict.value,
            "reason": scored.grade.reason,
            "num_tokens": len(scored.completion.tokens.completion_ids),
            "finished": scored.completion.finished,
            **_rewards(config, scored),
            "reward_failure": scored.failure.message if scored.failure else None,
            # That of the first token, which every step of the completion adds to.
            "advantage": float(advantages[0]),
        }


def _rewards(config: TrainGRPOConfig, scored: Scored) -> dict[str, Any]:
    combined = scored.combined(config.reward.weights)
    named = {str(name): [_or_none(value) for value in values] for name, values in scored.rewards.items()}
    return {"reward": _or_none(sum(combined)), "rewards": named}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
