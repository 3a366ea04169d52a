"""Environments of many trajectories, in worker processes: one that fails costs its own trajectory at most."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from components.environments.environment import Observation
from components.environments.worker import KEY, TRIAL, UnavailableHereError
from components.shared.environment import cores_per_rank
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from components.workers.fork_server import PoolConfig
from components.workers.pool import Failure, Pool, Session

_MAX_WORKERS = 32
_TRIAL_TURN = "The answer is 2."


@dataclass(frozen=True)
class Answer:
    """The result of a step of an environment."""

    observation: Observation
    """Empty and done if the environment has failed."""
    failure: str | None = None
    """Why the environment has failed; None if it has not."""


class Environments(AbstractContextManager["Environments"]):
    """The environments of many trajectories."""

    def __init__(self, config: ToolsConfig) -> None:
        """Start the workers, and create one environment as a trial; PipelineError if that fails."""
        self.config = config
        # Workers import from the folders of this process and from the current folder, which is "" in sys.path.
        here = str(Path.cwd())
        path = [*(folder or here for folder in sys.path), here]
        self._pool = Pool(
            PoolConfig(
                service="components.environments.worker:EnvironmentService",
                arguments=[config.model_dump(mode="json")],
                num_workers=config.num_workers or min(cores_per_rank(), _MAX_WORKERS),
                memory_bytes=int(config.memory_gib * 2**30),
                timeout_s=config.timeout_s,
                environment=os.environ,
                path=path,
            )
        )
        try:
            self._create_trial()
        except BaseException:
            self.close()
            raise

    def begin(self, problem: Problem, past: Sequence[str] = ()) -> "Episode":
        """Return the environment of a trajectory; if the trajectory has `past` turns, the environment replays them."""
        return Episode(self._pool, Session(problem.model_dump(mode="json"), past))

    def close(self) -> None:
        """End all processes; steps that are still being answered fail."""
        self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create_trial(self) -> None:
        """Create one environment in a worker; raise PipelineError if that fails."""
        outcome: SimpleQueue[tuple[Any, Failure | None]] = SimpleQueue()
        self._pool.submit(TRIAL, lambda *result: outcome.put(result))
        reply, failure = outcome.get()
        key = f"{KEY}.environment: {self.config.environment}"
        if failure and failure.kind == "start":
            raise PipelineError(f"{key}: the process that imports it {failure.text}")
        if failure:
            limit, need = ("timeout_s", "time") if failure.kind == "time" else ("memory_gib", "memory")
            raise PipelineError(f"{key}: making one: {failure.text}; set a larger {limit} if it needs more {need}")
        if reply:
            text, is_unavailable_here = reply
            raise UnavailableHereError(text) if is_unavailable_here else PipelineError(text)


class Episode:
    """The environment of one trajectory, which answers its turns one after the other."""

    def __init__(self, pool: Pool, session: Session) -> None:
        self._pool, self._session = pool, session

    def step(self, text: str) -> "Future[Answer]":
        """Begin to answer the text of a turn; the future never raises."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled from now on; `set_result` would raise otherwise
        self._pool.submit(text, lambda *result: future.set_result(_answer(*result)), self._session)
        return future

    def close(self) -> None:
        """Free the environment, after calling its `close` method if it has one."""
        self._pool.end(self._session)


def _answer(reply: Any, failure: Failure | None) -> Answer:
    """Return the result of a step from what the pool reports on its request: a worker's reply, or a failure."""
    if failure:
        reason = "the environments are closed" if failure.kind == "closed" else failure.text
        return Answer(Observation(done=True), reason)
    match reply:
        case [str(text), bool(done), dict(rewards)]:
            return Answer(Observation(text, done, rewards))
    return Answer(Observation(done=True), "its worker process sent an invalid reply")


def environment_error(config: ToolsConfig, *, used_here: bool, problems: Sequence[Problem] = ()) -> str | None:
    """Return why an environment cannot be created, or fails at the first turn of all `problems`; None if it works.

    A missing package, file or server counts only if the environment is `used_here`: on this machine, with this Python.
    """
    try:
        with Environments(config) as environments:
            episodes = [environments.begin(each) for each in problems]
            steps = [each.step(_TRIAL_TURN) for each in episodes]
            failures = [step.result().failure for step in steps]
            for each in episodes:
                each.close()
        if failures and all(failures):
            return f"{KEY}.environment: {config.environment}: {failures[0]}, at a made-up turn of the first problems"
    except UnavailableHereError as error:
        return str(error) if used_here else None
    except PipelineError as error:
        return str(error)
    return None
