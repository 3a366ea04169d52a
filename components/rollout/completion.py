"""Completions of prompts by a policy: the protocol that training and evaluation see."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from components.grading.verifier import Grade, Submission, Verdict, Verifier
from components.policy.sequences import TokenSequence
from components.shared.answer_policy import AnswerPolicy

_CUT_OFF = Grade(Verdict.WRONG, extracted=None, reason="cut off at the length limit")


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    tokens: TokenSequence
    """The prompt, and the completion up to and including its first end token."""
    logprobs: tuple[float, ...]
    """Natural log of the probability with which the sampler drew each completion token."""
    text: str
    """The completion as text, without its end token."""
    finished: bool
    """Whether it ended by itself, rather than at the length limit."""


class Generate(Protocol):
    """What samples completions: groups of the same prompt come back together, in the order of the prompts."""

    def __call__(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """Return `num_samples` completions for each question; temperature 0 is greedy decoding.

        At temperature T the distribution sampled from is exactly softmax(logits / T): no top-p, no top-k.
        """
        ...


def grade_completions(
    verify: Verifier, golds: Sequence[str], completions: Sequence[Completion], policy: AnswerPolicy
) -> list[Grade]:
    """Grade each completion against its gold: one that was cut off at the length limit has not answered."""
    pairs = zip(golds, completions, strict=True)
    grades = iter(verify([Submission(gold, each.text, policy) for gold, each in pairs if each.finished]))
    return [next(grades) if each.finished else _CUT_OFF for each in completions]
