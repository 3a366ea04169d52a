"""Completions with the rewards and steps that a test wants."""

from collections.abc import Mapping, Sequence
from typing import Any

from components.grading.verifier import Grade, Reason, Verdict
from components.grading.verifier import grade as grade_text
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Turn
from components.shared.answer_policy import AnswerPolicy
from components.train_grpo.process_supervision import Step, outcome
from components.train_grpo.rewards import step_reward
from components.train_grpo.scoring import Group, ScoredCompletion
from tests import tiny


def completion(num_tokens: int = 3, *, text: str = "#### 0", finished: bool = True) -> Completion:
    """Return a completion of that many tokens, each of which the sampler sampled with log-probability -1."""
    return Completion(TokenSequence((1, 2), tuple(range(3, 3 + num_tokens))), (-1.0,) * num_tokens, text, finished)


def trajectory(*turns: Turn, finished: bool = True, failure: str | None = None) -> Completion:
    """Return a completion of these turns, with two tokens of an environment between each of them."""
    starts = [turn.end + 2 * number for number, turn in enumerate(turns[:-1])]
    environment = tuple((start, start + 2) for start in starts)
    num_tokens = turns[-1].end + 2 * len(starts)
    return Completion(
        TokenSequence((1, 2), tuple(range(3, 3 + num_tokens)), environment),
        (-1.0,) * turns[-1].end,
        "".join(turn.text + turn.observation for turn in turns),
        finished,
        turns=turns,
        failure=failure,
    )


def grade(verdict: Verdict) -> Grade:
    """Return a grade with nothing but a verdict."""
    return Grade(verdict, extracted=None, reason=Reason.NO_ANSWER)


def scored(
    rewards: Mapping[str, Sequence[float]],
    *,
    ends: Sequence[int] | None = None,
    num_tokens: int = 3,
    verdict: Verdict = Verdict.RIGHT,
    finished: bool = True,
) -> ScoredCompletion:
    """Return a completion with these rewards; its steps end at `ends`, by default the one with the completion."""
    return ScoredCompletion(
        completion(num_tokens, finished=finished),
        grade(verdict),
        tuple(Step(end, 0.0) for end in ends or (num_tokens,)),
        {name: tuple(values) for name, values in rewards.items()},
    )


def graded(answer: str, response: Completion) -> ScoredCompletion:
    """Return a completion with its grade, rewarded for being right."""
    result = grade_text(answer, response.text, AnswerPolicy.DECLARED) if response.finished else grade(Verdict.WRONG)
    worth = outcome(result)
    return ScoredCompletion(response, result, (Step(response.num_tokens, worth),), {"accuracy": (worth,)})


def group(*scored_g: ScoredCompletion) -> Group:
    """Return a group of completions of some problem."""
    return Group(tiny.PROBLEMS[0], list(scored_g))


def rewarded(*rewards: float, lengths: Sequence[int] | None = None) -> Group:
    """Return a group of completions with one accuracy reward each."""
    pairs = zip(rewards, lengths or [3] * len(rewards), strict=True)
    return group(*(scored({"accuracy": [reward]}, num_tokens=length) for reward, length in pairs))


def shortness(problem: Any, response: Completion, grade: Any) -> float:
    """A custom reward that differs between almost any two completions."""
    del problem, grade
    return -len(response.text) / 10


async def patient(problem: Any, response: Completion, grade: Any) -> float:
    """A custom reward that waits for a server, as far as the run knows."""
    del problem, response, grade
    return 1.0


@step_reward
def checked(problem: Any, steps: Sequence[str], result: Grade) -> list[float]:
    """A custom reward of each line: 1 for a sum that holds, 0 for any other; of the last, what the answer is worth."""
    del problem
    sums = [line.strip().partition("=") for line in steps[:-1]]
    holds = [bool(right) and sum(map(int, left.split("+"))) == int(right) for left, _, right in sums]
    return [*map(float, holds), outcome(result)]


CHECKED = "tests.train_grpo.groups:checked"
SHORTNESS = {"accuracy": 1.0, "tests.train_grpo.groups:shortness": 1.0}
