"""Probes of a model: greedy answers with their log-probabilities, which a server of the model has to reproduce."""

import random
from collections.abc import Sequence
from typing import Any

from components.rollout.sampler import Generate, Sampling
from components.shared.problem import Problem

_NUM_PROBES = 8
_MAX_TOKENS = 128
"""Limit of an answer; enough to tell models apart, and little compared with the evaluation."""


def probes(
    generate: Generate, problems: Sequence[Problem], *, seed: int, max_new_tokens: int, dtype: str
) -> dict[str, Any]:
    """Return the content of probes.json: token ids, and the natural log-probability of each token of the answer.

    The problems are drawn with the seed; `dtype` is the type in which `generate` computes.
    """
    drawn = random.Random(seed).sample(list(problems), min(_NUM_PROBES, len(problems)))
    sampling = Sampling(num_samples=1, temperature=0.0, max_new_tokens=min(max_new_tokens, _MAX_TOKENS), seed=seed)
    answers = [group[0] for group in generate(drawn, sampling)]
    rows = [
        {
            "id": problem.id,
            "prompt_ids": list(answer.tokens.prompt_ids),
            "completion_ids": list(answer.tokens.completion_ids),
            "logprobs": list(answer.logprobs),
        }
        for problem, answer in zip(drawn, answers, strict=True)
    ]
    return {"dtype": dtype, "probes": rows}
