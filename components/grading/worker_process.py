"""A worker process, as the process sees it that started it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from components.grading.grade import Grade, Submission, Verdict
from components.grading.worker import OUT_OF_MEMORY, REHEARSING

_ROOT = Path(__file__).parents[2]
_START_S = 60.0
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class WorkerEndedError(Exception):
    """The worker process is gone."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason
        """Why, in words, where the submission did it; None where somebody else ended the process."""


class WorkerProcess:
    """One worker process; it has one submission at a time."""

    def __init__(self, function: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._received = b""
        self._swollen = False
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
    def fit(self) -> bool:
        """Whether it may be given a submission, or another."""
        return not self._swollen and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Return once the worker has imported what it needs."""
        if self._receive(_START_S) is None:
            self._process.kill()
            raise WorkerEndedError(None)

    def send(self, submission: Submission) -> None:
        """Put a submission before the worker."""
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
        if line == REHEARSING:
            self.wait_until_ready()
            line = self._receive(within_s)
        if line is None:
            return None
        verdict, extracted, reason, self._swollen = json.loads(line)
        return Grade(Verdict(verdict), extracted, reason)

    def processor_s(self) -> float:
        """Return for how long the process has computed."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # clock_getcpuclockid(), which Python does not have

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def _receive(self, within_s: float) -> bytes | None:
        self._channel.settimeout(within_s)
        try:
            while b"\n" not in self._received:
                part = self._channel.recv(1 << 16)
                if not part:
                    raise WorkerEndedError(self._why())
                self._received += part
        except TimeoutError:
            return None
        except ConnectionError:
            raise WorkerEndedError(self._why()) from None
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _why(self) -> str | None:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"took longer than {self._deadline_s:g} s"
        if code == OUT_OF_MEMORY:
            return "out of memory"
        if -code in _FROM_OUTSIDE:
            return None
        return f"the grader crashed ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()


def _environment() -> dict[str, str]:
    """What a worker needs: it finds what this process finds, and sees none of its secrets."""
    path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    # With one order of sets, the simplifier takes the same path in every worker.
    environment = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    with contextlib.suppress(KeyError):
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment
