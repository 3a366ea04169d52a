"""A pool of worker processes, with limits on their number and on the time and memory of each answer.

A bad request fails only its own session: if an answer hangs, crashes or writes without end, the pool ends the worker
and replays its other sessions in another one. Sessions are deterministic, so no answer depends on the worker.
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
"""Once a worker has been busy for this long, an idle worker takes over its queue and replays the sessions."""
_MAX_LOSSES = 10
"""Workers that a request may lose without being the likely cause: the worker was killed from outside, the fork server
ended, or something else wrote into the worker's socket."""
_MAX_FAILED_STARTS = 10  # fork servers in a row that may be killed, or end before one of their workers reports
_MAX_LINE_BYTES = 1 << 26
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True)
class Failure:
    """Why a request has no reply."""

    kind: Literal["error", "memory", "time", "ended", "killed", "start", "closed"]
    text: str
    exit_code: int | None = None
    """Exit code of the worker if the request ended it."""


Deliver = Callable[[Any, Failure | None], None]
"""Callback for the reply to a request or its failure; runs in the pool's thread and must not raise."""


class Pool:
    """Answers requests with a service in workers, which start when needed and end with the pool or its process.

    A separate thread serves the workers. Callers share no lock with it, only a deque and a socket: Ctrl-C may interrupt
    a caller at any instruction, and a `threading` lock could then stay locked forever.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._requests: deque[_Request | Session] = deque()
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        dispatcher = _Dispatcher(config, self._requests, woken)
        # This thread also starts the fork server, which the kernel ends with the thread that started it; a caller's
        # thread may end before the pool.
        self._thread = threading.Thread(target=dispatcher.run, name="workers", daemon=True)
        self._thread.start()

    def submit(self, request: Any, deliver: Deliver, session: "Session | None" = None) -> None:
        """Queue a request, either on its own or as the next turn of a session; `deliver` gets the outcome."""
        self._announce(_Request(session, request, deliver))

    def end(self, session: "Session") -> None:
        """Tell the worker of a session to free its state."""
        self._announce(session)

    def close(self) -> None:
        """End all processes; requests without a reply fail."""
        with suppress(OSError):  # closed before
            self._wake.shutdown(socket.SHUT_WR)
        self._thread.join()
        self._wake.close()

    def _announce(self, request: "_Request | Session") -> None:
        self._requests.append(request)
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            pass  # the socket is full of wake-up bytes, so the thread will wake up anyway
        except OSError:
            _refuse(self._requests, Failure("closed", "the pool is closed"))


class Session:
    """Requests that share a state, which a worker keeps between them; they are answered one after the other."""

    _numbers = itertools.count(1)

    def __init__(self, start: Any, past: Sequence[Any] = ()) -> None:
        """Describe a session that begins from `start`, after which its `past` requests are replayed."""
        self.number = next(self._numbers)
        self.start = start
        self.past = list(past)
        """The answered requests, which together with `start` determine the state."""
        self.worker: _Worker | None = None
        """The worker that has the state; only the pool's thread uses it."""


@dataclass(eq=False)
class _Request:
    """A request without a reply yet."""

    session: Session | None
    request: Any
    deliver: Deliver
    num_losses: int = 0
    needs_fresh_worker: bool = False
    """Whether it failed in a worker that had served others, which may have used up the memory."""

    @property
    def worker(self) -> "_Worker | None":
        """The worker that has the state of its session; None without one."""
        return self.session.worker if self.session else None

    @worker.setter
    def worker(self, worker: "_Worker | None") -> None:
        if self.session:
            self.session.worker = worker

    def finish(self, reply: Any) -> None:
        """Deliver the reply, and add the request to the past of its session."""
        if self.session:
            self.session.past.append(self.request)
        self.deliver(reply, None)

    def fail(self, failure: Failure) -> None:
        """Deliver the failure, which ends the session."""
        self.worker = None
        self.deliver(None, failure)


def _refuse(requests: "deque[_Request | Session]", failure: Failure) -> None:
    """Fail all queued requests."""
    with suppress(IndexError):  # another thread may pop the last one between a check and `popleft`
        while True:
            if isinstance(request := requests.popleft(), _Request):
                request.fail(failure)


class _Dispatcher:
    """Distributes requests over workers, in a separate thread."""

    def __init__(self, config: PoolConfig, requests: "deque[_Request | Session]", woken: socket.socket) -> None:
        self._config, self._requests, self._woken = config, requests, woken
        self._woken.setblocking(False)
        self._waiting: deque[_Request] = deque()
        """Requests without a session, or whose session is in no worker."""
        self._need_fresh_worker: deque[_Request] = deque()
        """Never more than the pool may start workers, since a worker was ended for each."""
        self._workers: list[_Worker] = []
        """All are forked from the current fork server."""
        self._fork_server: ForkServer | None = None
        self._num_starts = 0  # of fork servers, since a worker last reported
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
            self._woken.close()  # from here on, `submit` fails each new request itself
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
        """Read what callers and workers sent, end workers past their deadline, assign requests; False once closed."""
        for key, _ in self._selector.select(self._select_timeout_s()):
            if key.data is None:  # the socket of the callers
                if not self._is_open():
                    return False
            elif key.data in self._workers:  # it may have been ended since `select`
                self._read(key.data)
            elif key.data is self._fork_server:
                self._end_fork_server()  # its process has ended
        self._take_requests()
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline <= now and worker in self._workers:
                self._give_up(worker)
        self._assign()
        return True

    def _is_open(self) -> bool:
        """Read the wake-up bytes; return whether the pool is still open, since `close` ends the stream."""
        with suppress(BlockingIOError):
            return bool(self._woken.recv(1 << 12))
        return True

    def _select_timeout_s(self) -> float | None:
        """Return the time until a worker reaches its deadline, or another may take over a queue; None without limit."""
        busy = [each for each in self._workers if each.is_busy]
        if not busy:
            return None
        timeout_s = min(each.deadline for each in busy) - time.monotonic()
        if any(each.queue for each in busy):
            timeout_s = min(timeout_s, _STEAL_AFTER_S)
        return max(0.0, timeout_s)

    def _take_requests(self) -> None:
        """Move new requests to the queue of their session's worker, or to the common one; free ended sessions."""
        while self._requests:
            item = self._requests.popleft()
            if item.worker not in self._workers:  # its process has ended
                item.worker = None
            if isinstance(item, _Request):
                queue = item.worker.queue if item.worker else self._waiting
                queue.append(item)
            elif item.worker:  # a session to be freed
                item.worker.ended.append(item.number)
                item.worker = None

    def _assign(self) -> None:
        """Give each idle worker a request, and start workers for the remaining ones up to the limit."""
        for worker in [each for each in self._workers if not each.is_busy]:
            if worker.ended:
                self._send(worker, None)  # only frees those sessions
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
        """Take a request whose session this worker has, else one in no worker, else one from a slow worker's queue."""
        if worker and worker.queue:
            return worker.queue.popleft()
        if self._waiting:
            return self._waiting.popleft()
        latest_start = time.monotonic() - _STEAL_AFTER_S
        slow = [each for each in self._workers if each.is_busy and each.queue and each.busy_since < latest_start]
        if not slow:
            return None
        slowest = min(slow, key=lambda each: each.busy_since)
        request = slowest.queue.popleft()
        if request.session:
            slowest.ended.append(request.session.number)
        request.worker = None
        return request

    def _send(self, worker: "_Worker", request: _Request | None) -> None:
        try:
            worker.send(request, self._config.timeout_s)
        except OSError:
            self._lose(worker)

    def _read(self, worker: "_Worker") -> None:
        """Read a worker's lines: its process ID and each heartbeat extend its deadline; a reply ends its request."""
        lines = worker.receive()
        if lines is None:
            self._lose(worker)
            return
        for line in lines:
            if not worker.process:
                worker.process = int(line)
                self._num_starts = 0
            elif line == HEARTBEAT and worker.heartbeats_due:
                worker.heartbeats_due -= 1
            else:
                self._take_reply(worker, line)
                return
            worker.deadline = time.monotonic() + self._config.timeout_s

    def _take_reply(self, worker: "_Worker", line: bytes) -> None:
        """Deliver a reply or failure; retry in a fresh worker if memory ran out after other requests."""
        reply = _parsed_reply(line)
        # A reply begins with the number of the request that it answers.
        if reply is None or not worker.is_busy or reply[0] != worker.num_requests:
            self._lose(worker, is_broken=True)  # code under the service wrote into our socket, or forked
            return
        _, value, failure, is_out_of_memory, must_exit = reply
        request, worker.request, worker.deadline = worker.request, None, math.inf
        must_retry = is_out_of_memory and not worker.is_fresh
        if must_exit:
            self._lose(worker)
        if request is None:  # the worker only freed what ended sessions had left
            return
        if must_retry:
            request.needs_fresh_worker = True
            self._retry(request)
        elif failure is None:
            request.finish(value)
        else:
            request.fail(Failure("memory" if is_out_of_memory else "error", failure))

    def _give_up(self, worker: "_Worker") -> None:
        """End a worker past its deadline and fail its request; if it never reported, end the fork server."""
        if worker.process:
            request, worker.request = worker.request, None
            self._lose(worker)
            if request:
                request.fail(Failure("time", f"gave no answer within {self._config.timeout_s:g} s"))
        else:  # the fork server hangs: the worker that it was to fork has not reported
            worker.fork_server.kill()
            self._end_fork_server()

    def _lose(self, worker: "_Worker", *, is_broken: bool = False) -> None:
        """End a worker; its requests go to other workers, except for one that ended it.

        A request that ended a worker by its processor time would do so again, so it fails. Any other end may come from
        memory that earlier requests used, so the request gets a second try in a fresh worker.
        """
        request, queue = worker.request, worker.queue
        code = self._end(worker)
        for each in queue:
            each.worker = None
        self._waiting.extendleft(reversed(queue))
        if request is None:
            return
        if code is None or is_broken or -code in _OUTSIDE_SIGNALS:
            request.num_losses += 1
            self._retry(request)
        elif worker.is_fresh or code == -signal.SIGPROF:
            request.fail(Failure("ended", f"its process ended {ending(code)}", code))
        else:
            request.needs_fresh_worker = True
            self._retry(request)

    def _retry(self, request: _Request) -> None:
        """Put a request at the front of its queue, or fail it if it has lost too many workers."""
        request.worker = None
        if request.num_losses == _MAX_LOSSES:
            cause = "its worker process was killed (for example by the OOM killer), or sent an invalid reply"
            request.fail(Failure("killed", f"{cause}, {_MAX_LOSSES} times"))
            return
        queue = self._need_fresh_worker if request.needs_fresh_worker else self._waiting
        queue.appendleft(request)

    def _end(self, worker: "_Worker") -> int | None:
        """End a worker and what it started; return its exit code, None if the fork server has ended."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()
        return worker.fork_server.end_worker(worker.process) if worker.process else None

    def _start(self) -> "_Worker | str":
        """Start a worker, and a fork server if there is none; return the worker, or the reason for the failure."""
        if self._fork_server and self._fork_server.is_ended:
            self._end_fork_server()
        try:
            while self._fork_server is None:
                if self._num_starts == _MAX_FAILED_STARTS:
                    return f"ended {_MAX_FAILED_STARTS} times before it was ready"
                self._num_starts += 1
                fork_server = ForkServer(self._config)
                failure = fork_server.wait_until_ready()
                if failure is None:
                    self._fork_server = fork_server
                    self._selector.register(fork_server.control, selectors.EVENT_READ, fork_server)
                elif -fork_server.exit_code not in _OUTSIDE_SIGNALS:  # else it is started again
                    return failure
            worker = _Worker(self._fork_server)
        except OSError as error:  # no more processes or files
            return str(error)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        return worker

    def _end_fork_server(self) -> None:
        """End the fork server with all its workers; the next request starts another one."""
        if self._fork_server:
            fork_server, self._fork_server = self._fork_server, None
            self._selector.unregister(fork_server.control)
            fork_server.end()
            for worker in list(self._workers):
                self._lose(worker)


class _Worker:
    """The dispatcher's view of a worker process."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.fork_server = fork_server
        self.process = 0
        """Process ID of its supervisor, by which the fork server knows it; 0 until the worker reports it."""
        self.request: _Request | None = None
        """The request being answered; None while idle or freeing ended sessions."""
        self.queue: deque[_Request] = deque()
        """Requests of sessions whose state it has."""
        self.ended: list[int] = []
        """Numbers of the sessions to be freed."""
        self.num_requests = 0
        self.heartbeats_due = 0
        """Heartbeats that it may still send: one for each past request being replayed."""
        self.busy_since, self.deadline = 0.0, math.inf
        self._received = bytearray()
        self.channel, theirs = socket.socketpair()
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", MAX_SEND_S, 0))
        with theirs:
            fork_server.fork(theirs)

    @property
    def is_busy(self) -> bool:
        """Whether it owes a reply."""
        return self.deadline < math.inf

    @property
    def is_fresh(self) -> bool:
        """Whether its current request is its first, so that no other can have used up its memory."""
        return self.num_requests == 1

    def requests(self) -> list[_Request]:
        """Return all requests assigned to it."""
        return [self.request, *self.queue] if self.request else [*self.queue]

    def send(self, request: _Request | None, timeout_s: float) -> None:
        """Send a request, with the past of its session if the worker lacks the state; None only frees ended sessions.

        Callers first free ended sessions in a separate message: an error there must not fail a request.
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
                self.heartbeats_due = len(session.past)
            request.worker = self
        self.channel.sendall(json.dumps(message).encode("ascii") + b"\n")

    def receive(self) -> list[bytes] | None:
        """Return the complete lines that arrived; None if the process has ended or a line is too long."""
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
    """Request number, reply, failure text, whether memory ran out, and whether the worker exits; None if malformed."""
    try:
        match json.loads(line):
            case [int(number), value, None | str() as failure, bool(is_out_of_memory), bool(must_exit)]:
                return number, value, failure, is_out_of_memory, must_exit
    except (ValueError, RecursionError):
        pass
    return None
