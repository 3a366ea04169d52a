"""Environments of many trajectories, each in a process of its own kind: a bad one costs its own trajectory at most."""

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
from components.shared.environment import available_cores
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from components.workers.fork_server import PoolConfig
from components.workers.pool import Failure, Pool, Session

_MAX_WORKERS = 32


@dataclass(frozen=True)
class Answer:
    """The result of a step of an environment."""

    observation: Observation
    """Empty and done where it has failed."""
    failure: str | None = None
    """Why the environment has failed; None where it has not."""


class Environments(AbstractContextManager["Environments"]):
    """The environments of many trajectories; close it, or use it in a `with` block.

    PipelineError where the environment cannot be made, such as with a wrong argument.
    """

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config
        cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Modules are found where this process finds them, and in the current folder.
        path = [*(folder or str(Path.cwd()) for folder in sys.path), str(Path.cwd())]
        self._pool = Pool(
            PoolConfig(
                service="components.environments.worker:EnvironmentService",
                arguments=[config.model_dump(mode="json")],
                num_workers=config.num_workers or max(1, min(cores, _MAX_WORKERS)),
                memory_bytes=int(config.memory_gib * 2**30),
                timeout_s=config.timeout_s,
                environment=os.environ,
                path=path,
            )
        )
        if (error := self._trial()) is not None:
            self.close()
            raise error

    def begin(self, problem: Problem, past: Sequence[str] = ()) -> "Episode":
        """Return the environment of a new trajectory, or of one that is continued after its `past` turns."""
        return Episode(self._pool, Session(problem.model_dump(mode="json"), past))

    def close(self) -> None:
        """End all processes; steps that have no answer fail."""
        self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _trial(self) -> PipelineError | None:
        """Have one environment made within the limits of a worker; return what is wrong with it."""
        outcome: SimpleQueue[tuple[Any, Failure | None]] = SimpleQueue()
        self._pool.submit(TRIAL, lambda *result: outcome.put(result))
        reply, failure = outcome.get()
        key = f"{KEY}.environment: {self.config.environment}"
        if failure and failure.kind == "start":
            return PipelineError(f"{key}: the process that imports it {failure.text}")
        if failure:
            return PipelineError(f"{key}: making one: {failure.text}; set a larger memory_gib if it needs more memory")
        if reply:
            text, is_here_alone = reply
            return UnavailableHereError(text) if is_here_alone else PipelineError(text)
        return None


class Episode:
    """The environment of one trajectory; its turns are answered one after the other."""

    def __init__(self, pool: Pool, session: Session) -> None:
        self._pool, self._session = pool, session

    def step(self, text: str) -> "Future[Answer]":
        """Begin to answer what the model wrote in a turn; the future never raises."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._pool.submit(text, lambda *result: future.set_result(_answer(*result)), self._session)
        return future

    def close(self) -> None:
        """Have the environment freed, after its `close` method is called if it has one."""
        self._pool.end(self._session)


def _answer(reply: Any, failure: Failure | None) -> Answer:
    if failure:
        closed = "the environments are closed"
        return Answer(Observation(done=True), closed if failure.kind == "closed" else failure.text)
    match reply:
        case [str(text), bool(done), dict(rewards)]:
            return Answer(Observation(text, done, rewards))
    return Answer(Observation(done=True), "its worker process sent what is no reply")


def environment_error(config: ToolsConfig, *, used_here: bool) -> str | None:
    """Return why an environment cannot be made, which is tried in a process of its own: importing a module runs it.

    Unless it is used in this very environment of Python, a missing package, file or server is no error.
    """
    try:
        Environments(config).close()
    except UnavailableHereError as error:
        return str(error) if used_here else None
    except PipelineError as error:
        return str(error)
    return None
