"""Processes in which environments run: bounded in number, and each step in time, memory and length of its answer.

What an environment does costs its own trajectory at most: one that hangs, crashes, floods or answers nonsense has
failed, its process is ended, and every other trajectory goes on. An environment answers the same to the same turns, so
trajectories that a process took with it are played again in another one, and no answer depends on which process gave
it.
"""

import json
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from components.environments.environment import Observation
from components.environments.worker import ALIVE, END, FORK, MAX_MESSAGE_BYTES, READY
from components.shared.environment import available_cores
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig

_MAX_WORKERS = 32
_MAX_START_S = 60.0
_MAX_SEND_S = 5
_STEAL_AFTER_S = 0.2
"""Steps that wait for a process with a slower one go to a process that has nothing to do, and are played again."""
_MAX_LOSSES = 3
"""Of processes with the same step that may not be to blame: the process was killed from outside, or another one forked
from it has answered."""
_MAX_FAILED_STARTS = 3
_MAX_LINE_BYTES = 1 << 20
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What comes of a step of an environment."""

    observation: Observation
    """Empty and done where it has failed."""
    failure: str | None = None
    """Why the environment has failed; None where it has not."""


class MissingPackageError(PipelineError):
    """An own environment imports a package that is not installed here."""


class Environments(AbstractContextManager["Environments"]):
    """The environments of many trajectories; close it, or use it in a `with` block.

    PipelineError where the environment cannot be made, such as for a wrong argument.
    """

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config
        self._dispatcher = _Dispatcher(config)
        # Its processes end with the thread that starts them.
        self._thread = threading.Thread(target=self._dispatcher.run, name="environments", daemon=True)
        self._thread.start()
        if (error := self._dispatcher.started.get()) is not None:
            self.close()
            raise error

    def begin(self, problem: Problem, past: Sequence[str] = ()) -> "Episode":
        """Return the environment of a new trajectory, or of one that is continued after its `past` turns."""
        return Episode(self._dispatcher, problem, past)

    def close(self) -> None:
        """End all processes; steps that have no answer fail."""
        self._dispatcher.stop()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()


class Episode:
    """The environment of one trajectory; its turns are answered one after the other."""

    def __init__(self, dispatcher: "_Dispatcher", problem: Problem, past: Sequence[str]) -> None:
        self._dispatcher = dispatcher
        self.number = dispatcher.next_number()
        self.problem = problem
        self.past = list(past)
        """The turns that have been answered, which decide the state of the environment."""
        self.home: _Worker | None = None
        """The process that has its environment; known to the thread of the dispatcher alone."""

    def step(self, text: str) -> "Future[Answer]":
        """Begin to answer what the model wrote in a turn; the future never raises."""
        step = _Step(self, text)
        step.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._dispatcher.ask(step)
        return step.future

    def close(self) -> None:
        """Free what the environment holds."""
        self._dispatcher.ask(self)


@dataclass(eq=False)
class _Step:
    """A turn that waits for its answer."""

    episode: Episode
    text: str
    future: "Future[Answer]" = field(default_factory=Future)
    num_losses: int = 0

    def finish(self, observation: Observation) -> None:
        self.episode.past.append(self.text)
        self.future.set_result(Answer(observation))

    def fail(self, reason: str) -> None:
        self.episode.home = None
        self.future.set_result(Answer(Observation(done=True), reason))


class _Dispatcher:
    """Has steps answered by workers, in a thread of its own."""

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._max_workers = config.num_workers or max(1, min(cores, _MAX_WORKERS))
        self.started: SimpleQueue[PipelineError | None] = SimpleQueue()
        """What is wrong with the environment, once; None where nothing is."""
        self._asked: SimpleQueue[_Step | Episode] = SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._num_episodes = 0
        self._waiting: deque[_Step] = deque()
        """Steps of trajectories that no process has."""
        self._workers: list[_Worker] = []
        self._origin: _Origin | None = None
        self._num_failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)

    # Called by any thread.

    def next_number(self) -> int:
        with self._lock:
            self._num_episodes += 1
            return self._num_episodes

    def ask(self, what: "_Step | Episode") -> None:
        """Have a step answered, or an episode forgotten."""
        with self._lock:
            if not self._is_stopped:
                self._asked.put(what)
                with suppress(BlockingIOError):  # it will wake up anyway
                    self._wake.send(b"\0")
                return
        if isinstance(what, _Step):
            what.fail("the environments are closed")

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            with suppress(OSError):  # stopped before
                self._wake.shutdown(socket.SHUT_WR)

    # Of its own thread.

    def run(self) -> None:
        """Serve until stopped."""
        reason = "the environments are closed"
        try:
            self.started.put(self._start_origin())
            while self._serve():
                pass
        except Exception as error:
            reason = f"the pool of environments failed ({type(error).__name__}: {error})"
            raise
        finally:
            with self._lock:
                self._is_stopped = True  # from here on, steps that are asked for fail at once
            self.started.put(PipelineError(reason))
            self._take_asked()
            steps = [*self._waiting, *(step for worker in self._workers for step in worker.steps())]
            for worker in list(self._workers):
                self._end(worker)
            self._end_origin()
            self._selector.close()
            self._woken.close()
            for step in steps:
                step.fail(reason)

    def _serve(self) -> bool:
        """Hear callers and workers, and look after workers that are slow; tell whether to go on."""
        for key, _ in self._selector.select(self._patience_s()):
            if isinstance(key.data, _Worker):
                if key.data in self._workers:
                    self._hear(key.data)
            elif key.data is not None:
                self._end_origin()  # it has ended, and its workers with it
            elif not self._is_awake():
                return False
        self._take_asked()
        now = time.monotonic()
        for worker in [each for each in self._workers if each.deadline <= now]:
            self._give_up(worker)
        self._assign()
        return True

    def _is_awake(self) -> bool:
        with suppress(BlockingIOError):
            return bool(self._woken.recv(1 << 12))
        return True

    def _patience_s(self) -> float | None:
        """Time until a worker is too slow, or its other steps may go elsewhere."""
        if not (busy := [each for each in self._workers if each.step]):
            return None
        nearest = min(each.deadline for each in busy) - time.monotonic()
        return max(0.0, min(nearest, _STEAL_AFTER_S if any(each.queue for each in busy) else nearest))

    def _take_asked(self) -> None:
        while not self._asked.empty():
            asked = self._asked.get()
            episode = asked if isinstance(asked, Episode) else asked.episode
            if episode.home not in self._workers:  # it has ended
                episode.home = None
            if isinstance(asked, _Step):
                (episode.home.queue if episode.home else self._waiting).append(asked)
            elif episode.home:
                episode.home.ended.append(episode.number)
                episode.home = None

    def _assign(self) -> None:
        """Give each worker that is idle a step, and start workers while steps wait and there may be more of them."""
        for worker in [each for each in self._workers if not each.step]:
            if step := self._next_step(worker):
                self._send(worker, step)
        while len(self._workers) < self._max_workers and (step := self._next_step(None)):
            self._waiting.appendleft(step)
            if (started := self._start()) is None:
                return
            self._send(started, self._waiting.popleft())

    def _next_step(self, worker: "_Worker | None") -> _Step | None:
        """A step whose trajectory a worker has, or no worker has, or one has that is busy for long."""
        if worker and worker.queue:
            return worker.queue.popleft()
        if self._waiting:
            return self._waiting.popleft()
        before = time.monotonic() - _STEAL_AFTER_S
        slow = [each for each in self._workers if each.step and each.queue and each.busy_since < before]
        if not slow:
            return None
        other = min(slow, key=lambda each: each.busy_since)
        step = other.queue.popleft()
        other.ended.append(step.episode.number)
        step.episode.home = None
        return step

    def _send(self, worker: "_Worker", step: _Step) -> None:
        try:
            worker.send(step, self._config.timeout_s)
        except OSError:
            self._lose(worker)

    def _hear(self, worker: "_Worker") -> None:
        lines = worker.receive()
        if lines is None:
            self._lose(worker)
            return
        for line in lines:
            if not worker.process:
                worker.process = int(line)
                self._num_failed_starts = 0
            elif line != ALIVE:
                self._take_reply(worker, line)
                return
            worker.deadline = time.monotonic() + self._config.timeout_s

    def _take_reply(self, worker: "_Worker", line: bytes) -> None:
        reply = _Reply.of(line)
        if reply is None or worker.step is None or reply.step != worker.num_steps:
            self._lose(worker, is_broken=True)  # an environment has written into our socket, or has forked
            return
        step, worker.step, worker.deadline = worker.step, None, math.inf
        if reply.is_worn:
            self._lose(worker)
        if reply.failure is None:
            step.finish(reply.observation)
        else:
            step.fail(reply.failure)

    def _give_up(self, worker: "_Worker") -> None:
        if worker.process:
            self._fail(worker, f"gave no answer within {self._config.timeout_s:g} s")
        else:
            self._end_origin()  # it forks none any more; the end of its workers is heard next

    def _fail(self, worker: "_Worker", reason: str) -> None:
        """End a worker because of its step, which has failed."""
        step, worker.step = worker.step, None
        self._lose(worker)
        if step:
            step.fail(reason)

    def _lose(self, worker: "_Worker", *, is_broken: bool = False) -> None:
        """End a worker that has ended, or is of no more use; others get its steps, but for one that has ended it."""
        step, queue = worker.step, worker.queue
        code = self._end(worker)
        for each in queue:
            each.episode.home = None
        self._waiting.extendleft(reversed(queue))
        if step is None:
            return
        step.episode.home = None
        if not is_broken and code not in (None, -signal.SIGKILL, -signal.SIGTERM):
            step.fail("its process ended " + (f"by signal {-code}" if code < 0 else f"with exit code {code}"))
            return
        step.num_losses += worker.process != 0
        if step.num_losses == _MAX_LOSSES:
            step.fail(f"its process was killed, as by the kernel for want of memory, or broken {_MAX_LOSSES} times")
        else:
            self._waiting.appendleft(step)

    def _end(self, worker: "_Worker") -> int | None:
        """End a worker and what it has started; return its exit code, None where nobody knows."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()
        return self._origin.end_worker(worker.process) if self._origin and worker.process else None

    def _start(self) -> "_Worker | None":
        """Return a new worker, or None after all steps that wait have failed because none can be started."""
        if self._origin and self._origin.is_ended:
            self._end_origin()
        error = None if self._origin else self._start_origin()
        try:
            if self._origin:
                worker = _Worker(self._origin)
                self._selector.register(worker.channel, selectors.EVENT_READ, worker)
                self._workers.append(worker)
                return worker
        except OSError as no_more_files:
            error = PipelineError(str(no_more_files))
        while self._waiting:
            self._waiting.popleft().fail(f"no process for it can be started ({error})")
        return None

    def _start_origin(self) -> PipelineError | None:
        """Start the process that workers are forked from; return what is wrong where it cannot serve."""
        if self._num_failed_starts == _MAX_FAILED_STARTS:
            return PipelineError(f"{_MAX_FAILED_STARTS} processes ended before they were ready")
        self._num_failed_starts += 1
        try:
            origin = _Origin(self._config)
        except OSError as error:  # no more processes or files
            return PipelineError(f"no process for environments can be started ({error})")
        if (wrong := origin.wait_until_ready()) is not None:
            origin.end()
            return wrong
        self._origin = origin
        self._selector.register(origin.control, selectors.EVENT_READ, origin)
        return None

    def _end_origin(self) -> None:
        """End the process that workers are forked from, which ends them; the next step starts another one."""
        if self._origin:
            origin, self._origin = self._origin, None
            self._selector.unregister(origin.control)
            origin.end()


class _Worker:
    """A process with the environments of some trajectories, as the dispatcher sees it."""

    def __init__(self, origin: "_Origin") -> None:
        self.process = 0
        """Its number, once it has started."""
        self.step: _Step | None = None
        """What it is to answer."""
        self.queue: deque[_Step] = deque()
        """Steps of trajectories that it has."""
        self.ended: list[int] = []
        """Trajectories that it may forget."""
        self.num_steps = 0
        self.busy_since, self.deadline = 0.0, math.inf
        self._received = bytearray()
        self.channel, theirs = socket.socketpair()
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _MAX_SEND_S, 0))
        with theirs:
            origin.fork(theirs)

    def steps(self) -> list[_Step]:
        """Return all that it is to answer."""
        return [*([self.step] if self.step else []), *self.queue]

    def send(self, step: _Step, timeout_s: float) -> None:
        """Send a step, with what it takes to play its trajectory again where this process has not played it."""
        episode = step.episode
        self.step, self.busy_since = step, time.monotonic()
        self.deadline = self.busy_since + (timeout_s if self.process else _MAX_START_S)
        self.num_steps += 1
        request = {"step": self.num_steps, "episode": episode.number, "text": step.text, "ended": self.ended}
        if episode.home is not self:
            request |= {"problem": episode.problem.model_dump(mode="json"), "past": episode.past}
        episode.home, self.ended = self, []
        self.channel.sendall(json.dumps(request).encode("ascii") + b"\n")

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived; None where the process has ended, or writes without end."""
        try:
            chunk = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._received += chunk
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        return None if not chunk or len(rest) > _MAX_LINE_BYTES else [bytes(line) for line in lines]


@dataclass(frozen=True)
class _Reply:
    """What a worker answers to a step."""

    step: int
    is_worn: bool
    """Whether the process ends after it."""
    observation: Observation
    failure: str | None

    @staticmethod
    def of(line: bytes) -> "_Reply | None":
        """Return what a line says; None where it is no reply."""
        try:
            match json.loads(line):
                case [int(step), bool(is_worn), str(text), bool(done), dict(rewards), None | str() as failure]:
                    return _Reply(step, is_worn, Observation(text, done, rewards), failure)
        except (ValueError, RecursionError):
            pass
        return None


class _Origin:
    """The process that workers are forked from, as its parent sees it."""

    def __init__(self, config: ToolsConfig) -> None:
        self.is_ended = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option, limit_s in ((socket.SO_SNDTIMEO, _MAX_SEND_S), (socket.SO_RCVTIMEO, int(_MAX_START_S))):
            self.control.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))
        arguments = (str(theirs.fileno()), str(os.getpid()), config.model_dump_json())
        path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])  # it finds the modules that this process finds
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "components.environments.worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which then ends its workers
            )

    def wait_until_ready(self) -> PipelineError | None:
        """Wait for the import of the environment; return what is wrong with it."""
        try:
            message = self.control.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if message == READY:
            return None
        if message:
            text, is_missing = json.loads(message)
            return MissingPackageError(text) if is_missing else PipelineError(text)
        return PipelineError(
            "train_sft.model.tools.environment: its import ended the process of environments, or took longer than "
            f"{_MAX_START_S:g} s"
        )

    def fork(self, channel: socket.socket) -> None:
        """Have a worker forked that has the other end of a socket."""
        self._ask(FORK, [channel.fileno()])

    def end_worker(self, process: int) -> int | None:
        """Kill a worker with what it has started, and return its exit code; None where this process has ended."""
        # Its number is that of no other process yet: only this waits for it.
        self._ask(b"%s %d" % (END, process))
        try:
            return int(self.control.recv(64))
        except (OSError, ValueError):
            self._kill()
            return None

    def end(self) -> None:
        """Kill it, and with it its workers."""
        self._kill()
        self._process.wait()
        self.control.close()

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a request; a process that does not take it is killed."""
        try:
            socket.send_fds(self.control, [request], descriptors)
        except OSError:
            self._kill()

    def _kill(self) -> None:
        self.is_ended = True
        self._process.kill()


def environment_error(config: ToolsConfig, *, used_here: bool) -> str | None:
    """Return why an environment cannot be made, tried in a process of its own: importing a module runs it.

    Unless it is used in this very environment of Python, a package that is missing is no error.
    """
    try:
        Environments(config).close()
    except MissingPackageError as error:
        return str(error) if used_here else None
    except PipelineError as error:
        return str(error)
    return None
