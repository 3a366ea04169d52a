"""A completion while it is sampled, the same for every engine: the model's turns, and its environment's answers.

An engine samples tokens and adds them (`extend`) as long as a trajectory is `SAMPLING`. At the end of a turn the
trajectory waits for its environment (`pending_answer`), whose answer the engine adds too (`receive`). The tokens of the
observation are then part of `ids`, and the engine reads them before it samples the next token. Sampled tokens are never
tokenised again; each observation is tokenised by itself.

A chat template may rewrite the history: some leave out the thoughts of earlier turns. If the prompt of the next turn
does not begin with the text so far, the trajectory forks: it has a new prompt, and no `ids` until more are sampled.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto

from components.environments.pool import Answer, Episode
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Sampling, StopTexts, Turn
from components.shared.chat import AnsweredTurn
from components.shared.errors import PipelineError
from components.shared.model import context_tokens_of
from components.shared.problem import Problem
from components.shared.tools import find_calls


class Status(Enum):
    """What a trajectory needs next."""

    SAMPLING = auto()
    """The next token; the engine first reads all tokens before it."""
    WAITING = auto()
    """The answer of its environment."""
    DONE = auto()
    """Nothing: the trajectory is finished or truncated, or its environment has failed."""


class RolloutContext:
    """The model, the sampling settings and the stop texts that all trajectories of one call share."""

    def __init__(self, checkpoint: Checkpoint, sampling: Sampling, *, max_tokens: int | None = None) -> None:
        """`max_tokens` is the engine's limit for prompt and completion, which may be less than the model's context."""
        self.checkpoint, self.sampling = checkpoint, sampling
        context = context_tokens_of(checkpoint.model.config.to_dict())
        self.max_tokens = min(max_tokens or math.inf, context or math.inf)
        """Most tokens of prompt and completion together."""
        self._engine_tokens = max_tokens
        self.stop = StopTexts(sampling.stop, checkpoint.decode)
        self.turn_stop = StopTexts(checkpoint.format.turn_stops if sampling.environments else (), checkpoint.decode)

    def begin(self, problems: Sequence[Problem]) -> "list[list[Trajectory]]":
        """Return a group of trajectories for each problem."""
        groups = []
        for problem in problems:
            prompt_ids = self.checkpoint.prompt_ids(problem.question, problem.source, problem.earlier)
            if self._engine_tokens is not None and len(prompt_ids) >= self._engine_tokens:
                raise PipelineError(
                    f"the prompt of problem {problem.id} has {len(prompt_ids)} tokens, and vLLM reads at most "
                    f"{self._engine_tokens} with the completion: raise max_tokens in the section of vLLM"
                )
            groups.append([Trajectory(self, problem, prompt_ids) for _ in range(self.sampling.num_samples)])
        return groups


class Trajectory:
    """A completion from its first token to its end."""

    def __init__(self, rollout: RolloutContext, problem: Problem, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        """The prompt; after a fork, the rewritten prompt of the current turn."""
        self.ids: list[int] = []
        """All tokens after this prompt, sampled or written by the environment."""
        self.num_sampled = 0
        self.status = Status.SAMPLING
        self.pending_answer: Future[Answer] | None = None
        """The environment's answer to the last turn, while the trajectory waits for it."""
        self._rollout, self._problem = rollout, problem
        self._checkpoint, self._sampling = rollout.checkpoint, rollout.sampling
        self._logprobs: list[float] = []
        self._first_prompt_ids = prompt_ids
        self._ids_before_fork: list[int] = []
        """The completion up to the last fork."""
        self._forks: list[tuple[int, tuple[int, ...]]] = []
        self._environment_spans: list[tuple[int, int]] = []
        """`environment` in `TokenSequence`, which also describes `_forks`."""
        self._turns: list[Turn] = []
        self._turn_start = 0
        """The place in `ids` at which the current turn begins."""
        self._episode: Episode | None = None
        self._finished = self._has_stop_text = False
        self._max_sampled = 0
        """The value of `num_sampled` at which no tokens are left; stored, as each sampled token is compared with it."""
        self._failure: str | None = None
        self._end_if_no_tokens_left()

    @property
    def tokens_left(self) -> int:
        """How many tokens may be sampled before the trajectory is truncated, in any number of turns."""
        return int(min(self._sampling.max_new_tokens - self.num_sampled, self._context_left))

    def goes_on(self, prompt_ids: tuple[int, ...]) -> bool:
        """Return whether the trajectory is not done and still has this prompt (the same object): it has not forked."""
        return self.status is not Status.DONE and self.prompt_ids is prompt_ids

    def extend(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens, up to the one that ends the turn or the trajectory; drop those after it."""
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.status is not Status.SAMPLING:
                break
            self.append(token, logprob)

    def append(self, token: int, logprob: float) -> None:
        """Add a sampled token."""
        self.ids.append(token)
        self._logprobs.append(logprob)
        self.num_sampled += 1
        self._has_stop_text = self._rollout.stop.ends(self.ids, self._turn_start)
        if self._has_stop_text or token in self._checkpoint.end_ids or self._ends_in_call():
            self._end_turn()
        elif self.num_sampled >= self._max_sampled:
            self._end_if_no_tokens_left()

    def receive(self, answer: Answer) -> None:
        """Add the environment's answer to the turn that has ended, and begin the next turn or end the trajectory."""
        environments = self._sampling.environments
        assert self.status is Status.WAITING, "only a turn that has ended is answered"
        assert environments is not None, "without an environment nothing is answered"
        self.pending_answer, self._failure = None, answer.failure
        is_done, has_failed = answer.observation.done, answer.failure is not None
        self._finished = not has_failed and (is_done or self._has_stop_text)
        has_environment_ended = is_done or has_failed
        turn = self._turn()
        is_call = not has_environment_ended or self._has_call(turn)
        turn = replace(turn, rewards=answer.observation.rewards, is_call=is_call)
        has_max_turns = len(self._turns) + 1 >= environments.config.max_turns
        is_last = has_environment_ended or self._has_stop_text or has_max_turns
        if is_last or not self._begin_next_turn(turn, answer.observation.text):
            self._turns.append(turn)
            self._end()

    def _begin_next_turn(self, turn: Turn, text: str) -> bool:
        """Add `turn` and the `text` that answers it; if no tokens are left for a turn, add neither and return False."""
        observation = self._checkpoint.read_observation(text, ended=self._has_end_token)
        turns = [*self._turns, replace(turn, observation=observation.text)]
        prompt_ids = self._rewritten_prompt(turns)
        if prompt_ids is None:
            context_left = self._context_left - len(observation.ids)
        else:
            context_left = self._rollout.max_tokens - len(prompt_ids)
        if context_left <= 0 or self.num_sampled >= self._sampling.max_new_tokens:
            return False
        self._turns = turns
        if observation.ids:
            start = len(self._ids_before_fork) + len(self.ids)
            self._environment_spans.append((start, start + len(observation.ids)))
        self.ids += observation.ids
        if prompt_ids is not None:  # a fork: sampling goes on after the new prompt alone
            self._ids_before_fork += self.ids
            self._forks.append((len(self._ids_before_fork), prompt_ids))
            self.prompt_ids, self.ids = prompt_ids, []
        self._turn_start, self.status = len(self.ids), Status.SAMPLING
        self._end_if_no_tokens_left()
        return True

    def _rewritten_prompt(self, turns: Sequence[Turn]) -> tuple[int, ...] | None:
        """Return the prompt of the turn after `turns` if it does not begin with the text so far, else None."""
        if not self._has_end_token or not self._checkpoint.format.rewrites_history:
            return None
        sampled_ids, problem = self._tokens.sampled_ids, self._problem
        history = [
            AnsweredTurn(turn.response, turn.observation, sampled_ids[turn.end - 1] in self._checkpoint.end_ids)
            for turn in turns
        ]
        prompt_ids = self._checkpoint.prompt_ids(problem.question, problem.source, problem.earlier, history)
        decode = self._checkpoint.tokenizer.decode
        is_continued = decode(prompt_ids).startswith(decode((*self.prompt_ids, *self.ids)))
        return None if is_continued else prompt_ids

    def completion(self) -> Completion:
        """Return the completion, once the trajectory is done."""
        assert self.status is Status.DONE, "the trajectory is still sampled"
        turns = list(self._turns)
        num_in_turns = turns[-1].end if turns else 0
        if self._sampling.environments is not None and self.num_sampled > num_in_turns:
            turns.append(self._turn())  # truncated before it ended
        return Completion(
            self._tokens,
            tuple(self._logprobs),
            self._text(),
            finished=self._finished,
            in_thought=self._checkpoint.opens_thought(self._first_prompt_ids),
            turns=tuple(turns),
            failure=self._failure,
        )

    def close(self) -> None:
        """Free the environment's resources."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    @property
    def _tokens(self) -> TokenSequence:
        """All tokens so far."""
        ids = (*self._ids_before_fork, *self.ids)
        return TokenSequence(self._first_prompt_ids, ids, tuple(self._environment_spans), tuple(self._forks))

    @property
    def _context_left(self) -> float:
        return self._rollout.max_tokens - len(self.prompt_ids) - len(self.ids)

    def _end_if_no_tokens_left(self) -> None:
        """End the trajectory, truncated, where no more tokens may be sampled."""
        tokens_left = self.tokens_left
        self._max_sampled = self.num_sampled + tokens_left
        if tokens_left <= 0:
            self._end()

    def _ends_in_call(self) -> bool:
        """Return whether the current turn ends in a call without an end token."""
        return self._rollout.turn_stop.ends(self.ids, self._turn_start) and self._has_call(self._turn())

    def _has_call(self, turn: Turn) -> bool:
        """Return whether a turn has a call; one in a thought does not count."""
        return bool(find_calls(turn.response, self._checkpoint.format.call_format))

    def _end_turn(self) -> None:
        """Send the turn to the environment; end the trajectory if there is no environment."""
        environments = self._sampling.environments
        if environments is None:
            self._finished = True
            self._end()
            return
        if self._episode is None:
            self._episode = environments.begin(self._problem)
        self.pending_answer, self.status = self._episode.step(self._turn().response), Status.WAITING

    def _end(self) -> None:
        """End the trajectory, and free its environment."""
        self.status = Status.DONE
        self.close()

    @property
    def _has_end_token(self) -> bool:
        """Whether the current turn ends with an end token."""
        return len(self.ids) > self._turn_start and self.ids[-1] in self._checkpoint.end_ids

    def _decode(self, ids: list[int]) -> str:
        """Return the text of the last tokens of the completion, without its end token."""
        return self._checkpoint.decode(ids[:-1] if self._has_end_token else ids)

    def _turn(self) -> Turn:
        """Return the current turn, still without an answer; its text has no end token and no stop text."""
        in_thought = self._checkpoint.opens_thought((*self.prompt_ids, *self.ids[: self._turn_start]))
        text = self._rollout.stop.before(self._decode(self.ids[self._turn_start :]))
        return Turn(self.num_sampled, text, in_thought=in_thought)

    def _text(self) -> str:
        """Return the text of the whole completion, without its last end token or stop text."""
        ids = [*self._ids_before_fork, *self.ids]
        text = self._decode(ids)
        if not self._has_stop_text:
            return text
        # Only the last turn is cut: stop texts in earlier turns and observations stay.
        earlier = self._checkpoint.decode(ids[: len(self._ids_before_fork) + self._turn_start])
        return earlier + self._rollout.stop.before(text.removeprefix(earlier))
