"""Calling every reward of a user's own, and the judge, once before the first stage, about completions made up for it.

`custom_rewards.reward_errors` runs this module in a process of its own, because what people write may hang or crash.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from components.grading.verdicts import Reason
from components.grading.verifier import Grade, Verdict
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split
from components.train_grpo.custom_rewards import MARK, Failure, RewardFunction, load_reward
from components.train_grpo.judge import JudgeConfig
from components.train_grpo.process_supervision import Step, outcome
from components.train_grpo.rewards import judged
from components.train_grpo.scoring import Group, Scored, calls_about, values_of
from components.train_grpo.slow_rewards import Answers, RewardCallsConfig, is_slow

_LIMITS = RewardCallsConfig(max_tries=1)
# Where the run's own problems cannot be read beforehand.
_PROBLEM = Problem(
    id="trial/1",
    source="trial",
    split=Split.TRAIN,
    question="What is 1 + 1?",
    solution="1 + 1 = 2\n#### 2",
    answer="2",
    subject="",
    level=None,
)


def _failure(name: str, function: RewardFunction, problem: Problem) -> str | None:
    """Return how a reward fails for a right completion or a wrong one."""
    scored_G = []
    for text, verdict, reason in (
        (problem.solution or f"#### {problem.answer}", Verdict.RIGHT, Reason.SAME_NUMBER),
        ("#### no idea", Verdict.WRONG, Reason.OTHER_NUMBER),
    ):
        completion = Completion(TokenSequence((0,), (0,)), logprobs=(0.0,), text=text, finished=True)
        grade = Grade(verdict, problem.answer if verdict is Verdict.RIGHT else "no idea", reason)
        scored_G.append(Scored(completion, grade, (Step(1, outcome(grade), text),), {}))
    group = Group(problem, scored_G)
    answers = iter(Answers().get(calls_about(name, function, group) if is_slow(function) else [], _LIMITS))
    values_G = values_of(name, 1.0, function, group, answers, deadline_s=_LIMITS.deadline_s)
    return next((value.message for value in values_G if isinstance(value, Failure)), None)


def _lines(names: list[str], judge: dict[str, Any] | None, problem: dict[str, Any] | None) -> Iterator[str]:
    asked = Problem.model_validate(problem) if problem else _PROBLEM
    rewards: dict[str, tuple[str, Callable[[], RewardFunction]]]
    rewards = {f"train_grpo.reward.weights.{name}": (name, partial(load_reward, name)) for name in names}
    if judge:
        settings = JudgeConfig.model_validate(judge)
        rewards["train_grpo.reward.judge"] = ("judge", lambda: partial(judged, settings=settings))
    for key, (name, load) in rewards.items():
        try:
            if failure := _failure(name, load(), asked):
                yield f"{key}: {failure}, asked about a completion made up to try it"
        except PipelineError as error:
            yield str(error)


if __name__ == "__main__":
    print(f"\n{MARK}{json.dumps(list(_lines(**json.loads(sys.argv[1]))))}")
