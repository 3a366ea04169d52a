"""Worker processes that grade, so that nothing a model writes can hang, exhaust or crash the run.

A comparison may hang in C code, where neither a Python signal handler nor a thread can interrupt it: only the end of
the process ends it. So each submission is graded in a worker process, which the kernel ends once it has used the
deadline in processor time; a busy machine does not change verdicts. A worker has one submission at a time, and a
thread of this process waits for it: nothing queues behind a slow answer, and it is clear which one a worker died of.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from components.grading.grade import Grade, Submission, Verdict
from components.grading.worker import OUT_OF_MEMORY, PREPARING
from components.shared.errors import PipelineError

_GRADE = "components.grading.grade:grade"
_SLOW_AFTER_S = 0.05
_GRACE_S = 0.4
_MIN_PROGRESS_S = 0.05
"""A worker that computed for less during the deadline and the grace period is stopped or starved, not slow."""
_MAX_WORKERS_PER_SLOT = 4
_MAX_TRIES = 3
_MAX_STARTS = 30
_MAX_START_S = 60.0
_MAX_IDLE_S = 10.0
"""After which a worker ends that is idle although the slots are full."""
_ROOT = Path(__file__).parents[2]
_SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class Pool:
    """Grades submissions in worker processes; any number of threads may call it at once.

    As many submissions as there are slots (`num_workers`) are graded at once. One that takes long gives up its slot,
    and another worker grades the next one, up to `_MAX_WORKERS_PER_SLOT` times as many in all.
    """

    def __init__(self, num_workers: int, deadline_s: float, function: str = _GRADE) -> None:
        self._num_slots, self._deadline_s, self._function = num_workers, deadline_s, function
        self._threads = ThreadPoolExecutor(_MAX_WORKERS_PER_SLOT * num_workers, thread_name_prefix="grading")
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Guards all of the following."""
        self._calls: deque[_Call] = deque()
        self._num_busy_slots = 0
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False

    def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
        """Return the grade of each submission, in their order."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use the workers of its parent: make a new Verifier there")
        if not submissions:
            return []
        call = _Call(submissions)
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier is closed")
            self._calls.append(call)
            self._fill_slots()
        try:
            return call.result.result()
        finally:
            with self._lock, contextlib.suppress(ValueError):  # closing removes it too
                self._calls.remove(call)

    def close(self) -> None:
        """End all workers; calls that wait for them raise."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            while self._calls:
                self._calls.pop().fail(RuntimeError("the verifier was closed before everything was graded"))
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown()
        for worker in list(self._workers):
            self._discard(worker)

    def processor_s(self) -> float:
        """Return the processor time that the present workers have used."""
        with self._lock:
            return sum(worker.processor_s() for worker in self._workers)

    def _fill_slots(self) -> None:
        num_waiting = sum(len(call.todo) for call in self._calls)
        for _ in range(min(num_waiting, self._num_slots - self._num_busy_slots)):
            self._num_busy_slots += 1
            self._threads.submit(self._work)

    def _work(self) -> None:
        """Have submissions graded in one slot until none is waiting, or until one takes long."""
        has_slot = True

        def give_up_slot() -> None:
            nonlocal has_slot
            with self._lock:
                self._num_busy_slots -= has_slot
                has_slot = False
                self._fill_slots()

        while has_slot and (task := self._next_task()):
            call, index = task
            try:
                grade = self._grade(call.submissions[index], give_up_slot)
            except Exception as error:  # the caller has to get it
                with self._lock:
                    call.fail(error)
            else:
                with self._lock:
                    call.finish(index, grade)
        give_up_slot()

    def _next_task(self) -> "tuple[_Call, int] | None":
        """A submission that waits; calls take turns."""
        with self._lock:
            for _ in range(len(self._calls)):
                call = self._calls[0]
                self._calls.rotate(-1)
                if call.todo:
                    return call, call.todo.popleft()
        return None

    def _grade(self, submission: Submission, on_slow: Callable[[], None]) -> Grade:
        """Grade in a worker, or in another one where that is killed from outside."""
        for _ in range(_MAX_TRIES):
            worker = self._take_worker()
            try:
                worker.send(submission)
                grade = worker.receive(_SLOW_AFTER_S)
                if grade is None:
                    on_slow()
                    grade = worker.wait()
            except WorkerEndedError as ended:
                self._discard(worker)
                if ended.reason:
                    return Grade(Verdict.UNSCORABLE, None, ended.reason)
            else:
                self._put_back(worker)
                return grade
        return Grade(Verdict.UNSCORABLE, None, f"its worker was killed {_MAX_TRIES} times")

    def _take_worker(self) -> "_Worker":
        """An idle worker, or a new one once it is ready."""
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_usable:
                    return worker
                self._discard(worker)
        for _ in range(_MAX_STARTS):
            with self._lock:
                if self._closed:
                    raise RuntimeError("the verifier is closed")
                worker = _Worker(self._function, self._deadline_s)
                self._workers.add(worker)
            try:
                worker.wait_until_ready()
                return worker
            except WorkerEndedError as ended:
                self._discard(worker)
                if ended.reason:
                    raise PipelineError(f"no answer can be graded: {ended.reason} while a worker started") from None
        raise PipelineError(f"no answer can be graded: {_MAX_STARTS} worker processes in a row were killed")

    def _put_back(self, worker: "_Worker") -> None:
        with self._lock:
            if not worker.is_usable:
                return self._discard(worker)
            worker.idle_since = time.monotonic()
            self._idle.append(worker)
            if len(self._idle) > self._num_slots and time.monotonic() - self._idle[0].idle_since > _MAX_IDLE_S:
                self._discard(self._idle.pop(0))

    def _discard(self, worker: "_Worker") -> None:
        with self._lock:
            self._workers.discard(worker)
            worker.close()


class _Call:
    """The submissions of one call of the pool; its methods are called with the pool's lock held."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self.submissions = submissions
        self.todo = deque(range(len(submissions)))
        self.result: Future[list[Grade]] = Future()
        self._grades: dict[int, Grade] = {}

    def finish(self, index: int, grade: Grade) -> None:
        self._grades[index] = grade
        if len(self._grades) == len(self.submissions) and not self.result.done():
            self.result.set_result([self._grades[each] for each in range(len(self.submissions))])

    def fail(self, error: Exception) -> None:
        self.todo.clear()
        if not self.result.done():
            self.result.set_exception(error)


class WorkerEndedError(Exception):
    """The worker process has ended."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason
        """Why, where the submission caused it; None where the process was ended from outside."""


class _Worker:
    """One worker process, as its parent sees it; it has one submission at a time."""

    def __init__(self, function: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._received = b""
        self._is_too_large = False
        self.idle_since = 0.0
        self._channel, theirs = socket.socketpair()
        arguments = ("components.grading.worker", str(theirs.fileno()), function, str(deadline_s))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which then ends its workers
            )

    @property
    def is_usable(self) -> bool:
        """Whether it can be given another submission."""
        return not self._is_too_large and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Return once the worker has imported what it needs."""
        if self._receive(_MAX_START_S) is None:
            self._process.kill()
            raise WorkerEndedError(None)

    def send(self, submission: Submission) -> None:
        line = json.dumps([submission.gold, submission.response, submission.policy]).encode("ascii") + b"\n"
        self._channel.settimeout(self._deadline_s)
        try:
            self._channel.sendall(line)
        except (TimeoutError, ConnectionError):
            self._process.kill()
            raise WorkerEndedError(None) from None

    def receive(self, within_s: float) -> Grade | None:
        """Return the grade of the submission that was sent; None where it takes longer."""
        line = self._receive(within_s)
        if line == PREPARING:
            self.wait_until_ready()
            line = self._receive(within_s)
        if line is None:
            return None
        verdict, extracted, reason, self._is_too_large = json.loads(line)
        return Grade(Verdict(verdict), extracted, reason)

    def wait(self) -> Grade:
        """Return the grade of the submission that was sent, however long that takes below the deadline."""
        used_s = self.processor_s()
        while not (grade := self.receive(self._deadline_s + _GRACE_S)):
            used_before_s, used_s = used_s, self.processor_s()
            if used_s - used_before_s < _MIN_PROGRESS_S:  # else it will reach its deadline
                self.kill()
        return grade

    def processor_s(self) -> float:
        return time.clock_gettime((~self._process.pid << 3) | 2)  # clock_getcpuclockid(), which Python does not have

    def kill(self) -> None:
        self._process.kill()

    def _receive(self, within_s: float) -> bytes | None:
        self._channel.settimeout(within_s)
        try:
            while b"\n" not in self._received:
                part = self._channel.recv(1 << 16)
                if not part:
                    raise WorkerEndedError(self._why_ended())
                self._received += part
        except TimeoutError:
            return None
        except ConnectionError:
            raise WorkerEndedError(self._why_ended()) from None
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _why_ended(self) -> str | None:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"took longer than {self._deadline_s:g} s"
        if code == OUT_OF_MEMORY:
            return "out of memory"
        if -code in _SENT_FROM_OUTSIDE:
            return None
        return f"the grader crashed ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()


def _environment() -> dict[str, str]:
    """The environment of a worker: it finds the modules that this process finds, and sees none of its secrets."""
    path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    # With one order of sets, the simplifier takes the same path in every worker.
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PYTHONPATH": path, "PYTHONHASHSEED": "0", **libraries}
