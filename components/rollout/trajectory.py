"""A completion while it is sampled, the same for every engine: the model's turns, and its environment's answers.

An engine samples tokens and hands them over (`extend`) as long as a trajectory is `SAMPLING`. At the end of a turn the
trajectory waits for the answer of its environment (`asked`), which the engine hands over as well (`receive`). The
tokens of the observation are then part of `ids`, and the engine reads them before it samples the next token. Sampled
tokens are never tokenised again; each observation is tokenised by itself.

A chat template may rewrite the history, such as leave out the thoughts of earlier turns. Where the prompt of the next
turn does not begin with the text so far, the trajectory forks: it has a new prompt, and no `ids` until more are
sampled.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto

from components.environments.pool import Answer, Episode
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, PartialCompletions, Sampling, StopTexts, Turn
from components.shared.chat import AnsweredTurn
from components.shared.errors import PipelineError
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
        self._engine_tokens = max_tokens
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
                if self._engine_tokens is not None and len(prompt_ids) >= self._engine_tokens:
                    raise PipelineError(
                        f"the prompt of problem {problem.id} has {len(prompt_ids)} tokens, and vLLM reads at most "
                        f"{self._engine_tokens} with the completion: raise max_tokens in the section of vLLM"
                    )
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
        """The prompt, or since the last fork the one of that turn."""
        self.ids: list[int] = []
        """What was sampled after this prompt, and what the environment wrote."""
        self.num_sampled = 0
        self.status = Status.SAMPLING
        self.asked: Future[Answer] | None = None
        """The answer to the last turn, while it waits."""
        self._rollout, self._problem = rollout, problem
        self._checkpoint, self._sampling = rollout.checkpoint, rollout.sampling
        self._logprobs: list[float] = []
        self._first_prompt_ids = prompt_ids
        self._earlier: list[int] = []
        """The completion up to the last fork."""
        self._forks: list[tuple[int, tuple[int, ...]]] = []
        self._observed: list[tuple[int, int]] = []
        self._turns: list[Turn] = []
        self._turn_start = 0
        """The place in `ids` at which the current turn begins."""
        self._episode: Episode | None = None
        self._finished = self._paused = self._stopped = False
        self._last = 0
        """The number of sampled tokens with which there is no room for more in this turn."""
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

    @property
    def has_forked(self) -> bool:
        """Whether it has another prompt than the other completions of its group."""
        return bool(self._forks)

    def goes_on(self, prompt_ids: tuple[int, ...]) -> bool:
        """Return whether more is to be sampled after this prompt: it is not done, and has not forked meanwhile."""
        return self.status is not Status.DONE and self.prompt_ids is prompt_ids

    def extend(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens, up to the one that ends the turn or uses up what is left; drop those after it."""
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.status is not Status.SAMPLING:
                break
            self.append(token, logprob)

    def append(self, token: int, logprob: float) -> None:
        """Add a sampled token."""
        self.ids.append(token)
        self._logprobs.append(logprob)
        self.num_sampled += 1
        self._stopped = self._rollout.stop.ends(self.ids, self._turn_start)
        if self._stopped or token in self._checkpoint.end_ids or self._ends_in_call():
            self._end_turn()
        elif self.num_sampled >= self._last:
            self._check_room()

    def receive(self, answer: Answer) -> None:
        """Add what the environment answers to the turn that has ended."""
        assert self.status is Status.WAITING, "only a turn that has ended is answered"
        self._failure = answer.failure
        self._finished = self._failure is None and (answer.observation.done or self._stopped)
        self.asked = None
        turn = self._answered_turn(answer)
        environments = self._sampling.environments
        assert environments is not None, "without an environment nothing is answered"
        is_last = len(self._turns) + 1 >= environments.config.max_turns
        if self._finished or answer.failure is not None or is_last or not self._read(turn, answer.observation.text):
            self._turns.append(turn)
            self._end()

    def _read(self, turn: Turn, text: str) -> bool:
        """Begin the turn after `turn`, which its environment has answered with `text`; return False without room."""
        observed = self._checkpoint.read_observation(text, ended=self._ended)
        turns = [*self._turns, replace(turn, observation=observed.text)]
        prompt_ids = self._rewritten_prompt(turns)
        left = self._context_left - len(observed.ids)
        if prompt_ids is not None:
            left = self._rollout.max_tokens - len(prompt_ids)
        if left <= 0 or self.num_sampled >= self._sampling.max_new_tokens:
            return False
        self._turns = turns
        if observed.ids:
            start = len(self._earlier) + len(self.ids)
            self._observed.append((start, start + len(observed.ids)))
        self.ids += observed.ids
        if prompt_ids is not None:
            self._earlier += self.ids
            self._forks.append((len(self._earlier), prompt_ids))
            self.prompt_ids, self.ids = prompt_ids, []
        self._turn_start, self.status = len(self.ids), Status.SAMPLING
        self._check_room()
        return True

    def _rewritten_prompt(self, turns: Sequence[Turn]) -> tuple[int, ...] | None:
        """Return the prompt of the turn after `turns`; None where it begins with the text so far."""
        if not self._ended or not self._checkpoint.format.rewrites_history:
            return None
        sampled_ids, problem = self._tokens.sampled_ids, self._problem
        history = [
            AnsweredTurn(turn.response, turn.observation, sampled_ids[turn.end - 1] in self._checkpoint.end_ids)
            for turn in turns
        ]
        prompt_ids = self._checkpoint.prompt_ids(problem.question, problem.source, problem.earlier, history)
        so_far, rewritten = map(self._checkpoint.tokenizer.decode, ((*self.prompt_ids, *self.ids), prompt_ids))
        return None if rewritten.startswith(so_far) else prompt_ids

    def completion(self) -> Completion:
        """Return the completion, once nothing more is sampled in this call."""
        assert self.status is Status.DONE, "the trajectory is still sampled"
        turns, end = self._turns, self._turns[-1].end if self._turns else 0
        if self._sampling.environments is not None and not self._paused and self.num_sampled > end:
            turns = [*turns, self._turn()]  # truncated before it ended
        return Completion(
            self._tokens,
            tuple(self._logprobs),
            self._text(),
            finished=self._finished,
            in_thought=self._checkpoint.opens_thought(self._first_prompt_ids),
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
    def _tokens(self) -> TokenSequence:
        ids = (*self._earlier, *self.ids)
        return TokenSequence(self._first_prompt_ids, ids, tuple(self._observed), tuple(self._forks))

    @property
    def _room(self) -> float:
        """How many tokens may be sampled before the trajectory is truncated, in any number of turns."""
        return min(self._sampling.max_new_tokens - self.num_sampled, self._context_left)

    @property
    def _context_left(self) -> float:
        return self._rollout.max_tokens - len(self.prompt_ids) - len(self.ids)

    def _continue(self, partial: Completion) -> None:
        tokens, ids = partial.tokens, list(partial.tokens.completion_ids)
        self._logprobs, self.num_sampled = list(partial.logprobs), partial.num_tokens
        self._observed, self._turns, self._forks = list(tokens.environment), list(partial.turns), list(tokens.forks)
        start, self.prompt_ids = tokens.forks[-1] if tokens.forks else (0, tokens.prompt_ids)
        self._earlier, self.ids = ids[:start], ids[start:]
        if partial.turns:
            self._turn_start = partial.num_environment_tokens + partial.turns[-1].end - start

    def _check_room(self) -> None:
        """End the trajectory where no token of its turn may be sampled any more."""
        self._last = self.num_sampled + self.tokens_left
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

    @property
    def _ended(self) -> bool:
        """Whether what was sampled last is an end token."""
        return len(self.ids) > self._turn_start and self.ids[-1] in self._checkpoint.end_ids

    def _turn(self) -> Turn:
        """Return the current turn, without an answer: its text is without its end token or what stopped it."""
        in_thought = self._checkpoint.opens_thought((*self.prompt_ids, *self.ids[: self._turn_start]))
        ids = self.ids[self._turn_start : len(self.ids) - self._ended]
        text = self._rollout.stop.before(self._checkpoint.decode(ids))
        return Turn(self.num_sampled, text, in_thought=in_thought)

    def _answered_turn(self, answer: Answer) -> Turn:
        """Return the current turn with what its environment says of it."""
        turn, goes_on = self._turn(), answer.failure is None and not answer.observation.done
        is_call = goes_on or self._has_call(turn)
        return replace(turn, rewards=answer.observation.rewards, is_call=is_call)

    def _text(self) -> str:
        ids = [*self._earlier, *self.ids]
        text = self._checkpoint.decode(ids[: len(ids) - self._ended])
        if not self._stopped:
            return text
        before = self._checkpoint.decode(ids[: len(self._earlier) + self._turn_start])
        return before + self._rollout.stop.before(text.removeprefix(before))
