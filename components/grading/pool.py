"""Worker processes that grade, so that nothing a model writes can hang, exhaust or crash the run.

A comparison may hang in C code, where neither a Python signal handler nor a thread can interrupt it: only the end of
the process ends it. So each submission is graded in a worker process, which the kernel ends once it has used the
deadline in processor time; a busy machine does not change verdicts. A worker has one submission at a time: nothing
queues behind a slow answer, and it is clear which one a worker died of.
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

from components.grading.grade import Grade, Submission, Verdict
from components.grading.sandbox.confinement import environment
from components.grading.worker import OUT_OF_MEMORY, PREPARING, READY
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
_MAX_TRIES = 3
_MAX_STARTS = 30
_ROOT = Path(__file__).parents[2]
_SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Call:
    """The submissions of one call, and what comes of it: grades in their order, or an error."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self.submissions = submissions
        self.todo = deque(range(len(submissions)))
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


@dataclass(slots=True)
class _Task:
    """A submission to be graded, and how many workers were killed from outside that had it, or started for it."""

    call: Call
    index: int
    num_kills: int = 0
    num_killed_starts: int = 0


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
            for task in [*self._retries, *(worker.task for worker in workers if worker.task)]:
                task.call.fail(error)
            while self._calls:
                self._calls.popleft().fail(error)
            for worker in workers:
                self._end(worker)
            self._selector.close()

    def _serve(self) -> bool:
        """Hear what workers and callers say, and look after workers that are silent; tell whether to go on."""
        for key, _ in self._selector.select(_CHECK_EVERY_S if self._in_slots or self._slow else None):
            if key.data is not None:
                self._hear(key.data)
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
            task = self._retries.popleft() if self._retries else self._next_task()
            if not task:
                return
            try:
                worker = self._idle.pop() if self._idle else self._start()
            except OSError as error:  # no more processes or files
                task.call.fail(error)
                continue
            self._in_slots.add(worker)
            worker.task = task
            if not worker.is_starting:
                worker.send()

    def _next_task(self) -> _Task | None:
        """A submission that waits; calls take turns."""
        while self._calls:
            call = self._calls.popleft()
            if call.todo and not call.is_abandoned:
                self._calls.append(call)
                return _Task(call, call.todo.popleft())
        return None

    def _start(self) -> "_Worker":
        worker = _Worker(self._function, self._deadline_s)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: "_Worker") -> None:
        lines = worker.receive()
        if lines is None:
            self._replace(worker)
            return
        for line in lines:
            if line == PREPARING:
                worker.check_at = time.monotonic() + _MAX_SILENCE_S
            elif line != READY:
                self._finish(worker, line)
            elif worker.is_starting:
                worker.send()
            else:
                worker.check_at = time.monotonic() + _SLOW_AFTER_S

    def _finish(self, worker: "_Worker", line: bytes) -> None:
        task, worker.task = worker.task, None
        assert task
        if line.endswith(b" true]"):  # it has grown too large
            self._end(worker)
        else:
            self._in_slots.discard(worker)
            self._slow.discard(worker)
            self._idle.append(worker)
            worker.check_at = time.monotonic() + _MAX_IDLE_S
        self._fill_slots()  # first, so that the worker has something to do meanwhile
        verdict, extracted, reason, tests_passed, _ = json.loads(line)
        task.call.finish(task.index, Grade(Verdict(verdict), extracted, reason, tests_passed))

    def _check(self, worker: "_Worker") -> None:
        """Look after a worker that has not said anything for too long."""
        worker.check_at = time.monotonic() + self._deadline_s + _MAX_SILENCE_S
        if worker in self._in_slots:
            self._in_slots.remove(worker)
            self._slow.add(worker)
        elif worker in self._slow or len(self._idle) > self._num_slots:
            self._replace(worker)

    def _replace(self, worker: "_Worker") -> None:
        """End a worker, and have another one grade its submission, unless that has ended it itself."""
        task, reason = worker.task, self._end(worker)
        if not task:
            return
        task.num_killed_starts += worker.is_starting
        task.num_kills += not worker.is_starting
        if worker.is_starting and (reason or task.num_killed_starts == _MAX_STARTS):
            reason = reason or f"{_MAX_STARTS} in a row were killed"
            task.call.fail(PipelineError(f"no answer can be graded: worker processes do not start ({reason})"))
        elif reason or task.num_kills == _MAX_TRIES:
            reason = reason or f"its worker was killed {_MAX_TRIES} times"
            task.call.finish(task.index, Grade(Verdict.UNSCORABLE, None, reason))
        else:
            self._retries.append(task)

    def _end(self, worker: "_Worker") -> str | None:
        self._in_slots.discard(worker)
        self._slow.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self._selector.unregister(worker.channel)
        return worker.end()


class _Worker:
    """One worker process, as its parent sees it; it has one submission at a time."""

    def __init__(self, function: str, deadline_s: float) -> None:
        self.task: _Task | None = None
        self.is_starting = True
        self.check_at = time.monotonic() + _MAX_SILENCE_S
        self._deadline_s, self._received = deadline_s, b""
        self.channel, theirs = socket.socketpair()
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _MAX_SEND_S, 0))
        arguments = ("components.grading.worker", str(theirs.fileno()), function, str(deadline_s))
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

    def send(self) -> None:
        """Send the submission; a worker that does not take it is killed."""
        assert self.task
        self.is_starting, self.check_at = False, time.monotonic() + _SLOW_AFTER_S
        submission = self.task.call.submissions[self.task.index]
        line = (
            json.dumps([submission.gold, submission.response, submission.policy, submission.question]).encode("ascii")
            + b"\n"
        )
        try:
            self.channel.sendall(line)
        except (BlockingIOError, ConnectionError):
            self._process.kill()

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived; None where the process has ended."""
        try:
            part = self.channel.recv(1 << 16)
        except ConnectionError:
            return None
        *lines, self._received = (self._received + part).split(b"\n")
        return lines if part else None

    def end(self) -> str | None:
        """End the process; return why it had ended before, None unless its submission is to blame for that."""
        self._process.kill()
        code = self._process.wait()
        self.channel.close()
        if -code in _SENT_FROM_OUTSIDE:
            return None
        if code == -signal.SIGPROF:
            return f"took longer than {self._deadline_s:g} s"
        if code == OUT_OF_MEMORY:
            return "out of memory"
        return f"the grader crashed ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
