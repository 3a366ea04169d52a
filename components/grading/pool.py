"""Worker processes that grade, so that nothing a model writes can hang, exhaust or crash the run.

A comparison may hang in C code, where neither a Python signal handler nor a thread can interrupt it: only the end of
the process ends it. So each submission is graded in a worker process, which the kernel ends once it has used the
deadline in processor time; a busy machine does not change verdicts. A worker is given a few submissions and grades one
after the other, so it is clear which one it died of; nothing queues behind a slow one, as another worker grades the
rest. Workers are forked from one process, which imports the grader, and the libraries for algebra as soon as they are
needed.
"""

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from components.grading.grade import Grade, Submission, Verdict
from components.grading.reasons import Reason
from components.grading.sandbox.confinement import environment
from components.grading.worker import (
    FORK,
    IMPORT,
    NEEDS_ALGEBRA,
    OUT_OF_MEMORY,
    PREPARING,
    READY,
    REAP,
    SHORT_OF_MEMORY,
    STARTED,
    TOO_LARGE,
)
from components.shared.errors import PipelineError

GRADE = "components.grading.grade:grade"
_SLOW_AFTER_S = 0.05
_CHECK_EVERY_S = 0.01
_MAX_SEND_S = 1
_MAX_SILENCE_S = 90.0
"""Of a worker that starts, imports libraries, runs code in the sandbox, which has limits of its own, or is stopped."""
_MAX_IDLE_S = 10.0
"""Of a worker that replaced a slow one."""
_MAX_WORKERS_PER_SLOT = 4
_MAX_SUBMISSIONS = 16
_MAX_CHARACTERS = 50_000
"""Given to a worker at once; a longer response is alone."""
_MAX_TRIES = 3
_MAX_STARTS = 30
_ROOT = Path(__file__).parents[2]
_SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Call:
    """The submissions of one call, and what comes of it: grades in their order, or an error."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self.submissions = submissions
        self.todo = deque(_Task(self, index) for index in range(len(submissions)))
        self.is_abandoned = False
        self.outcome: SimpleQueue[list[Grade] | Exception] = SimpleQueue()
        self._grades: dict[int, Grade] = {}

    def finish(self, index: int, grade: Grade) -> None:
        """Take the grade of one submission."""
        self._grades[index] = grade
        if len(self._grades) == len(self.submissions):
            self.outcome.put([self._grades[each] for each in range(len(self.submissions))])

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self.todo.clear()
        self.outcome.put(error)


class _Cause(NamedTuple):
    """Why a worker has ended by itself."""

    reason: Reason
    detail: str


@dataclass(slots=True)
class _Task:
    """A submission to be graded, and how many workers were killed from outside that had it, or started for it."""

    call: Call
    index: int
    num_kills: int = 0
    num_killed_starts: int = 0
    needs_new_worker: bool = False

    @property
    def submission(self) -> Submission:
        return self.call.submissions[self.index]


class Dispatcher:
    """Has submissions graded by workers, in a thread of its own.

    As many submissions as there are slots are graded at once. One that takes long gives up its slot, and another worker
    grades the next one, up to `_MAX_WORKERS_PER_SLOT` times as many in all.
    """

    def __init__(
        self, num_slots: int, deadline_s: float, function: str, calls: deque[Call], control: socket.socket
    ) -> None:
        self._num_slots, self._deadline_s, self._function = num_slots, deadline_s, function
        self._calls, self._control = calls, control
        self._retries: deque[_Task] = deque()
        # Each worker is in one of these.
        self._in_slots: set[_Worker] = set()
        self._slow: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._origin: _Origin | None = None
        self._next_check = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve calls until the control socket is closed at its other end; a byte from there announces a call."""
        error: Exception = RuntimeError("the verifier was closed before everything was graded")
        try:
            while self._serve():
                pass
        except Exception as unexpected:
            error = unexpected
            raise
        finally:
            self._control.close()  # from here on, a call that is announced raises
            workers = [*self._in_slots, *self._slow, *self._idle]
            for task in [*self._retries, *(task for worker in workers for task in worker.tasks.values())]:
                task.call.fail(error)
            while self._calls:
                self._calls.popleft().fail(error)
            for worker in workers:
                self._end(worker)
            self._end_origin()
            self._selector.close()

    def _serve(self) -> bool:
        """Hear what workers and callers say, and look after workers that are silent; tell whether to go on."""
        for key, _ in self._selector.select(_CHECK_EVERY_S if self._in_slots or self._slow else None):
            if isinstance(key.data, _Worker):
                self._hear(key.data)
            elif key.data is not None:
                self._end_origin()  # it has ended
            elif not self._control.recv(1 << 12):
                return False
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_EVERY_S
            for worker in [*self._in_slots, *self._slow, *self._idle]:
                if worker.check_at <= now:
                    self._check(worker)
        self._fill_slots()
        return True

    def _fill_slots(self) -> None:
        max_busy = self._num_slots * _MAX_WORKERS_PER_SLOT
        while len(self._in_slots) < self._num_slots and len(self._in_slots) + len(self._slow) < max_busy:
            task = self._next_task()
            if not task:
                return
            try:
                worker = self._start() if task.needs_new_worker or not self._idle else self._idle.pop()
            except OSError as error:  # no more processes or files
                task.call.fail(error)
                continue
            self._in_slots.add(worker)
            worker.tasks[0] = task
            if not worker.is_starting:
                self._send(worker)

    def _send(self, worker: "_Worker") -> None:
        """Send a worker its first task, and more if there are many."""
        num_waiting = sum(len(call.todo) for call in list(self._calls))
        num_characters = 0
        for position in range(1, min(_MAX_SUBMISSIONS, num_waiting // (4 * self._num_slots))):
            num_characters += len(worker.tasks[position - 1].submission.response)
            if num_characters > _MAX_CHARACTERS or not (task := self._next_task()):
                break
            worker.tasks[position] = task
        worker.send()

    def _next_task(self) -> _Task | None:
        """A submission that waits; calls take turns."""
        if self._retries:
            return self._retries.popleft()
        while self._calls:
            call = self._calls.popleft()
            if call.todo and not call.is_abandoned:
                self._calls.append(call)
                return call.todo.popleft()
        return None

    def _give_back(self, tasks: list[_Task]) -> None:
        """Let other workers have submissions that are next in a worker's list."""
        for task in reversed(tasks):
            task.call.todo.appendleft(task)
            if task.call not in self._calls:
                self._calls.appendleft(task.call)

    def _start(self) -> "_Worker":
        if not self._origin:
            self._origin = _Origin(self._function, self._deadline_s)
            self._selector.register(self._origin.control, selectors.EVENT_READ, self._origin)
        worker = _Worker(self._origin)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: "_Worker") -> None:
        if worker.channel.fileno() < 0:  # ended since it was heard
            return
        lines = worker.receive()
        if lines is None:
            self._replace(worker)
            return
        for line in lines:
            if line.startswith(STARTED):
                worker.process = int(line.removeprefix(STARTED))
                self._send(worker)
            elif line == PREPARING:
                worker.check_at = time.monotonic() + _MAX_SILENCE_S
                self._give_back(worker.take_tasks(after_first=True))
            elif line in {READY, TOO_LARGE}:
                self._reuse(worker, is_too_large=line == TOO_LARGE)
            elif line == NEEDS_ALGEBRA:
                self._import_algebra(worker)
                return
            else:
                worker.check_at = time.monotonic() + _SLOW_AFTER_S
                self._finish(worker, line)

    def _finish(self, worker: "_Worker", line: bytes) -> None:
        position, verdict, extracted, reason, tests_passed, detail = json.loads(line)
        if task := worker.tasks.pop(position, None):  # nobody else has been given it
            task.call.finish(task.index, Grade(Verdict(verdict), extracted, Reason.of(reason), tests_passed, detail))

    def _reuse(self, worker: "_Worker", *, is_too_large: bool) -> None:
        """Have something else graded by a worker that is through with its list, or hands back the rest."""
        self._give_back(worker.take_tasks())
        if is_too_large or (self._origin and self._origin.has_algebra and not worker.has_algebra):
            self._end(worker)
        else:
            self._in_slots.discard(worker)
            self._slow.discard(worker)
            self._idle.append(worker)
            worker.check_at = time.monotonic() + _MAX_IDLE_S
        self._fill_slots()

    def _import_algebra(self, worker: "_Worker") -> None:
        """Have later workers forked with the libraries for algebra; one that is without them is of no more use."""
        self._give_back(worker.take_tasks())
        for each in [worker, *self._idle]:
            if not each.has_algebra:
                self._end(each)
        if self._origin:
            self._origin.import_algebra()
        self._fill_slots()

    def _check(self, worker: "_Worker") -> None:
        """Look after a worker that has not said anything for too long."""
        worker.check_at = time.monotonic() + self._deadline_s + _MAX_SILENCE_S
        if worker in self._in_slots:
            self._in_slots.remove(worker)
            self._slow.add(worker)
            self._give_back(worker.take_tasks(after_first=True))
        elif worker in self._slow or len(self._idle) > self._num_slots:
            self._replace(worker)

    def _replace(self, worker: "_Worker") -> None:
        """End a worker, and have another one grade its submissions, unless the first of them has ended it itself."""
        tasks, cause = worker.take_tasks(), self._end(worker)
        if not tasks:
            return
        task, *others = tasks
        self._give_back(others)
        task.num_killed_starts += worker.is_starting
        task.num_kills += not worker.is_starting
        task.needs_new_worker |= worker.is_short_of_memory
        if worker.is_starting and (cause or task.num_killed_starts == _MAX_STARTS):
            detail = cause.detail if cause else f"{_MAX_STARTS} in a row were killed"
            task.call.fail(PipelineError(f"no answer can be graded: worker processes do not start ({detail})"))
        elif cause or task.num_kills == _MAX_TRIES:
            cause = cause or _Cause(Reason.CRASH, f"its worker was killed {_MAX_TRIES} times")
            task.call.finish(task.index, Grade(Verdict.UNSCORABLE, None, cause.reason, detail=cause.detail))
        else:
            self._retries.append(task)

    def _end(self, worker: "_Worker") -> "_Cause | None":
        self._in_slots.discard(worker)
        self._slow.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self._selector.unregister(worker.channel)
        return worker.end()

    def _end_origin(self) -> None:
        """End the process that workers are forked from, and with it its workers; the next one gets a new one."""
        if self._origin:
            self._selector.unregister(self._origin.control)
            self._origin.end()
            self._origin = None


class _Origin:
    """The process that workers are forked from, as its parent sees it."""

    def __init__(self, function: str, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.has_algebra = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option, limit_s in ((socket.SO_SNDTIMEO, _MAX_SEND_S), (socket.SO_RCVTIMEO, int(_MAX_SILENCE_S))):
            self.control.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))
        arguments = ("components.grading.worker", str(theirs.fileno()), str(os.getpid()), function, str(deadline_s))
        path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])  # it finds the modules that this process finds
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**environment(), "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which then ends its workers
            )

    def fork(self, channel: socket.socket) -> None:
        """Have a worker forked that has the other end of a socket."""
        self._ask(FORK, [channel.fileno()])

    def import_algebra(self) -> None:
        """Have all workers that are forked from now on begin with the libraries for algebra."""
        if not self.has_algebra:
            self.has_algebra = True
            self._ask(IMPORT)

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a request; a process that does not take it is killed."""
        try:
            socket.send_fds(self.control, [request], descriptors)
        except (BlockingIOError, ConnectionError):
            self._process.kill()

    def reap(self, process: int) -> int:
        """End a worker, and return how it ended."""
        try:
            # Its number is that of no other process yet: only this reaps it, or the end of the process it comes from.
            if self._process.poll() is None:
                os.kill(process, signal.SIGKILL)
            self.control.send(b"%s %d" % (REAP, process))
            return int(self.control.recv(64))
        except (OSError, ValueError):
            self.end()
            return -signal.SIGKILL

    def end(self) -> int:
        """End the process, and with it all workers; return how it ended."""
        self._process.kill()
        return self._process.wait()


class _Worker:
    """One worker process, as the process that has it forked sees it."""

    def __init__(self, origin: _Origin) -> None:
        self.tasks: dict[int, _Task] = {}
        """By their place in the list that was sent."""
        self.process: int | None = None
        """Its number, once it has started."""
        self.is_starting = True
        self.is_short_of_memory = False
        """Whether it has ended because of memory that earlier submissions left in use."""
        self.has_algebra = origin.has_algebra
        self.check_at = time.monotonic() + _MAX_SILENCE_S
        self._origin, self._received = origin, b""
        self.channel, theirs = socket.socketpair()
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _MAX_SEND_S, 0))
        with theirs:
            origin.fork(theirs)

    def take_tasks(self, *, after_first: bool = False) -> list[_Task]:
        """Take its submissions from it, or all but the one that it has in hand."""
        return [self.tasks.pop(position) for position in sorted(self.tasks)[after_first:]]

    def send(self) -> None:
        """Send the submissions; a worker that does not take them is killed."""
        self.is_starting, self.check_at = False, time.monotonic() + _SLOW_AFTER_S
        submissions = [task.submission for task in self.tasks.values()]
        fields = [(each.gold, each.response, each.policy, each.question) for each in submissions]
        try:
            self.channel.sendall(json.dumps(fields).encode("ascii") + b"\n")
        except (BlockingIOError, ConnectionError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived; None where the process has ended."""
        try:
            part = self.channel.recv(1 << 16)
        except ConnectionError:
            return None
        *lines, self._received = (self._received + part).split(b"\n")
        return lines if part else None

    def end(self) -> "_Cause | None":
        """End the process; return why it had ended before, None unless its submission is to blame for that."""
        self.channel.close()
        code = self._origin.end() if self.process is None else self._origin.reap(self.process)
        self.is_short_of_memory = code == SHORT_OF_MEMORY
        if self.is_short_of_memory or -code in _SENT_FROM_OUTSIDE:
            return None
        if code == -signal.SIGPROF:
            return _Cause(Reason.TIME, f"took longer than {self._origin.deadline_s:g} s")
        if code == OUT_OF_MEMORY:
            return _Cause(Reason.MEMORY, "out of memory")
        return _Cause(Reason.CRASH, f"signal {-code}" if code < 0 else f"exit code {code}")
