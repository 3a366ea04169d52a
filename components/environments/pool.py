"""A pool of worker processes in which environments run: limited in number, and each step in time, memory and length.

A bad environment costs its own trajectory at most: where one hangs, crashes, floods or returns nonsense, its trajectory
fails, its process is ended, and every other trajectory goes on. Environments are deterministic: the trajectories of a
process that has ended are replayed in another one, and no observation depends on the process that gave it.
"""

import json
import math
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from components.environments.environment import Observation
from components.environments.fork_server import MAX_SEND_S, MAX_START_S, ForkServer, UnavailableHereError
from components.environments.worker import HEARTBEAT
from components.shared.environment import available_cores
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig

_MAX_WORKERS = 32
_STEAL_AFTER_S = 0.2
"""Steps that wait for a worker with a slower step go to an idle worker, which replays their trajectory."""
_MAX_LOSSES = 3
"""Workers that a step may lose where it need not be to blame: the worker was killed from outside, or something else
has written into its socket."""
_MAX_RESTARTS = 10
"""Fork servers that may end during a step, which is hardly ever to blame for it."""
_MAX_FAILED_STARTS = 3
_MAX_LINE_BYTES = 1 << 20


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
        self._dispatcher = _Dispatcher(config)
        # The kernel ends the fork server with the thread that starts it.
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
        self.worker: _Worker | None = None
        """The worker that has its environment; only the thread of the dispatcher uses it."""

    def step(self, text: str) -> "Future[Answer]":
        """Begin to answer what the model wrote in a turn; the future never raises."""
        step = _Step(self, text)
        step.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._dispatcher.submit(step)
        return step.future

    def close(self) -> None:
        """Have the environment freed, after its `close` method is called if it has one."""
        self._dispatcher.submit(self)


@dataclass(eq=False)
class _Step:
    """A turn that waits for its answer."""

    episode: Episode
    text: str
    future: "Future[Answer]" = field(default_factory=Future)
    num_losses: int = 0
    num_restarts: int = 0
    needs_fresh_worker: bool = False
    """Whether it has failed beside other trajectories, which may be what used up the memory of the worker."""

    def finish(self, observation: Observation) -> None:
        self.episode.past.append(self.text)
        self.future.set_result(Answer(observation))

    def fail(self, reason: str) -> None:
        self.episode.worker = None
        self.future.set_result(Answer(Observation(done=True), reason))


class _Dispatcher:
    """Distributes steps over workers, in a thread of its own."""

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._max_workers = config.num_workers or max(1, min(cores, _MAX_WORKERS))
        self.started: SimpleQueue[PipelineError | None] = SimpleQueue()
        """What is wrong with the environment, once; None where nothing is."""
        self._requests: SimpleQueue[_Step | Episode] = SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._num_episodes = 0
        self._waiting: deque[_Step] = deque()
        """Steps of trajectories that no worker has."""
        self._need_fresh_worker: deque[_Step] = deque()
        """Never more than there are workers to be started: a worker was ended for each."""
        self._workers: list[_Worker] = []
        """All are forked from the fork server."""
        self._fork_server: ForkServer | None = None
        self._num_failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)

    # Called by any thread.

    def next_number(self) -> int:
        with self._lock:
            self._num_episodes += 1
            return self._num_episodes

    def submit(self, request: "_Step | Episode") -> None:
        """Have a step answered, or an episode freed."""
        with self._lock:
            if not self._is_stopped:
                self._requests.put(request)
                with suppress(BlockingIOError):  # it will wake up anyway
                    self._wake.send(b"\0")
                return
        if isinstance(request, _Step):
            request.fail("the environments are closed")

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
            self.started.put(self._start_fork_server() or self._try_environment())
            while self._serve():
                pass
        except Exception as error:
            reason = f"the pool of environments failed ({type(error).__name__}: {error})"
            raise
        finally:
            with self._lock:
                self._is_stopped = True  # from here on, submitted steps fail at once
            self.started.put(PipelineError(reason))
            self._drain_requests()
            steps = [*self._need_fresh_worker, *self._waiting]
            steps += [step for worker in self._workers for step in worker.steps()]
            if self._fork_server:
                self._fork_server.end()
            for worker in self._workers:
                worker.channel.close()
            self._selector.close()
            self._woken.close()
            for step in steps:
                step.fail(reason)

    def _serve(self) -> bool:
        """Read what callers and workers have sent, and deal with slow workers; return whether to go on."""
        for key, _ in self._selector.select(self._select_timeout_s()):
            if key.data in self._workers:
                self._read(key.data)
            elif key.data is None and not self._is_awake():
                return False
            elif key.data is not None and key.data is self._fork_server:
                self._end_fork_server()  # it has ended
        self._drain_requests()
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline <= now and worker in self._workers:
                self._give_up(worker)
        self._assign()
        return True

    def _is_awake(self) -> bool:
        with suppress(BlockingIOError):
            return bool(self._woken.recv(1 << 12))
        return True

    def _select_timeout_s(self) -> float | None:
        """Return the time until a worker is too slow, or its other steps may go elsewhere."""
        if not (busy := [each for each in self._workers if each.is_busy]):
            return None
        nearest = min(each.deadline for each in busy) - time.monotonic()
        return max(0.0, min(nearest, _STEAL_AFTER_S if any(each.queue for each in busy) else nearest))

    def _drain_requests(self) -> None:
        while not self._requests.empty():
            request = self._requests.get()
            episode = request if isinstance(request, Episode) else request.episode
            if episode.worker not in self._workers:  # it has ended
                episode.worker = None
            if isinstance(request, _Step):
                (episode.worker.queue if episode.worker else self._waiting).append(request)
            elif episode.worker:
                episode.worker.ended.append(episode.number)
                episode.worker = None

    def _assign(self) -> None:
        """Give each idle worker something to do, and start workers while steps wait and there may be more workers."""
        for worker in [each for each in self._workers if not each.is_busy]:
            if worker.ended:
                self._send(worker, None)
            elif step := self._next_step(worker):
                self._send(worker, step)
        while len(self._workers) < self._max_workers:
            step = self._need_fresh_worker.popleft() if self._need_fresh_worker else self._next_step(None)
            if step is None:
                return
            worker_or_error = self._start()
            if isinstance(worker_or_error, _Worker):
                self._send(worker_or_error, step)
                continue
            for each in (step, *self._need_fresh_worker, *self._waiting):
                each.fail(f"no process for it can be started ({worker_or_error})")
            self._need_fresh_worker.clear()
            self._waiting.clear()

    def _next_step(self, worker: "_Worker | None") -> _Step | None:
        """Take a step whose trajectory this worker has, or no worker has, or one that has been busy for long."""
        if worker and worker.queue:
            return worker.queue.popleft()
        if self._waiting:
            return self._waiting.popleft()
        before = time.monotonic() - _STEAL_AFTER_S
        slow = [each for each in self._workers if each.is_busy and each.queue and each.busy_since < before]
        if not slow:
            return None
        other = min(slow, key=lambda each: each.busy_since)
        step = other.queue.popleft()
        other.ended.append(step.episode.number)
        step.episode.worker = None
        return step

    def _send(self, worker: "_Worker", step: _Step | None) -> None:
        try:
            worker.send(step, self._config.timeout_s)
        except OSError:
            self._lose(worker)

    def _read(self, worker: "_Worker") -> None:
        lines = worker.receive()
        if lines is None:
            self._lose(worker)
            return
        for line in lines:
            if not worker.process:
                worker.process = int(line)
                self._num_failed_starts = 0
            elif line == HEARTBEAT and worker.num_heartbeats:
                worker.num_heartbeats -= 1
            else:
                self._take_reply(worker, line)
                return
            worker.deadline = time.monotonic() + self._config.timeout_s

    def _take_reply(self, worker: "_Worker", line: bytes) -> None:
        reply = _Reply.of(line)
        if reply is None or not worker.is_busy or reply.number != worker.num_requests:
            self._lose(worker, is_broken=True)  # an environment has written into our socket, or has forked
            return
        step, worker.step, worker.deadline = worker.step, None, math.inf
        if reply.must_exit:
            self._lose(worker)
        if step is None:
            return
        if reply.must_exit and not worker.is_fresh:
            self._retry_in_fresh_worker(step)
        elif reply.failure is None:
            step.finish(reply.observation)
        else:
            step.fail(reply.failure)

    def _give_up(self, worker: "_Worker") -> None:
        if worker.process:
            self._fail(worker, f"gave no answer within {self._config.timeout_s:g} s")
        elif self._fork_server:  # which does not fork any more
            self._fork_server.kill()
            self._end_fork_server()

    def _fail(self, worker: "_Worker", reason: str) -> None:
        """End a worker because of its step, which has failed."""
        step, worker.step = worker.step, None
        self._lose(worker)
        if step:
            step.fail(reason)

    def _lose(self, worker: "_Worker", *, is_broken: bool = False) -> None:
        """End a worker that has ended or is of no more use; its steps go to others, but for one that has ended it."""
        step, queue = worker.step, worker.queue
        code = self._end(worker)
        for each in queue:
            each.episode.worker = None
        self._waiting.extendleft(reversed(queue))
        if step is None:
            return
        if code is None:
            step.num_restarts += 1
        elif is_broken or code in (-signal.SIGKILL, -signal.SIGTERM):
            step.num_losses += 1
        elif worker.is_fresh:
            step.fail("its process ended " + (f"by signal {-code}" if code < 0 else f"with exit code {code}"))
            return
        else:  # as some code does that finds no more memory
            self._retry_in_fresh_worker(step)
            return
        self._retry(step)

    def _retry(self, step: _Step) -> None:
        step.episode.worker = None
        if step.num_losses == _MAX_LOSSES:
            step.fail(
                "its worker process was killed (for example by the OOM killer), or sent what is no reply, "
                f"{_MAX_LOSSES} times"
            )
        elif step.num_restarts == _MAX_RESTARTS:
            step.fail(f"the processes of environments ended {_MAX_RESTARTS} times before it was answered")
        else:
            (self._need_fresh_worker if step.needs_fresh_worker else self._waiting).appendleft(step)

    def _retry_in_fresh_worker(self, step: _Step) -> None:
        step.needs_fresh_worker = True
        self._retry(step)

    def _end(self, worker: "_Worker") -> int | None:
        """End a worker and what it has started; return its exit code, None where the fork server has ended."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()
        return worker.fork_server.end_worker(worker.process) if worker.process else None

    def _start(self) -> "_Worker | PipelineError":
        """Return a new worker, or why none can be started."""
        if self._fork_server and self._fork_server.is_ended:
            self._end_fork_server()
        error = None if self._fork_server else self._start_fork_server()
        if error is not None or self._fork_server is None:
            return error or PipelineError("there is no fork server")
        try:
            worker = _Worker(self._fork_server)
        except OSError as no_more_files:
            return PipelineError(str(no_more_files))
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        return worker

    def _start_fork_server(self) -> PipelineError | None:
        """Start the process that workers are forked from; return what is wrong where it cannot serve."""
        if self._num_failed_starts == _MAX_FAILED_STARTS:
            return PipelineError(f"{_MAX_FAILED_STARTS} processes ended before they were ready")
        self._num_failed_starts += 1
        try:
            fork_server = ForkServer(self._config)
        except OSError as error:  # no more processes or files
            return PipelineError(f"no process for environments can be started ({error})")
        if (wrong := fork_server.wait_until_ready()) is not None:
            fork_server.end()
            return wrong
        self._fork_server = fork_server
        self._selector.register(fork_server.control, selectors.EVENT_READ, fork_server)
        return None

    def _try_environment(self) -> PipelineError | None:
        return self._fork_server.try_environment() if self._fork_server else None

    def _end_fork_server(self) -> None:
        """End the process that workers are forked from, with all workers; the next step starts another one."""
        if self._fork_server:
            fork_server, self._fork_server = self._fork_server, None
            self._selector.unregister(fork_server.control)
            fork_server.end()
            for worker in list(self._workers):
                self._lose(worker)


class _Worker:
    """A process with the environments of some trajectories, as the dispatcher sees it."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.fork_server = fork_server
        self.process = 0
        """The number by which the fork server knows it, once it has started."""
        self.step: _Step | None = None
        """The step that it is answering; None where it is idle, or frees ended trajectories."""
        self.queue: deque[_Step] = deque()
        """Steps of trajectories that it has."""
        self.ended: list[int] = []
        """Trajectories that it is to free."""
        self.num_requests = 0
        self.num_heartbeats = 0
        """How many heartbeats it may still send: one for each past turn that it replays."""
        self.busy_since, self.deadline = 0.0, math.inf
        self._received = bytearray()
        self.channel, theirs = socket.socketpair()
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", MAX_SEND_S, 0))
        with theirs:
            fork_server.fork(theirs)

    @property
    def is_busy(self) -> bool:
        """Whether it has a request to answer."""
        return self.deadline < math.inf

    @property
    def is_fresh(self) -> bool:
        """Whether no more than one step has used its memory."""
        return self.num_requests == 1

    def steps(self) -> list[_Step]:
        """Return all steps that it is to answer."""
        return [*([self.step] if self.step else []), *self.queue]

    def send(self, step: _Step | None, timeout_s: float) -> None:
        """Send a step, with what it takes to replay its trajectory; None has ended trajectories freed.

        They are never sent together: a trajectory that cannot be freed must not cost another one its step.
        """
        self.step, self.busy_since = step, time.monotonic()
        self.deadline = self.busy_since + (timeout_s if self.process else MAX_START_S)
        self.num_requests += 1
        request: dict[str, object] = {"number": self.num_requests, "ended": self.ended}
        self.ended = []
        if step:
            request |= {"episode": step.episode.number, "text": step.text}
            if step.episode.worker is not self:
                request |= {"problem": step.episode.problem.model_dump(mode="json"), "past": step.episode.past}
                self.num_heartbeats = len(step.episode.past)
            step.episode.worker = self
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
    """The reply of a worker to a request."""

    number: int
    must_exit: bool
    """Whether the worker has no memory left, and ends."""
    observation: Observation
    failure: str | None

    @staticmethod
    def of(line: bytes) -> "_Reply | None":
        """Return the reply in a line; None where it is none."""
        try:
            match json.loads(line):
                case [int(number), bool(must_exit), str(text), bool(done), dict(rewards), None | str() as failure]:
                    return _Reply(number, must_exit, Observation(text, done, rewards), failure)
        except (ValueError, RecursionError):
            pass
        return None


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
