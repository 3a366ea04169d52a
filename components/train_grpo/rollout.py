"""One rollout: prompts, a group of completions for each, their rewards and advantages.

Shape suffixes:
    P  prompts, G  completions per prompt, B = P * G sequences, group after group
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.rollout.completion import Completion, Generate, grade_completion
from components.shared.answer import has_reasoning
from components.shared.grading import Grade
from components.shared.problem import Problem
from components.train_grpo.advantages import group_advantages, has_spread
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.reward import accuracy_reward


@dataclass(frozen=True)
class Rollout:
    """What the policy said to each prompt, and how much better than its siblings each completion did."""

    problems_P: list[Problem]
    completions_PG: list[list[Completion]]
    grades_PG: list[list[Grade]]
    rewards_PG: Tensor
    advantages_PG: Tensor

    @property
    def completions_B(self) -> list[Completion]:
        """All completions, group after group."""
        return [completion for group in self.completions_PG for completion in group]

    @property
    def grades_B(self) -> list[Grade]:
        """The grade of each completion, group after group."""
        return [grade for group in self.grades_PG for grade in group]


def roll_out(config: TrainGRPOConfig, generate: Generate, problems_P: list[Problem], *, seed: int) -> Rollout:
    """Sample a group of completions for each problem and score them."""
    completions_PG = generate(
        [problem.question for problem in problems_P],
        num_samples=config.group_size,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=seed,
    )
    grades_PG = [
        [grade_completion(problem.answer, completion) for completion in group]
        for problem, group in zip(problems_P, completions_PG, strict=True)
    ]
    rewards_PG = torch.tensor([[accuracy_reward(grade) for grade in group] for group in grades_PG], dtype=torch.float64)
    return Rollout(problems_P, completions_PG, grades_PG, rewards_PG, group_advantages(rewards_PG))


def prompt_batches(problems: Sequence[Problem], size: int, *, seed: int) -> Iterator[list[Problem]]:
    """Yield batches for ever; every pass over the problems has its own order, and no batch holds a problem twice."""
    order = random.Random(seed)
    while True:
        shuffled = order.sample(list(problems), len(problems))
        for start in range(0, len(shuffled) - size + 1, size):
            yield shuffled[start : start + size]


def figures(rollout: Rollout) -> dict[str, float]:
    """Return the metrics of a rollout; rewards and accuracy are means over what could be scored."""
    completions, grades = rollout.completions_B, rollout.grades_B
    scored = [grade for grade in grades if grade.verdict != "unscorable"]
    return {
        "reward": float(rollout.rewards_PG.nanmean()),
        "accuracy": _mean([grade.verdict == "right" for grade in scored]),
        "worked_fraction": _mean([has_reasoning(completion.text) for completion in completions]),
        "completion_length_tokens": _mean([len(completion.tokens.completion_ids) for completion in completions]),
        "truncated_fraction": _mean([not completion.finished for completion in completions]),
        "groups_without_spread_fraction": 1 - float(has_spread(rollout.rewards_PG).double().mean()),
        "unscorable_fraction": 1 - len(scored) / len(grades),
    }


def records(rollout: Rollout, *, step: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first `count` completions of a rollout with their rewards, to be read by people."""
    for index, (completion, grade) in enumerate(
        list(zip(rollout.completions_B, rollout.grades_B, strict=True))[:count]
    ):
        problem = rollout.problems_P[index // len(rollout.completions_PG[0])]
        yield {
            "step": step,
            "id": problem.id,
            "sample": index % len(rollout.completions_PG[0]),
            "question": problem.question,
            "answer": problem.answer,
            "completion": completion.text,
            "reward": None if grade.verdict == "unscorable" else float(rollout.rewards_PG.flatten()[index]),
            "verdict": grade.verdict,
            "advantage": float(rollout.advantages_PG.flatten()[index]),
            "num_tokens": len(completion.tokens.completion_ids),
            "finished": completion.finished,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
