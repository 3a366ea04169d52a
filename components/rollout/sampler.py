"""Sampling completions from the policy: what training and evaluation see of it.

`TransformersSampler` (transformers_sampler.py) samples from the weights under training, `VllmSampler` (vllm/sampler.py)
from a copy that `update_weights` brings up to date.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from components.grading.verifier import Grade, Reason, Submission, Verdict, Verifier
from components.policy.engine import Policy
from components.policy.packing import TokenSequence
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem

_TRUNCATED = Grade(Verdict.WRONG, extracted=None, reason=Reason.TRUNCATED)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are sampled.

    At temperature T the distribution is exactly softmax(logits / T): no top-p, no top-k. Temperature 0 is greedy
    decoding.
    """

    num_samples: int
    """Completions of each problem."""
    temperature: float
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    """Texts that end a completion as an end token does: it has no more tokens, and its text ends before them."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    tokens: TokenSequence
    """The prompt, and the completion up to and including its first end token."""
    logprobs: tuple[float, ...]
    """Natural log of the probability with which the sampler drew each completion token."""
    text: str
    """The completion as text, without its end token or what stopped it."""
    finished: bool
    """Whether it ended with an end token or was stopped; otherwise it was truncated at the length limit."""
    in_thought: bool = False
    """Whether the prompt ends in `<think>`, so that the text begins inside a thought."""

    @property
    def response(self) -> str:
        """The text with the beginning of the thought that it continues: what is graded."""
        return "<think>" + self.text if self.in_thought else self.text

    @property
    def num_tokens(self) -> int:
        """Completion tokens, the end token included."""
        return len(self.tokens.completion_ids)


Generate = Callable[[Sequence[Problem], Sampling], list[list[Completion]]]
"""Returns the completions of each problem, in the order of the problems."""


class Sampler(Protocol):
    """Samples from the policy."""

    def generate(self, problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        """See `Generate`."""

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """Follow the weights of `policy` from now on; called once, by all processes.

        A sampler with a copy of the weights is checked after each update by the log-probabilities of the `probes`.
        """

    def update_weights(self, version: int) -> float:
        """Sample from the policy as it is after `version` optimizer steps; return the seconds this took.

        Called by all processes together before they sample. StaleWeightsError where the sampler does not compute with
        these weights afterwards.
        """

    def sleep(self) -> None:
        """Free the memory of the GPU until the sampler is next used."""

    def close(self) -> None:
        """End the processes and close the connections that the sampler has opened."""


class StopTexts:
    """Finds where a completion is stopped: at the token with which its text first has one of some texts."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.texts, self._decode = texts, decode
        self._longest = max(map(len, texts), default=0)

    def ends(self, ids: Sequence[int]) -> bool:
        """Tell whether one of the texts is in the end of a completion."""
        # Characters of up to four tokens each, and the first token of some is decoded in another way.
        window = 4 * self._longest + 1
        end = self._decode(ids[-window:])
        while len(end) <= self._longest and window < len(ids):  # special tokens have no text
            window *= 2
            end = self._decode(ids[-window:])
        return any(text in end for text in self.texts)

    def first_end(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first with which a completion is stopped; None if it never is."""
        lengths = range(1, len(ids) + 1) if self.texts else ()
        return next((length for length in lengths if self.ends(ids[:length])), None)

    def before(self, text: str) -> str:
        """Return a completion's text up to the first of the texts in it."""
        places = [place for each in self.texts if (place := text.find(each)) >= 0]
        return text[: min(places, default=len(text))]


def grade_completions(
    verify: Verifier, problems: Sequence[Problem], completions: Sequence[Completion], policy: AnswerPolicy
) -> list[Grade]:
    """Grade each completion of the problem at its place; a truncated one counts as wrong, whatever its text."""
    pairs = zip(problems, completions, strict=True)
    submissions = [
        Submission(problem.answer, each.response, policy, problem.question) for problem, each in pairs if each.finished
    ]
    grades = iter(verify(submissions))
    return [next(grades) if each.finished else _TRUNCATED for each in completions]
