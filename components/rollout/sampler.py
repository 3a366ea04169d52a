"""Sampling completions from the policy: the interface that training and evaluation use.

`TransformersSampler` (transformers_sampler.py) samples from the weights under training, `VllmSampler` (vllm/sampler.py)
from a copy that `update_weights` brings up to date.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from components.environments.pool import Environments
from components.grading.verifier import Grade, Reason, Submission, Verdict, Verifier, final_answer, has_reasoning
from components.policy.packing import TokenSequence
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem
from components.shared.tools import NEXT_ANSWER

if TYPE_CHECKING:
    from components.policy.engine import Policy  # imports DeepSpeed, which prints when it is imported

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
    """Texts that end a completion as an end token does; a stop text is not part of the completion's text."""
    environments: Environments | None = None
    """Where the model acts, turn by turn; None for completions of one turn. `max_new_tokens` then limits the sampled
    tokens of all turns together."""


@dataclass(frozen=True)
class Turn:
    """A message of the model to its environment, and the environment's answer."""

    end: int
    """Sampled tokens of the completion up to and including the last one of this turn."""
    text: str
    """What the model wrote, without its end token."""
    observation: str = ""
    """The environment's answer as the model read it: only the beginning of a long one, and empty after the last turn.
    `NEXT_ANSWER` separates the answers to several calls."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The environment's rewards for this turn, by the name of the part of the reward."""
    in_thought: bool = False
    """Whether the model's input before this turn ends in `<think>`, so that the text begins inside a thought."""
    is_call: bool = False
    """Whether the turn has a call, or the environment answered it and went on."""

    @property
    def response(self) -> str:
        """The text as an environment or a grader reads it: `<think>` precedes a text that begins inside a thought."""
        return "<think>" + self.text if self.in_thought else self.text


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt; with an environment a trajectory of several turns."""

    tokens: TokenSequence
    """The prompt, and the completion up to and including its last token, with the tokens of an environment marked."""
    logprobs: tuple[float, ...]
    """Natural log of the probability with which the sampler drew each sampled token."""
    text: str
    """The completion as text, without its last end token or stop text; an environment's answers are included."""
    finished: bool
    """Whether an end token, a stop text or the environment ended it. Otherwise it was truncated, or its environment
    has failed."""
    in_thought: bool = False
    """Whether the prompt ends in `<think>`, so that the text begins inside a thought."""
    turns: tuple[Turn, ...] = ()
    """All turns; empty without an environment."""
    failure: str | None = None
    """Why the environment failed, which leaves the completion without a reward; None where it did not."""
    versions: tuple[int, ...] = ()
    """For each sampled token, the number of optimizer steps of the policy that sampled it; empty if not recorded."""

    @property
    def transcript(self) -> str:
        """The text of all turns; `<think>` precedes a text that begins inside a thought."""
        return "<think>" + self.text if self.in_thought else self.text

    @property
    def response(self) -> str:
        """The text to grade: of the last of several turns, or all text where the model had no further turn."""
        if len(self.turns) > 1:
            return self.turns[-1].response
        return self.transcript

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens or turns cut it off; false after a failure."""
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
        """Return whether the response has an answer after some reasoning, which may be in any of several turns."""
        if len(self.turns) < 2:
            return has_reasoning(self.response, policy)
        return final_answer(self.response, policy) is not None and has_reasoning(self.transcript, policy)

    def turn_records(self) -> list[dict[str, Any]]:
        """Return the turns for a record in JSON."""
        records: list[dict[str, Any]] = []
        for turn in self.turns:
            observation = turn.observation.replace(NEXT_ANSWER, "\n")
            records.append({"text": turn.text, "observation": observation, "rewards": dict(turn.rewards)})
        return records


Generate = Callable[[Sequence[Problem], Sampling], list[list[Completion]]]
"""Returns the completions of each problem, in the order of the problems."""


class Sampler(Protocol):
    """Samples from the policy."""

    def generate(self, problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of each problem, in the order of the problems."""

    def attach(self, policy: "Policy", probes: Sequence[TokenSequence]) -> None:
        """Follow the weights of `policy` from now on; called once, by all processes.

        A sampler with a copy of the weights is checked after each update by the log-probabilities of the `probes`.
        """

    def update_weights(self, version: int) -> float:
        """Take the current weights of the policy, which has made `version` optimizer steps; return the seconds it took.

        All processes call this together before they sample. StaleWeightsError if the sampler does not compute with
        these weights afterwards.
        """

    def sleep(self) -> None:
        """Free the sampler's GPU memory until it is next used."""

    def close(self) -> None:
        """End the processes and close the connections that the sampler has opened."""


class StopTexts:
    """Stops a completion at the token that completes the first stop text in it."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.texts, self._decode = texts, decode
        self._longest = max(map(len, texts), default=0)
        self._can_end_by_token: dict[int, bool] = {}

    def ends(self, ids: Sequence[int], start: int = 0) -> bool:
        """Return whether the last token of `ids[start:]` completes a stop text, given that no earlier token does.

        Only the last tokens are decoded, so the cost does not grow with the length.
        """
        if not self.texts or not self._can_end(ids[-1]):
            return False
        # A character has up to four tokens, and one more since some tokenizers decode the first token differently.
        window = 4 * self._longest + 1
        end = self._decode(ids[max(start, len(ids) - window) :])
        while len(end) <= self._longest and window < len(ids) - start:  # special tokens have no text: decode more
            window *= 2
            end = self._decode(ids[max(start, len(ids) - window) :])
        return any(text in end for text in self.texts)

    def _can_end(self, token: int) -> bool:
        """Return whether a token may contain the last character of a stop text."""
        if token not in self._can_end_by_token:
            text = self._decode((token, token))  # twice, as some tokenizers decode the first token differently
            # A token without text, or with a part of a character, may complete any character.
            is_whole = bool(text) and "\N{REPLACEMENT CHARACTER}" not in text
            self._can_end_by_token[token] = not is_whole or any(each[-1] in text for each in self.texts)
        return self._can_end_by_token[token]

    def before(self, text: str) -> str:
        """Return the part of a text before the first stop text in it."""
        return min((text.partition(each)[0] for each in self.texts), key=len, default=text)


def grade_completions(
    verify: Verifier, problems: Sequence[Problem], completions: Sequence[Completion], policy: AnswerPolicy
) -> list[Grade]:
    """Return the grade of each completion: truncated ones are wrong, those with a failed environment unscorable."""
    grades: dict[int, Grade] = {}
    submissions: dict[int, Submission] = {}
    for index, (problem, completion) in enumerate(zip(problems, completions, strict=True)):
        if completion.failure is not None:
            reason = Reason.ENVIRONMENT
            grades[index] = Grade(Verdict.UNSCORABLE, extracted=None, reason=reason, detail=completion.failure)
        elif not completion.finished:
            grades[index] = _TRUNCATED
        else:
            submissions[index] = Submission(problem.answer, completion.response, policy, problem.question)
    grades |= zip(submissions, verify(list(submissions.values())), strict=True)
    return [grades[index] for index in range(len(completions))]
