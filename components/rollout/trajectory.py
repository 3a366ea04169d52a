"""A completion while it is sampled, the same for every engine: the model's turns, and its environment's answers.

An engine samples tokens and hands them over (`extend`) as long as a trajectory is `SAMPLING`. At the end of a turn the
trajectory waits for the answer of its environment (`asked`), which the engine hands over as well (`receive`). The
tokens of the observation are then part of `ids`, and the engine reads them before it samples the next token. Sampled
tokens are never tokenised again; each observation is tokenised by itself.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto

from components.environments.pool import Answer, Episode
from components.policy.checkpoint import Checkpoint, ReadObservation
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, PartialCompletions, Sampling, StopTexts, Turn
from components.shared.model import context_tokens_of
from components.shared.problem import Problem
from components.shared.tools import find_calls


class Status(Enum):
    """What a trajectory needs next."""

    SAMPLING = auto()
    """A token, once all tokens so far have been read."""
    WAITING = auto()
    """The answer of its environment."""
    DONE = auto()
    """Nothing: the trajectory is finished, truncated or paused, or its environment has failed."""


class RolloutContext:
    """What all trajectories of one call share: the model, how it is sampled, and where its turns end."""

    def __init__(self, checkpoint: Checkpoint, sampling: Sampling, *, max_tokens: int | None = None) -> None:
        """`max_tokens` is what the engine reads of a sequence, where that may be less than the model's context."""
        self.checkpoint, self.sampling = checkpoint, sampling
        context = context_tokens_of(checkpoint.model.config.to_dict())
        self.max_tokens = min(math.inf if each is None else each for each in (max_tokens, context))
        """Of prompt and completion together."""
        self.stop = StopTexts(sampling.stop, checkpoint.decode)
        self.turn_stop = StopTexts(checkpoint.format.turn_stops if sampling.environments else (), checkpoint.decode)

    def begin(
        self, problems: Sequence[Problem], partial: PartialCompletions | None
    ) -> "list[list[Trajectory | Completion]]":
        """Return the group of each problem: a trajectory for each new or paused completion, and the finished ones."""
        groups: list[list[Trajectory | Completion]] = []
        for problem, group in zip(problems, partial or [()] * len(problems), strict=True):
            if group and len(group) != self.sampling.num_samples:
                raise ValueError(
                    f"problem {problem.id}: {len(group)} partial completions, not {self.sampling.num_samples}"
                )
            if not group:
                prompt_ids = self.checkpoint.prompt_ids(problem.question, problem.source, problem.earlier)
                groups.append([Trajectory(self, problem, prompt_ids) for _ in range(self.sampling.num_samples)])
            else:
                groups.append(
                    [Trajectory(self, problem, each.tokens.prompt_ids, each) if each.paused else each for each in group]
                )
        return groups


class Trajectory:
    """A completion from its first token, or from where it was paused, to its end."""

    def __init__(
        self, rollout: RolloutContext, problem: Problem, prompt_ids: tuple[int, ...], partial: Completion | None = None
    ) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        """The completion so far: what was sampled, and what its environment wrote."""
        self.num_sampled = 0
        self.status = Status.SAMPLING
        self.asked: Future[Answer] | None = None
        """The answer to the last turn, while it waits."""
        self._rollout, self._problem = rollout, problem
        self._checkpoint, self._sampling = rollout.checkpoint, rollout.sampling
        self._logprobs: list[float] = []
        self._observed: list[tuple[int, int]] = []
        self._turns: list[Turn] = []
        self._turn_start = 0
        """The place in `ids` at which the current turn begins."""
        self._episode: Episode | None = None
        self._finished = self._paused = self._stopped = False
        self._failure: str | None = None
        if partial is not None:
            self._continue(partial)
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
            self._stopped = self._rollout.stop.ends(self.ids, self._turn_start)
            if self._stopped or token in self._checkpoint.end_ids or self._ends_in_call():
                self._end_turn()
            else:
                self._check_room()

    def receive(self, answer: Answer) -> None:
        """Add what the environment answers to the turn that has ended."""
        assert self.status is Status.WAITING, "only a turn that has ended is answered"
        self._failure = answer.failure
        self._finished = self._failure is None and (answer.observation.done or self._stopped)
        observed = self._to_read(answer)
        self._turns.append(self._answered_turn(answer, "" if observed is None else observed.text))
        self.asked = None
        if observed is None:
            self._end()
            return
        if observed.ids:
            self._observed.append((len(self.ids), len(self.ids) + len(observed.ids)))
        self.ids += observed.ids
        self._turn_start, self.status = len(self.ids), Status.SAMPLING
        self._check_room()

    def completion(self) -> Completion:
        """Return the completion, once nothing more is sampled in this call."""
        assert self.status is Status.DONE, "the trajectory is still sampled"
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
        return self._rollout.max_tokens - len(self.prompt_ids) - len(self.ids)

    def _continue(self, partial: Completion) -> None:
        self.ids, self._logprobs = list(partial.tokens.completion_ids), list(partial.logprobs)
        self.num_sampled = partial.num_tokens
        self._observed, self._turns = list(partial.tokens.environment), list(partial.turns)
        if partial.turns:
            self._turn_start = partial.num_environment_tokens + partial.turns[-1].end

    def _check_room(self) -> None:
        """End the trajectory where no token of its turn may be sampled any more."""
        if self.tokens_left <= 0:
            self._paused = self._room > 0
            self._end()

    def _ends_in_call(self) -> bool:
        """Return whether the current turn, without an end token, ends in a call: not in its text within a thought."""
        return self._rollout.turn_stop.ends(self.ids, self._turn_start) and self._has_call(self._turn())

    def _has_call(self, turn: Turn) -> bool:
        return bool(find_calls(turn.response, self._checkpoint.format.call_format))

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
        self.status = Status.DONE
        self.close()

    def _to_read(self, answer: Answer) -> ReadObservation | None:
        """Return what the model reads before its next turn; None where there is none."""
        environments = self._sampling.environments
        assert environments is not None, "without an environment nothing is answered"
        is_last = len(self._turns) + 1 >= environments.config.max_turns
        if self._finished or answer.failure is not None or is_last:
            return None
        observed = self._checkpoint.read_observation(answer.observation.text, ended=self._ended)
        has_room = self._context_left > len(observed.ids) and self.num_sampled < self._sampling.max_new_tokens
        return observed if has_room else None

    @property
    def _ended(self) -> bool:
        """Whether what was sampled last is an end token."""
        return len(self.ids) > self._turn_start and self.ids[-1] in self._checkpoint.end_ids

    def _turn(self) -> Turn:
        """Return the current turn, without an answer."""
        in_thought = self._checkpoint.opens_thought((*self.prompt_ids, *self.ids[: self._turn_start]))
        return Turn(self.num_sampled, self._turn_text(), in_thought=in_thought)

    def _answered_turn(self, answer: Answer, observation: str) -> Turn:
        """Return the current turn with the answer of its environment, of which the model reads `observation`."""
        turn, goes_on = self._turn(), answer.failure is None and not answer.observation.done
        is_call = goes_on or self._has_call(turn)
        return replace(turn, observation=observation, rewards=answer.observation.rewards, is_call=is_call)

    def _turn_text(self) -> str:
        """Return what the model wrote in the current turn, without its end token or what stopped it."""
        ids = self.ids[self._turn_start : len(self.ids) - self._ended]
        return self._rollout.stop.before(self._checkpoint.decode(ids))

    def _text(self) -> str:
        text = self._checkpoint.decode(self.ids[: len(self.ids) - self._ended])
        if not self._stopped:
            return text
        before = self._checkpoint.decode(self.ids[: self._turn_start])
        return before + self._rollout.stop.before(text.removeprefix(before))
