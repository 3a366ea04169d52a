"""One completion on its way, the same for every engine: turns of the model, and what its environment answers to them.

An engine samples tokens and hands them over (`extend`) for as long as a trajectory is `SAMPLING`. Where a turn has
ended, the trajectory waits for the answer of its environment (`asked`), which the engine hands over too (`receive`):
the tokens of the observation are then part of `ids`, to be read before the next token is sampled. Sampled tokens stay
as they are; only an observation is turned into tokens, by itself.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import Enum, auto

from components.environments.pool import Answer, Episode
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Begun, Completion, Sampling, StopTexts, Turn
from components.shared.model import context_tokens_of
from components.shared.problem import Problem
from components.shared.tools import find_call


class Status(Enum):
    """What a trajectory needs next."""

    SAMPLING = auto()
    """A token, once all tokens so far have been read."""
    WAITING = auto()
    """The answer of its environment."""
    OVER = auto()
    """Nothing: it is finished, truncated or paused, or its environment has failed."""


class Conditions:
    """What the trajectories of one call have in common."""

    def __init__(self, checkpoint: Checkpoint, sampling: Sampling, *, max_tokens: int | None = None) -> None:
        """`max_tokens` is what the engine reads of a sequence, where that may be less than the model's context."""
        self.checkpoint, self.sampling = checkpoint, sampling
        context = context_tokens_of(checkpoint.model.config.to_dict())
        self.max_tokens = min(math.inf if each is None else each for each in (max_tokens, context))
        """Of prompt and completion together."""
        self.stop = StopTexts(sampling.stop, checkpoint.decode)
        self.turn_stop = StopTexts(checkpoint.format.turn_stops if sampling.environments else (), checkpoint.decode)

    def begin(self, problems: Sequence[Problem], begun: Begun | None) -> "list[list[Trajectory | Completion]]":
        """Return for each problem its trajectories, and as they are the completions that were begun and are over."""
        groups: list[list[Trajectory | Completion]] = []
        for problem, group in zip(problems, begun or [()] * len(problems), strict=True):
            if group and len(group) != self.sampling.num_samples:
                raise ValueError(
                    f"problem {problem.id}: {len(group)} completions begun, not {self.sampling.num_samples}"
                )
            if not group:
                prompt_ids = self.checkpoint.prompt_ids(problem.question, problem.source)
                groups.append([Trajectory(self, problem, prompt_ids) for _ in range(self.sampling.num_samples)])
            else:
                groups.append(
                    [Trajectory(self, problem, each.tokens.prompt_ids, each) if each.paused else each for each in group]
                )
        return groups


class Trajectory:
    """A completion from its first token, or from where it was paused, to its end."""

    def __init__(
        self, conditions: Conditions, problem: Problem, prompt_ids: tuple[int, ...], begun: Completion | None = None
    ) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        """The completion so far: what was sampled, and what its environment wrote."""
        self.num_sampled = 0
        self.status = Status.SAMPLING
        self.asked: Future[Answer] | None = None
        """The answer to the last turn, while it waits."""
        self._conditions, self._problem = conditions, problem
        self._checkpoint, self._sampling = conditions.checkpoint, conditions.sampling
        self._logprobs: list[float] = []
        self._observed: list[tuple[int, int]] = []
        self._turns: list[Turn] = []
        self._turn_start = 0
        """The place in `ids` at which the current turn begins."""
        self._episode: Episode | None = None
        self._finished = self._paused = self._stopped = False
        self._failure: str | None = None
        if begun is not None:
            self._continue(begun)
        segment = self._sampling.segment_tokens
        self._segment_end = math.inf if segment is None else self.num_sampled + segment
        self._check_room()

    @property
    def tokens_left(self) -> int:
        """How many tokens may be sampled before the trajectory is truncated or paused, in any number of turns."""
        return int(min(self._room, self._segment_end - self.num_sampled))

    def extend(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens, up to the one that ends the turn or uses up what is left; drop those after it."""
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.status is not Status.SAMPLING:
                break
            self.ids.append(token)
            self._logprobs.append(logprob)
            self.num_sampled += 1
            turn_ids = self.ids[self._turn_start :]
            self._stopped = self._conditions.stop.ends(turn_ids)
            if self._stopped or token in self._checkpoint.end_ids or self._calls(turn_ids):
                self._end_turn()
            else:
                self._check_room()

    def receive(self, answer: Answer) -> None:
        """Add what the environment answers to the turn that has ended."""
        assert self.status is Status.WAITING, "only a turn that has ended is answered"
        observation, self._failure = answer.observation, answer.failure
        self._finished = self._failure is None and (observation.done or self._stopped)
        observed_ids = self._to_read(answer)
        text = "" if observed_ids is None else observation.text
        self._turns.append(self._turn(text, observation.rewards))
        self.asked = None
        if observed_ids is None:
            self._end()
            return
        if observed_ids:
            self._observed.append((len(self.ids), len(self.ids) + len(observed_ids)))
        self.ids += observed_ids
        self._turn_start, self.status = len(self.ids), Status.SAMPLING
        self._check_room()

    def completion(self) -> Completion:
        """Return the trajectory as it is now that it is over."""
        assert self.status is Status.OVER, "a trajectory on its way is no completion"
        turns, end = self._turns, self._turns[-1].end if self._turns else 0
        if self._sampling.environments is not None and not self._paused and self.num_sampled > end:
            turns = [*turns, self._turn()]  # truncated before it ended
        return Completion(
            TokenSequence(self.prompt_ids, tuple(self.ids), tuple(self._observed)),
            tuple(self._logprobs),
            self._text(),
            finished=self._finished,
            in_thought=self._checkpoint.opens_thought(self.prompt_ids),
            turns=tuple(turns),
            failure=self._failure,
            paused=self._paused,
        )

    def close(self) -> None:
        """Free what its environment holds."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    @property
    def _room(self) -> float:
        """How many tokens may be sampled before the trajectory is truncated, in any number of turns."""
        return min(self._sampling.max_new_tokens - self.num_sampled, self._context_left)

    @property
    def _context_left(self) -> float:
        return self._conditions.max_tokens - len(self.prompt_ids) - len(self.ids)

    def _continue(self, begun: Completion) -> None:
        self.ids, self._logprobs = list(begun.tokens.completion_ids), list(begun.logprobs)
        self.num_sampled = begun.num_tokens
        self._observed, self._turns = list(begun.tokens.environment), list(begun.turns)
        if begun.turns:
            self._turn_start = begun.num_environment_tokens + begun.turns[-1].end

    def _check_room(self) -> None:
        """End the trajectory where no token of its turn may be sampled any more."""
        if self.tokens_left <= 0:
            self._paused = self._room > 0
            self._end()

    def _calls(self, turn_ids: Sequence[int]) -> bool:
        """Tell whether a turn without an end token ends in a call, and not in the same text within a thought."""
        if not self._conditions.turn_stop.ends(turn_ids):
            return False
        return find_call(self._turn().response, self._checkpoint.format.call_format) is not None

    def _end_turn(self) -> None:
        environments = self._sampling.environments
        if environments is None:
            self._finished = True
            self._end()
            return
        if self._episode is None:
            self._episode = environments.begin(self._problem, [turn.response for turn in self._turns])
        self.asked, self.status = self._episode.step(self._turn().response), Status.WAITING

    def _end(self) -> None:
        self.status = Status.OVER
        self.close()

    def _to_read(self, answer: Answer) -> tuple[int, ...] | None:
        """Return the tokens that the model reads before its next turn; None where there is none."""
        environments = self._sampling.environments
        assert environments is not None, "without an environment nothing is answered"
        is_last = len(self._turns) + 1 >= environments.config.max_turns
        if self._finished or answer.failure is not None or is_last:
            return None
        ids = self._checkpoint.observation_ids(answer.observation.text, ended=self._ended)
        return ids if self._context_left > len(ids) and self.num_sampled < self._sampling.max_new_tokens else None

    @property
    def _ended(self) -> bool:
        """Whether what was sampled last is an end token."""
        return len(self.ids) > self._turn_start and self.ids[-1] in self._checkpoint.end_ids

    def _turn(self, observation: str = "", rewards: Mapping[str, float] | None = None) -> Turn:
        """Return the current turn with what its environment answers to it."""
        in_thought = self._checkpoint.opens_thought((*self.prompt_ids, *self.ids[: self._turn_start]))
        return Turn(self.num_sampled, self._turn_text(), observation, rewards or {}, in_thought)

    def _turn_text(self) -> str:
        """Return what the model wrote in the current turn, without its end token or what stopped it."""
        ids = self.ids[self._turn_start : len(self.ids) - self._ended]
        return self._conditions.stop.before(self._checkpoint.decode(ids))

    def _text(self) -> str:
        text = self._checkpoint.decode(self.ids[: len(self.ids) - self._ended])
        if not self._stopped:
            return text
        before = self._checkpoint.decode(self.ids[: self._turn_start])
        return before + self._conditions.stop.before(text.removeprefix(before))
