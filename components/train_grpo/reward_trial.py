"""Load each custom reward before the first stage, and call it and the judge for made-up completions.

`custom_rewards.reward_errors` runs this module in a separate process, because custom code may hang or crash.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

from components.grading.verdicts import Reason
from components.grading.verifier import Grade, Verdict
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split
from components.train_grpo.custom_rewards import MARK, Failure, RewardFunction, is_slow, load_reward, values_of
from components.train_grpo.judge import JudgeConfig
from components.train_grpo.process_supervision import Step, outcome
from components.train_grpo.rewards import judged
from components.train_grpo.slow_rewards import Answers, RewardCallsConfig, calls_for

_LIMITS = RewardCallsConfig(max_tries=1)
# For a run whose problems cannot be read yet.
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
    """Return how a reward fails for a right and a wrong completion, the first failure; None if it scores both.

    It may return NaN, for no reward, for the wrong one, which has no answer.
    """
    from components.policy.packing import TokenSequence  # torch, which takes seconds
    from components.rollout.sampler import Completion
    from components.train_grpo.scoring import ScoredCompletion

    scored_G = []
    for texts, verdict, reason in (
        (("Let me see.\n", problem.solution or f"#### {problem.answer}"), Verdict.RIGHT, Reason.SAME_NUMBER),
        (("Let me see.\n", "Hm.\n", "#### no idea"), Verdict.WRONG, Reason.OTHER_NUMBER),
    ):
        completion = Completion(TokenSequence((0,), (0,)), logprobs=(0.0,), text="".join(texts), finished=True)
        grade = Grade(verdict, problem.answer if verdict is Verdict.RIGHT else "no idea", reason)
        scored_G.append(ScoredCompletion(completion, grade, tuple(Step(1, outcome(grade), each) for each in texts), {}))
    calls = calls_for(name, function, problem, scored_G) if is_slow(function) else []
    answers = iter(Answers().get(calls, _LIMITS))
    values_G = values_of(name, function, problem, scored_G, answers, deadline_s=_LIMITS.deadline_s)
    failures = [each for each in values_G if isinstance(each, Failure) and (each is values_G[0] or not each.is_nan)]
    return failures[0].message if failures else None


def _trial_errors(
    functions: Mapping[str, RewardFunction], judge: dict[str, Any] | None, problem: dict[str, Any] | None
) -> Iterator[str]:
    """Yield a line for each reward, and for the judge, that fails for a problem; without one, for a made-up problem."""
    trial_problem = Problem.model_validate(problem) if problem else _PROBLEM
    rewards = {f"train_grpo.reward.weights.{name}": (name, function) for name, function in functions.items()}
    if judge:
        settings = JudgeConfig.model_validate(judge)
        judge_reward = update_wrapper(partial(judged, settings=settings, timeout_s=_LIMITS.timeout_s), judged)
        rewards["train_grpo.reward.judge"] = ("judge", judge_reward)
    for key, (name, function) in rewards.items():
        try:
            if failure := _failure(name, function, trial_problem):
                yield f"{key}: {failure}, asked about a completion made up to try it"
        except PipelineError as error:
            yield str(error)


def _errors(
    names: Sequence[str],
    *,
    supervision: str,
    trained_here: bool,
    judge: dict[str, Any] | None,
    problem: dict[str, Any] | None,
) -> list[str]:
    """See `custom_rewards.reward_errors`; rewards are called only if all of them can be loaded."""
    functions: dict[str, RewardFunction] = {}
    lines = []
    for name in names:
        try:
            functions[name] = load_reward(name, supervision=supervision)
        except PipelineError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            module = name.partition(":")[0]
            # Elsewhere, only the reward's own module or package must be there, not the packages that it imports.
            if trained_here or missing is None or f"{module}.".startswith(f"{missing}."):
                lines.append(str(error))
    if lines or not trained_here:
        return lines
    return list(_trial_errors(functions, judge, problem))


if __name__ == "__main__":
    print(f"\n{MARK}{json.dumps(_errors(**json.loads(sys.argv[1])))}")
