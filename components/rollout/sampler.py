"""Sampling completions from the policy: what training and evaluation see of it.

`TransformersSampler` (transformers_sampler.py) samples from the weights under training, `VllmSampler` (vllm/sampler.py)
from a copy that `update_weights` brings up to date.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from components.environments.pool import Environments
from components.grading.verifier import (
    Grade,
    Reason,
    Submission,
    Verdict,
    Verifier,
    final_answer,
    has_reasoning,
)
from components.policy.packing import TokenSequence
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem
from components.shared.tools import NEXT_ANSWER

if TYPE_CHECKING:
    from components.policy.engine import Policy  # DeepSpeed, which talks as it is imported

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
    environments: Environments | None = None
    """What the model acts in, turn by turn; None for completions of one turn. `max_new_tokens` are those that are
    sampled, in all turns together."""
    segment_tokens: int | None = None
    """Tokens that are sampled of each completion in one call, after which it is paused; None for no bound."""


@dataclass(frozen=True)
class Turn:
    """What the model wrote until an environment took over, and what the environment answered."""

    end: int
    """Sampled tokens of the completion up to and including the last one of this turn."""
    text: str
    """What the model wrote, without its end token."""
    observation: str = ""
    """The answer of the environment as the model read it: only the beginning of a long one, and nothing after the last
    turn. `NEXT_ANSWER` separates the answers to several calls."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the environment says of this turn, by the name of the part of the reward."""
    in_thought: bool = False
    """Whether what the model read before it ends in `<think>`, so that the text begins inside a thought."""

    is_call: bool = False
    """Whether it asked the environment for something: it has a call, or the environment went on after it."""

    @property
    def response(self) -> str:
        """The text with the beginning of the thought that it continues: what an environment or a grader reads."""
        return "<think>" + self.text if self.in_thought else self.text


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt; with an environment a trajectory of several turns."""

    tokens: TokenSequence
    """The prompt, and the completion up to and including its last token; of an environment's tokens it says so."""
    logprobs: tuple[float, ...]
    """Natural log of the probability with which the sampler drew each sampled token."""
    text: str
    """The completion as text, without its last end token or what stopped it, but with what an environment wrote."""
    finished: bool
    """Whether it ended with an end token, was stopped, or was ended by its environment. Otherwise it was truncated, is
    paused, or its environment has failed."""
    in_thought: bool = False
    """Whether the prompt ends in `<think>`, so that the text begins inside a thought."""
    turns: tuple[Turn, ...] = ()
    """All turns, where there is an environment."""
    failure: str | None = None
    """Why the environment failed, which leaves the completion without a reward; None where it did not."""
    paused: bool = False
    """Whether it only stops here because its segment does: a later call continues it. Its turns are then those that the
    environment has answered."""
    versions: tuple[int, ...] = ()
    """For each sampled token the optimizer steps that its policy had taken; empty where nobody asks for them."""

    @property
    def transcript(self) -> str:
        """The whole text, with the beginning of the thought that it continues."""
        return "<think>" + self.text if self.in_thought else self.text

    @property
    def response(self) -> str:
        """What is graded: the text of the last turn, with the beginning of the thought that it continues."""
        if len(self.turns) > 1:
            return self.turns[-1].response
        return self.transcript

    @property
    def truncated(self) -> bool:
        """Whether it was cut off at a limit, of tokens or of turns; a failed environment is none."""
        return not self.finished and self.failure is None

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, end tokens included."""
        return self.tokens.num_sampled

    @property
    def num_environment_tokens(self) -> int:
        """Tokens that an environment wrote."""
        return len(self.tokens.completion_ids) - self.tokens.num_sampled

    def is_worked(self, policy: AnswerPolicy) -> bool:
        """Tell whether it states an answer, and has anything before that: of several turns in any of them."""
        if len(self.turns) < 2:
            return has_reasoning(self.response, policy)
        return final_answer(self.response, policy) is not None and has_reasoning(self.transcript, policy)

    def turn_records(self) -> list[dict[str, Any]]:
        """Return the turns as a record shows them to people."""
        return [
            {
                "text": turn.text,
                "observation": turn.observation.replace(NEXT_ANSWER, "\n"),
                "rewards": dict(turn.rewards),
            }
            for turn in self.turns
        ]


PartialCompletions = Sequence[Sequence[Completion]]
"""The completions of each problem that an earlier call has sampled, in part or to their ends; none for a new group."""
Generate = Callable[[Sequence[Problem], Sampling], list[list[Completion]]]
"""Returns the completions of each problem, in the order of the problems."""


class Sampler(Protocol):
    """Samples from the policy."""

    def generate(
        self, problems: Sequence[Problem], sampling: Sampling, partial: PartialCompletions | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each problem, in the order of the problems.

        Paused completions in `partial` are continued with the current weights, the others returned unchanged. The
        environment of a continued one is replayed up to its next turn.
        """

    def attach(self, policy: "Policy", probes: Sequence[TokenSequence]) -> None:
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
        self._may_end: dict[int, bool] = {}
        """Whether a token may write the last character of one of the texts."""

    def ends(self, ids: Sequence[int], start: int = 0) -> bool:
        """Return whether one of the texts ends with the last token of `ids[start:]`.

        Only the end is decoded, so the cost does not grow with the length.
        """
        if not self.texts or not self._can_end(ids[-1]):
            return False
        # Characters of up to four tokens each, and the first token of some is decoded in another way.
        window = 4 * self._longest + 1
        end = self._decode(ids[max(start, len(ids) - window) :])
        while len(end) <= self._longest and window < len(ids) - start:  # special tokens have no text
            window *= 2
            end = self._decode(ids[max(start, len(ids) - window) :])
        return any(text in end for text in self.texts)

    def _can_end(self, token: int) -> bool:
        if token not in self._may_end:
            text = self._decode((token, token))  # the first of a text is decoded in another way
            is_whole = bool(text) and "\N{REPLACEMENT CHARACTER}" not in text
            self._may_end[token] = not is_whole or any(each[-1] in text for each in self.texts)
        return self._may_end[token]

    def before(self, text: str) -> str:
        """Return a completion's text up to the first of the texts in it."""
        places = [place for each in self.texts if (place := text.find(each)) >= 0]
        return text[: min(places, default=len(text))]


def grade_completions(
    verify: Verifier, problems: Sequence[Problem], completions: Sequence[Completion], policy: AnswerPolicy
) -> list[Grade]:
    """Grade each completion of the problem at its place; a truncated one counts as wrong, whatever its text.

    One whose environment failed is unscorable.
    """
    ended = [each.finished and each.failure is None for each in completions]
    submissions = [
        Submission(problem.answer, completion.response, policy, problem.question)
        for problem, completion, has_ended in zip(problems, completions, ended, strict=True)
        if has_ended
    ]
    grades = iter(verify(submissions))
    return [
        next(grades) if has_ended else _grade_without_end(each)
        for each, has_ended in zip(completions, ended, strict=True)
    ]


def _grade_without_end(completion: Completion) -> Grade:
    if completion.failure is None:
        return _TRUNCATED
    return Grade(Verdict.UNSCORABLE, extracted=None, reason=Reason.ENVIRONMENT, detail=completion.failure)
