"""One rollout: prompts, and for each a group of completions with their rewards.

Shape suffixes:
    P  prompts, G  completions per prompt, K  steps of all completions of a prompt, padded with NaN
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.policy.parallel import Ranks
from components.rollout.sampler import Completion, Generate
from components.shared.problem import Problem
from components.train_grpo.advantages import has_spread
from components.train_grpo.config import Combination, TrainGRPOConfig
from components.train_grpo.prompts import Prompts
from components.train_grpo.scoring import Scored

Score = Callable[[Sequence[Problem], Sequence[Sequence[Completion]]], list[list[Scored]]]
"""Problems (P,) and the completions of each (P, G) to those completions with their rewards (P, G)."""


@dataclass(frozen=True)
class Group:
    """A problem with the completions that are each other's baseline."""

    problem: Problem
    scored_G: list[Scored]

    @property
    def num_right(self) -> int:
        """Completions with the right answer."""
        return sum(scored.grade.verdict == "right" for scored in self.scored_G)

    @property
    def num_scorable(self) -> int:
        """Completions whose answer could be graded."""
        return sum(scored.grade.verdict != "unscorable" for scored in self.scored_G)


@dataclass(frozen=True)
class Rollout:
    """What the policy said to each prompt."""

    sampled: list[Group]
    """All groups, in the order they were sampled."""
    trained: list[Group]
    """Those that the policy is updated on."""
    sampling_s: float
    """Time that this process took, without the wait for others."""
    scoring_s: float


@dataclass(frozen=True)
class Drawn:
    """What one process has sampled and scored, of the problems that are its share."""

    groups: list[Group]
    sampling_s: float
    scoring_s: float


Sample = Callable[[Sequence[Problem], str], Drawn]
"""Problems, and the name of a stream of random numbers, to groups of completions."""


def draw(config: TrainGRPOConfig, generate: Generate, score: Score, problems_P: Sequence[Problem], seed: str) -> Drawn:
    """Sample a group of completions for each problem and score them; `seed` names a stream of random numbers."""
    started = time.monotonic()
    completions_PG = generate(
        [problem.question for problem in problems_P],
        num_samples=config.group_size,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=random.Random(seed).getrandbits(48),
    )
    drawn = time.monotonic()
    scored_PG = score(problems_P, completions_PG)  # all at once, which keeps every worker of the grader busy
    groups_P = [Group(*pair) for pair in zip(problems_P, scored_PG, strict=True)]
    return Drawn(groups_P, drawn - started, time.monotonic() - drawn)


def roll_out(config: TrainGRPOConfig, prompts: Prompts, sample: Sample, *, seed: str, ranks: Ranks) -> Rollout:
    """Sample a group of completions for each of a batch of problems and score them.

    Every process draws the same problems, samples and scores its share of them, and gets all groups.

    Groups without spread teach nothing: with dynamic sampling (DAPO, section 3.2) they are replaced by groups of
    further draws, for a bounded number of rounds. What is then missing stays missing, and the loss is divided by
    what is there. Rounds, and runs whose `seed` differs, have no random numbers in common.
    """
    sampled: list[Group] = []
    trained: list[Group] = []
    sampling_s = scoring_s = 0.0
    for round_ in range(config.prompts.max_resampling_rounds + 1):
        missing = config.prompts_per_step - len(trained)
        if not missing:
            break
        drawn = sample(ranks.shard(prompts.draw(missing)), stream(seed, round_, ranks))
        sampling_s, scoring_s = sampling_s + drawn.sampling_s, scoring_s + drawn.scoring_s
        groups_P = gathered(drawn, prompts, ranks)
        sampled += groups_P
        keep_all = config.prompts.max_resampling_rounds == 0
        trained += groups_P if keep_all else [group for group in groups_P if differs(config, group)]
    return Rollout(sampled, trained, sampling_s, scoring_s)


def stream(seed: str, round_: int, ranks: Ranks) -> str:
    """Return the name of the random numbers of a round, of which each process has its own."""
    return f"{seed}/{round_}" + (f"/{ranks.rank}" if ranks.rank else "")


def gathered(drawn: Drawn, prompts: Prompts, ranks: Ranks) -> list[Group]:
    """Return the groups of all processes, taken note of for the choice of problems."""
    groups_P = [group for share in ranks.all_gather(drawn.groups, "the end of sampling") for group in share]
    for group in groups_P:
        prompts.record(group.problem.id, num_right=group.num_right, num_scored=group.num_scorable)
    return groups_P


def differs(config: TrainGRPOConfig, group: Group) -> bool:
    """Tell whether a group's rewards differ, so that there is something to learn from it."""
    return any(bool(has_spread(rewards_PK).item()) for rewards_PK in reward_sets(config, [group]).values())


def reward_sets(config: TrainGRPOConfig, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return what is normalised, each (P, K): the weighted sum of all rewards, or each of them by itself."""
    weights = config.reward.weights
    if config.reward.combination is Combination.BEFORE_NORMALISATION:
        return {"combined": _padded([[scored.combined(weights) for scored in group.scored_G] for group in groups])}
    return {
        name: _padded([[scored.rewards[name] for scored in group.scored_G] for group in groups]) for name in weights
    }


def _padded(rewards_PGK: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """Lay the steps of each group's completions end to end."""
    rows = [torch.tensor([x for steps in group for x in steps], dtype=torch.float64) for group in rewards_PGK]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
