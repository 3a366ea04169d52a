"""Worker processes that grade, so that nothing a model writes can stop, swell or crash the run.

A comparison may hang in C code, where no Python signal handler or thread gets a word in: only the end of the process
ends it. So each submission is graded in a worker process, which the kernel ends once it has computed for the deadline;
processor time, so a busy machine does not turn verdicts. A worker holds one submission at a time, and a thread of this
process attends to it: nothing ever waits behind a slow answer, and which one a worker died of is plain.

Few workers (`num_workers`) are at work at once. One that is at its submission for longer than a moment no longer
counts as one of them, and a spare takes its place; there are `_MAX_CREW` times as many in all at most.
"""

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum, auto

from components.grading.grade import Grade, Submission, Verdict
from components.grading.worker_process import WorkerEndedError, WorkerProcess
from components.shared.errors import PipelineError

GRADE = "components.grading.grade:grade"

_MOMENT_S = 0.05
_GRACE_S = 0.4
_STANDSTILL_S = 0.05
"""A worker that computed for less during the deadline and the grace is stopped or starved, not slow."""
_MAX_CREW = 4
"""Workers in all, for each that may be at work at once."""
_MAX_TRIES = 3
_MAX_FAILED_STARTS = 30
_IDLE_S = 10.0


class _Call:
    """The submissions of one call, and what is known of them."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self.submissions = submissions
        self.todo = deque(range(len(submissions)))
        self.grades: dict[int, Grade] = {}
        self.tries: Counter[int] = Counter()
        self.error: BaseException | None = None
        self.done = threading.Event()

    def finish(self, index: int, grade: Grade) -> None:
        self.grades[index] = grade
        if len(self.grades) == len(self.submissions):
            self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


class _State(Enum):
    FREE = auto()
    """Starting, or waiting for a submission."""
    BUSY = auto()
    SLOW = auto()
    """At its submission for longer than a moment."""


class Pool:
    """Grades submissions in worker processes; any number of threads may call it at once."""

    def __init__(self, num_workers: int, deadline_s: float, function: str = GRADE) -> None:
        self._num_workers, self._deadline_s, self._function = num_workers, deadline_s, function
        self._calls: deque[_Call] = deque()
        self._crew: dict[WorkerProcess, _State] = {}
        self._work = threading.Condition()  # guards all of these
        self._failed_starts = 0
        self._closed = False
        self._pid = os.getpid()

    def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
        """Return the grade of each submission, in their order."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use the workers of its parent: make a new Verifier there")
        if not submissions:
            return []
        call = _Call(submissions)
        with self._work:
            if self._closed:
                raise RuntimeError("the verifier is closed")
            self._calls.append(call)
            self._hire()
            self._work.notify(len(submissions))
        try:
            call.done.wait()
        finally:
            with self._work, contextlib.suppress(ValueError):  # a call that failed is out already
                self._calls.remove(call)
        if call.error:
            raise call.error
        return [call.grades[index] for index in range(len(submissions))]

    def close(self) -> None:
        """End all workers; calls that wait for them raise."""
        if os.getpid() != self._pid:
            return
        with self._work:
            self._closed = True
            self._fail(RuntimeError("the verifier was closed before all was graded"))
            for worker in self._crew:
                worker.kill()
            self._work.notify_all()
            self._work.wait_for(lambda: not self._crew)

    def _fail(self, error: Exception) -> None:
        with self._work:
            while self._calls:
                self._calls.pop().fail(error)

    def _count(self, state: _State) -> int:
        return list(self._crew.values()).count(state)

    def _hire(self) -> None:
        """Start workers for what nobody is there to take."""
        waiting = sum(len(call.todo) for call in self._calls)
        while (
            waiting > self._count(_State.FREE)
            and len(self._crew) - self._count(_State.SLOW) < self._num_workers
            and len(self._crew) < _MAX_CREW * self._num_workers
        ):
            try:
                worker = WorkerProcess(self._function, self._deadline_s)
            except OSError as error:
                return self._fail(error)
            self._crew[worker] = _State.FREE
            threading.Thread(target=self._attend, args=[worker], name="grading", daemon=True).start()

    def _attend(self, worker: WorkerProcess) -> None:
        """Go with one worker from its start to its end."""
        try:
            with worker, contextlib.suppress(WorkerEndedError):
                self._wait_until_ready(worker)
                while task := self._next_task(worker):
                    self._have_graded(worker, *task)
        except Exception as error:  # whatever it is, whoever waits for grades has to hear of it
            self._fail(error)
        with self._work:
            del self._crew[worker]
            self._hire()
            self._work.notify_all()

    def _wait_until_ready(self, worker: WorkerProcess) -> None:
        try:
            worker.wait_until_ready()
            self._failed_starts = 0
            return
        except WorkerEndedError as ended:
            if ended.reason:
                raise PipelineError(f"no answer can be graded: {ended.reason} while a worker started") from None
        self._failed_starts += 1
        if self._failed_starts == _MAX_FAILED_STARTS:
            raise PipelineError(f"no answer can be graded: {_MAX_FAILED_STARTS} worker processes in a row were killed")
        raise WorkerEndedError(None)

    def _next_task(self, worker: WorkerProcess) -> tuple[_Call, int] | None:
        """Wait for a submission that the worker may begin with; None where it can or need do no more."""
        with self._work:
            self._crew[worker] = _State.FREE
            while worker.fit and not self._closed:
                if self._count(_State.BUSY) < self._num_workers and (task := self._take()):
                    self._crew[worker] = _State.BUSY
                    return task
                in_time = self._work.wait(_IDLE_S)
                if not in_time and len(self._crew) - self._count(_State.SLOW) > self._num_workers:
                    return None
        return None

    def _take(self) -> tuple[_Call, int] | None:
        """A submission of the call whose turn it is."""
        for _ in range(len(self._calls)):
            call = self._calls[0]
            self._calls.rotate(-1)
            if call.todo:
                return call, call.todo.popleft()
        return None

    def _have_graded(self, worker: WorkerProcess, call: _Call, index: int) -> None:
        try:
            grade = self._grade(worker, call.submissions[index])
        except WorkerEndedError as ended:
            with self._work:
                call.tries[index] += 1
                if ended.reason or call.tries[index] == _MAX_TRIES:
                    reason = ended.reason or f"its worker was killed {_MAX_TRIES} times"
                    call.finish(index, Grade(Verdict.UNSCORABLE, None, reason))
                else:
                    call.todo.appendleft(index)
            raise
        with self._work:
            call.finish(index, grade)

    def _grade(self, worker: WorkerProcess, submission: Submission) -> Grade:
        worker.send(submission)
        if grade := worker.receive(_MOMENT_S):
            return grade
        with self._work:
            self._crew[worker] = _State.SLOW
            self._hire()
            self._work.notify()
        computed_s = worker.processor_s()
        while not (grade := worker.receive(self._deadline_s + _GRACE_S)):
            before_s, computed_s = computed_s, worker.processor_s()
            if computed_s - before_s < _STANDSTILL_S:  # else its deadline will come
                worker.kill()
        return grade
