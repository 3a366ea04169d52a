"""What completions are worth: each reward a small function, chosen by name and weight in the params.

A reward is of one completion as a whole: a function of the problem, the completion and its grade. Three more are not,
and are in scoring.py with what they need: `length`, which compares a group, and `steps` and `reward_model`, which are
given for each step. NaN is no reward at all, for what could not be scored.

Shape suffixes:
    G  completions of a prompt
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from components.grading.verifier import Grade, Verdict, has_reasoning, is_unit_tests, require_sandbox
from components.rollout.sampler import Completion
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.train_grpo import own_reward
from components.train_grpo.config import RewardName, TrainGRPOConfig, is_own
from components.train_grpo.steps import outcome

Reward = Callable[[Problem, Completion, Grade], float]

_THOUGHT_FIRST = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


def chosen_rewards(config: TrainGRPOConfig, model: ModelConfig) -> dict[str, Reward]:
    """Return the rewards with a weight that are of one completion as a whole."""
    ours: dict[str, Reward] = {
        RewardName.ACCURACY: accuracy,
        RewardName.CODE_TESTS: code_tests,
        RewardName.FORMAT: partial(answer_format, model=model),
        RewardName.OVERLONG: partial(
            overlong, buffer=config.reward.overlong_buffer_tokens, limit=config.sampling.max_new_tokens
        ),
        RewardName.REPETITION: partial(repetition, n=config.reward.repetition_ngram_tokens),
    }
    own = {name: own_reward.load(name) for name in config.reward.weights if is_own(name)}
    return {name: reward for name, reward in {**ours, **own}.items() if name in config.reward.weights}


def require_rewards(config: TrainGRPOConfig, problems: Sequence[Problem]) -> None:
    """Raise PipelineError where a reward with a weight cannot be given to the completions of `problems`."""
    for name in filter(is_own, config.reward.weights):
        own_reward.load(name)
    without_tests = [problem.id for problem in problems if not is_unit_tests(problem.answer)]
    if RewardName.CODE_TESTS in config.reward.weights and without_tests:
        raise PipelineError(
            f"train_grpo.reward.weights.code_tests: {len(without_tests)} of {len(problems)} training problems have no "
            f"unit tests, such as {without_tests[0]}; leave it out, `accuracy` judges both kinds"
        )
    if len(without_tests) < len(problems):
        require_sandbox()


def accuracy(problem: Problem, completion: Completion, grade: Grade) -> float:
    """Return 1 for a right answer, 0 for a wrong one, and NaN (no reward at all) for one that cannot be scored."""
    del problem, completion
    return outcome(grade)


def code_tests(problem: Problem, completion: Completion, grade: Grade) -> float:
    """Return the share of the unit tests passed; 0 for what was cut off, and NaN where there are no tests."""
    del problem
    if grade.verdict is Verdict.UNSCORABLE:
        return math.nan
    if not completion.finished:
        return 0.0
    return math.nan if grade.tests_passed is None else grade.tests_passed


def answer_format(problem: Problem, completion: Completion, grade: Grade, *, model: ModelConfig) -> float:
    """Return 1 where some reasoning leads to an answer in the designated place, else 0, whatever the answer is.

    Where the prompt asks for thoughts, the completion has to be one thought and, after it, the answer. The place of
    code is a fenced block, and it needs no words before it.
    """
    text = completion.text
    if not completion.finished or (model.asks_for_thoughts and not _thinks_first(text, model.prompt)):
        return 0.0
    if is_unit_tests(problem.answer):
        return float(grade.extracted is not None)
    return float(has_reasoning(text, model.answer))


def _thinks_first(text: str, prompt: str) -> bool:
    """Tell whether a response is a single thought with something in it, and then what is no thought."""
    opened = prompt.rstrip().endswith("<think>")
    found = _THOUGHT_FIRST.fullmatch("<think>" + text if opened else text)
    return found is not None and bool(found["thought"].strip()) and "think>" not in found["thought"] + found["answer"]


def overlong(problem: Problem, completion: Completion, grade: Grade, *, buffer: int, limit: int) -> float:
    """Return 0 up to the buffer, then a line down to -1 at the length limit (DAPO, arXiv 2503.14476, equation 13)."""
    del problem, grade
    over = len(completion.tokens.completion_ids) - (limit - buffer)
    return -max(0, over) / buffer


def repetition(problem: Problem, completion: Completion, grade: Grade, *, n: int) -> float:
    """Return minus the share of n-grams of tokens that are repetitions: 0 where all differ or there is none."""
    del problem, grade
    ids = completion.tokens.completion_ids
    ngrams = [ids[start : start + n] for start in range(len(ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0


def length(num_tokens_G: Sequence[int], outcomes_G: Sequence[float]) -> list[float]:
    """Return the length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3) for a group.

    0.5 for the shortest, falling in a line to -0.5 for the longest; of wrong answers only what is negative. An outcome
    of NaN, which is neither right nor wrong, has no reward, and its length counts for nothing.
    """
    counted = [count for count, outcome in zip(num_tokens_G, outcomes_G, strict=True) if not math.isnan(outcome)]
    shortest, longest = min(counted, default=0), max(counted, default=0)
    spread = longest - shortest

    def reward(count: int, outcome: float) -> float:
        if math.isnan(outcome):
            return math.nan
        value = 0.5 - (count - shortest) / spread if spread else 0.0
        return value if outcome else min(0.0, value)

    return [reward(count, outcome) for count, outcome in zip(num_tokens_G, outcomes_G, strict=True)]
