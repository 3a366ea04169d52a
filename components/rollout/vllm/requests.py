"""What vLLM is asked for, and completions from what it answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion


class Tokens(Protocol):
    """What has to be known of a policy to talk to it in tokens; a `Checkpoint` knows it."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        ...

    def prompt_ids(self, question: str) -> tuple[int, ...]:
        """Return the tokens of the prompt that asks `question`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of completion tokens without special tokens."""
        ...


@dataclass(frozen=True)
class Drawn:
    """One completion as vLLM gives it back."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def group_seeds(seed: int, num_groups: int) -> list[int]:
    """Return a seed for each group; vLLM adds the number of the completion in its group."""
    drawn = random.Random(seed)
    return [drawn.getrandbits(53) for _ in range(num_groups)]


def sampling_params(
    tokens: Tokens, *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
) -> dict[str, Any]:
    """Return vLLM's parameters of a group whose tokens are drawn from exactly softmax(logits / T)."""
    return {
        "n": num_samples,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": max_new_tokens,
        "seed": seed,
        # The end tokens of the policy, whatever the model's folder says of its own.
        "stop_token_ids": list(tokens.end_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def completion(tokens: Tokens, prompt: tuple[int, ...], drawn: Drawn) -> Completion:
    """Return what was drawn as a completion: its tokens are those that vLLM drew, with the end token."""
    ids = drawn.token_ids
    finished = ids[-1] in tokens.end_ids
    text = tokens.decode(ids[:-1] if finished else ids)
    return Completion(TokenSequence(prompt, ids), drawn.logprobs, text, finished=finished)


@dataclass(frozen=True)
class ScoringRequest:
    """A request whose answer tells the log-probability of a given token, as the next after a prompt."""

    prompt: tuple[int, ...]
    token: int
    sampling_params: dict[str, Any]


def scoring_requests(sequence: TokenSequence, temperature: float) -> list[ScoringRequest]:
    """Return the requests that tell the log-probabilities of the completion tokens of a sequence, in their order.

    At temperature 1 vLLM tells them of the tokens of a prompt as well: one request for all, whose answer has those of
    its prompt first. At any other it takes a request for each.
    """
    whole = sequence.prompt_ids + sequence.completion_ids
    one_pass = temperature in (0, 1)  # what greedy decoding says is at temperature 1
    places = [len(whole) - 1] if one_pass else range(len(sequence.prompt_ids), len(whole))
    common = {"max_tokens": 1, "temperature": temperature, "seed": 0, "detokenize": False, "ignore_eos": True}
    if one_pass:
        common["prompt_logprobs"] = 0
    # A server tells as many as `logprobs` says, beginning with the token it drew: the one in question is the second.
    return [
        ScoringRequest(
            whole[:place], whole[place], {**common, "logprobs": 2, "logprob_token_ids": [whole[place], whole[place]]}
        )
        for place in places
    ]
