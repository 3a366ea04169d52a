"""Requests to vLLM in tokens, and completions from its answers."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion


class Request(NamedTuple):
    """A prompt, and how to sample from it."""

    prompt_ids: tuple[int, ...]
    params: dict[str, Any]
    """vLLM's `SamplingParams`."""


class SampledTokens(NamedTuple):
    """A completion as vLLM returns it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ScoringRequest(NamedTuple):
    """A request whose answer has the log-probability of a given token, as the next after a prompt."""

    prompt_ids: tuple[int, ...]
    token: int
    params: dict[str, Any]


def completion_requests(
    checkpoint: Checkpoint,
    questions: Sequence[str],
    *,
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[Request]:
    """Return a request for each group, whose tokens are sampled from exactly softmax(logits / T)."""
    seeds = random.Random(seed)
    common = {
        "n": num_samples,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": max_new_tokens,
        # The end tokens of the policy, whatever the folder of the model says.
        "stop_token_ids": list(checkpoint.end_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    # vLLM adds the number of the completion in its group to the seed.
    return [Request(checkpoint.prompt_ids(each), {**common, "seed": seeds.getrandbits(53)}) for each in questions]


def completions(
    checkpoint: Checkpoint, requests: Sequence[Request], answers: Sequence[Sequence[SampledTokens]]
) -> list[list[Completion]]:
    """Return the completions of each request; their tokens are those that vLLM sampled, with the end token."""

    def completion(prompt_ids: tuple[int, ...], sampled: SampledTokens) -> Completion:
        ids = sampled.token_ids
        finished = ids[-1] in checkpoint.end_ids
        text = checkpoint.decode(ids[:-1] if finished else ids)
        return Completion(TokenSequence(prompt_ids, ids), sampled.logprobs, text, finished=finished)

    return [
        [completion(request.prompt_ids, sampled) for sampled in group]
        for request, group in zip(requests, answers, strict=True)
    ]


def scoring_requests(sequence: TokenSequence, temperature: float) -> list[ScoringRequest]:
    """Return the requests for the log-probabilities of the completion tokens of a sequence, in their order.

    At temperature 1 vLLM returns those of the tokens of a prompt as well: one request for all, whose answer has those
    of its prompt first. At any other temperature it takes a request for each token.
    """
    ids = sequence.prompt_ids + sequence.completion_ids
    one_pass = temperature in (0, 1)  # the log-probabilities of greedy decoding are at temperature 1
    places = [len(ids) - 1] if one_pass else range(len(sequence.prompt_ids), len(ids))
    common = {"max_tokens": 1, "temperature": temperature, "seed": 0, "detokenize": False, "ignore_eos": True}
    if one_pass:
        common["prompt_logprobs"] = 0
    # A server returns as many as `logprobs` says, beginning with the token it sampled: the requested one is the second.
    return [
        ScoringRequest(ids[:place], ids[place], {**common, "logprobs": 2, "logprob_token_ids": [ids[place]] * 2})
        for place in places
    ]
