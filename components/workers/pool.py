"""A pool of worker processes: limited in number, and each answer in time and memory.

A bad request costs its own session at most: where an answer hangs, crashes or floods, its session fails, its process is
ended, and every other session goes on. Sessions are deterministic: those of a process that has ended are replayed in
another one, and no answer depends on the process that gave it.
"""

import itertools
import json
import math
import selectors
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from components.workers.fork_server import MAX_SEND_S, MAX_START_S, ForkServer, PoolConfig, ending
from components.workers.server import HEARTBEAT

_STEAL_AFTER_S = 0.2
"""Requests that wait for a worker with a slower one go to an idle worker, which replays their sessions."""
_MAX_LOSSES = 10
"""Workers that a request may lose where it need not be to blame: the worker was killed from outside, the fork server
ended, or something else has written into its socket."""
_MAX_FAILED_STARTS = 10
"""Starts of fork servers in a row that may be killed, or end before a worker reports."""
_MAX_LINE_BYTES = 1 << 26
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True)
class Failure:
    """Why a request has no reply."""

    kind: Literal["error", "memory", "time", "ended", "killed", "start", "closed"]
    text: str
    exit_code: int | None = None
    """Of the worker, where the request has ended it."""


Deliver = Callable[[Any, Failure | None], None]
"""Takes the reply to a request, or the reason for its failure, in the pool's thread; never raises."""


class Pool:
    """Answers requests by a service in workers, which are started when needed and end with the pool or its process.

    A separate thread serves the workers. Callers share no lock with it: Ctrl-C may interrupt them at any instruction,
    and a lock of Python's `threading` could then stay locked for ever.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._requests: deque[_Request | Session] = deque()
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        dispatcher = _Dispatcher(config, self._requests, woken)
        # The kernel ends the fork server with the thread that starts it.
        self._thread = threading.Thread(target=dispatcher.run, name="workers", daemon=True)
        self._thread.start()

    def submit(self, request: Any, deliver: Deliver, session: "Session | None" = None) -> None:
        """Have a request answered, by itself or as the next turn of a session."""
        self._announce(_Request(session, request, deliver))

    def end(self, session: "Session") -> None:
        """Have the state of a session freed."""
        self._announce(session)

    def close(self) -> None:
        """End all processes; requests that have no answer fail."""
        with suppress(OSError):  # closed before
            self._wake.shutdown(socket.SHUT_WR)
        self._thread.join()
        self._wake.close()

    def _announce(self, request: "_Request | Session") -> None:
        self._requests.append(request)
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            pass  # it will wake up anyway
        except OSError:
            _refuse(self._requests, Failure("closed", "the pool is closed"))


class Session:
    """What a worker keeps between requests; they are answered one after the other."""

    _numbers = itertools.count(1)

    def __init__(self, start: Any, past: Sequence[Any] = ()) -> None:
        """Begin one, or go on with it after its `past` requests."""
        self.number = next(self._numbers)
        self.start = start
        self.past = list(past)
        """The requests that have been answered, which decide its state."""
        self.worker: _Worker | None = None
        """The worker that has its state; only the thread of the pool uses it."""


@dataclass(eq=False)
class _Request:
    """A request that waits for its reply."""

    session: Session | None
    request: Any
    deliver: Deliver
    num_losses: int = 0
    needs_fresh_worker: bool = False
    """Whether it has failed beside other sessions, which may be what used up the memory of the worker."""

    @property
    def worker(self) -> "_Worker | None":
        return self.session.worker if self.session else None

    @worker.setter
    def worker(self, worker: "_Worker | None") -> None:
        if self.session:
            self.session.worker = worker

    def finish(self, reply: Any) -> None:
        if self.session:
            self.session.past.append(self.request)
        self.deliver(reply, None)

    def fail(self, failure: Failure) -> None:
        self.worker = None
        self.deliver(None, failure)


def _refuse(requests: "deque[_Request | Session]", failure: Failure) -> None:
    with suppress(IndexError):  # another thread may refuse them, too
        while True:
            if isinstance(request := requests.popleft(), _Request):
                request.fail(failure)


class _Dispatcher:
    """Distributes requests over workers, in a separate thread."""

    def __init__(self, config: PoolConfig, requests: "deque[_Request | Session]", woken: socket.socket) -> None:
        self._config, self._requests, self._woken = config, requests, woken
        self._woken.setblocking(False)
        self._waiting: deque[_Request] = deque()
        """Those whose session no worker has."""
        self._need_fresh_worker: deque[_Request] = deque()
        """Never more than there are workers to be started: a worker was ended for each."""
        self._workers: list[_Worker] = []
        """All are forked from the fork server."""
        self._fork_server: ForkServer | None = None
        self._num_failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the pool is closed."""
        reason = "the pool is closed"
        try:
            while self._serve():
                pass
        except Exception as error:
            reason = f"the pool failed ({type(error).__name__}: {error})"
            raise
        finally:
            self._woken.close()  # from here on, who submits a request refuses it
            requests = [*self._need_fresh_worker, *self._waiting]
            requests += [request for worker in self._workers for request in worker.requests()]
            if self._fork_server:
                self._fork_server.end()
            for worker in self._workers:
                worker.channel.close()
            self._selector.close()
            for request in requests:
                request.fail(Failure("closed", reason))
            _refuse(self._requests, Failure("closed", reason))

    def _serve(self) -> bool:
        """Read what callers and workers have sent, and deal with slow workers; return whether to go on."""
        for key, _ in self._selector.select(self._select_timeout_s()):
            if key.data in self._workers:
                self._read(key.data)
            elif key.data is None and not self._is_awake():
                return False
            elif key.data is not None and key.data is self._fork_server:
                self._end_fork_server()  # it has ended
        self._take_requests()
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
        """Return the time until a worker is too slow, or its other requests may go elsewhere."""
        if not (busy := [each for each in self._workers if each.is_busy]):
            return None
        nearest = min(each.deadline for each in busy) - time.monotonic()
        return max(0.0, min(nearest, _STEAL_AFTER_S if any(each.queue for each in busy) else nearest))

    def _take_requests(self) -> None:
        while self._requests:
            request = self._requests.popleft()
            if request.worker not in self._workers:  # it has ended
                request.worker = None
            if isinstance(request, _Request):
                (request.worker.queue if request.worker else self._waiting).append(request)
            elif request.worker:
                request.worker.ended.append(request.number)
                request.worker = None

    def _assign(self) -> None:
        for worker in [each for each in self._workers if not each.is_busy]:
            if worker.ended:
                self._send(worker, None)
            elif request := self._next_request(worker):
                self._send(worker, request)
        while len(self._workers) < self._config.num_workers:
            request = self._need_fresh_worker.popleft() if self._need_fresh_worker else self._next_request(None)
            if request is None:
                return
            worker_or_error = self._start()
            if isinstance(worker_or_error, _Worker):
                self._send(worker_or_error, request)
                continue
            for each in (request, *self._need_fresh_worker, *self._waiting):
                each.fail(Failure("start", worker_or_error))
            self._need_fresh_worker.clear()
            self._waiting.clear()

    def _next_request(self, worker: "_Worker | None") -> _Request | None:
        """Take one whose session this worker has, or no worker has, or one that has been busy for long."""
        if worker and worker.queue:
            return worker.queue.popleft()
        if self._waiting:
            return self._waiting.popleft()
        before = time.monotonic() - _STEAL_AFTER_S
        slow = [each for each in self._workers if each.is_busy and each.queue and each.busy_since < before]
        if not slow:
            return None
        other = min(slow, key=lambda each: each.busy_since)
        request = other.queue.popleft()
        if request.session:
            other.ended.append(request.session.number)
        request.worker = None
        return request

    def _send(self, worker: "_Worker", request: _Request | None) -> None:
        try:
            worker.send(request, self._config.timeout_s)
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
        reply = _parsed_reply(line)
        if reply is None or not worker.is_busy or reply[0] != worker.num_requests:
            self._lose(worker, is_broken=True)  # the service has written into our socket, or has forked
            return
        _, value, failure, is_out_of_memory, must_exit = reply
        request, worker.request, worker.deadline = worker.request, None, math.inf
        must_retry = is_out_of_memory and not worker.is_fresh
        if must_exit:
            self._lose(worker)
        if request is None:
            return
        if must_retry:
            self._retry_in_fresh_worker(request)
        elif failure is None:
            request.finish(value)
        else:
            request.fail(Failure("memory" if is_out_of_memory else "error", failure))

    def _give_up(self, worker: "_Worker") -> None:
        if worker.process:
            request, worker.request = worker.request, None
            self._lose(worker)
            if request:
                request.fail(Failure("time", f"gave no answer within {self._config.timeout_s:g} s"))
        elif self._fork_server:  # which does not fork any more
            self._fork_server.kill()
            self._end_fork_server()

    def _lose(self, worker: "_Worker", *, is_broken: bool = False) -> None:
        """End a worker that has ended or is of no more use; its requests go to others, but for one that has ended it.

        What ends by processor time does so in every worker; what else ends a worker may do so for lack of memory.
        """
        request, queue = worker.request, worker.queue
        code = self._end(worker)
        for each in queue:
            each.worker = None
        self._waiting.extendleft(reversed(queue))
        if request is None:
            return
        if code is None or is_broken or -code in _FROM_OUTSIDE:
            request.num_losses += 1
            self._retry(request)
        elif worker.is_fresh or code == -signal.SIGPROF:
            request.fail(Failure("ended", f"its process ended {ending(code)}", code))
        else:
            self._retry_in_fresh_worker(request)

    def _retry(self, request: _Request) -> None:
        request.worker = None
        if request.num_losses == _MAX_LOSSES:
            what = "its worker process was killed (for example by the OOM killer), or sent what is no reply"
            request.fail(Failure("killed", f"{what}, {_MAX_LOSSES} times"))
        else:
            (self._need_fresh_worker if request.needs_fresh_worker else self._waiting).appendleft(request)

    def _retry_in_fresh_worker(self, request: _Request) -> None:
        request.needs_fresh_worker = True
        self._retry(request)

    def _end(self, worker: "_Worker") -> int | None:
        """End a worker and what it has started; return its exit code, None where the fork server has ended."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()
        return worker.fork_server.end_worker(worker.process) if worker.process else None

    def _start(self) -> "_Worker | str":
        if self._fork_server and self._fork_server.is_ended:
            self._end_fork_server()
        try:
            while self._fork_server is None:
                if self._num_failed_starts == _MAX_FAILED_STARTS:
                    return f"ended {_MAX_FAILED_STARTS} times before it was ready"
                self._num_failed_starts += 1
                fork_server = ForkServer(self._config)
                if (wrong := fork_server.wait_until_ready()) is None:
                    self._fork_server = fork_server
                    self._selector.register(fork_server.control, selectors.EVENT_READ, fork_server)
                elif -fork_server.exit_code not in _FROM_OUTSIDE:
                    return wrong
            worker = _Worker(self._fork_server)
        except OSError as error:  # no more processes or files
            return str(error)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        return worker

    def _end_fork_server(self) -> None:
        """End the process that workers are forked from, with all workers; the next request starts another one."""
        if self._fork_server:
            fork_server, self._fork_server = self._fork_server, None
            self._selector.unregister(fork_server.control)
            fork_server.end()
            for worker in list(self._workers):
                self._lose(worker)


class _Worker:
    """A process with the states of some sessions, as the dispatcher sees it."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.fork_server = fork_server
        self.process = 0
        """The number by which the fork server knows it, once it has started."""
        self.request: _Request | None = None
        """What it is answering; None where it is idle, or frees ended sessions."""
        self.queue: deque[_Request] = deque()
        """Requests of sessions that it has."""
        self.ended: list[int] = []
        """Sessions that it is to free."""
        self.num_requests = 0
        self.num_heartbeats = 0
        """How many heartbeats it may still send: one for each past request that it replays."""
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
        """Whether no more than one request has used its memory."""
        return self.num_requests == 1

    def requests(self) -> list[_Request]:
        """Return all requests that it is to answer."""
        return [*([self.request] if self.request else []), *self.queue]

    def send(self, request: _Request | None, timeout_s: float) -> None:
        """Send a request, with what it takes to replay its session, or with None only the sessions to be freed.

        No caller sends a request while sessions are to be freed: one that cannot be must not cost another its answer.
        """
        self.request, self.busy_since = request, time.monotonic()
        self.deadline = self.busy_since + (timeout_s if self.process else MAX_START_S)
        self.num_requests += 1
        message: dict[str, Any] = {"number": self.num_requests, "ended": self.ended}
        self.ended = []
        if request:
            session = request.session
            message |= {"request": request.request, "session": session.number if session else None}
            if session and session.worker is not self:
                message |= {"start": session.start, "past": session.past}
                self.num_heartbeats = len(session.past)
            request.worker = self
        self.channel.sendall(json.dumps(message).encode("ascii") + b"\n")

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived; None where the process has ended, or writes without end."""
        try:
            chunk = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._received += chunk
        if not chunk or len(self._received) > _MAX_LINE_BYTES:
            return None
        if b"\n" not in chunk:
            return []
        *lines, self._received = self._received.split(b"\n")
        return [bytes(line) for line in lines]


def _parsed_reply(line: bytes) -> tuple[int, Any, str | None, bool, bool] | None:
    """The number of a request, its reply, a failure, whether memory is used up, and whether the worker ends."""
    try:
        match json.loads(line):
            case [int(number), value, None | str() as failure, bool(is_out_of_memory), bool(must_exit)]:
                return number, value, failure, is_out_of_memory, must_exit
    except (ValueError, RecursionError):
        pass
    return None
