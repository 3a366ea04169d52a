"""The fork server (worker.py), as the process that starts it sees it."""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from components.environments.worker import END, FORK, MAX_MESSAGE_BYTES, READY, TRY
from components.shared.errors import PipelineError
from components.shared.tools import ToolsConfig

MAX_START_S = 60.0
MAX_SEND_S = 5
_MAX_END_S = 15.0
_KEY = "train_sft.model.tools"
_ROOT = Path(__file__).parents[2]


class UnavailableHereError(PipelineError):
    """An own environment needs a package, file or server that is missing on this machine."""


class ForkServer:
    """A process that has imported an environment, and forks workers; they end with it."""

    def __init__(self, config: ToolsConfig) -> None:
        self.is_ended = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option, limit_s in ((socket.SO_SNDTIMEO, MAX_SEND_S), (socket.SO_RCVTIMEO, int(MAX_START_S))):
            self.control.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))
        arguments = (str(theirs.fileno()), str(os.getpid()), config.model_dump_json())
        # It finds the modules that this process finds, and those in the current folder.
        path = os.pathsep.join([str(_ROOT), *(folder or str(Path.cwd()) for folder in sys.path), str(Path.cwd())])
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
        return self._verdict("its import")

    def try_environment(self) -> PipelineError | None:
        """Have one environment made within the limits of a worker; return what is wrong with it."""
        self._ask(TRY)
        return self._verdict("making an object of it")

    def fork(self, channel: socket.socket) -> None:
        """Have a worker forked that has the other end of a socket."""
        self._ask(FORK, [channel.fileno()])

    def end_worker(self, process: int) -> int | None:
        """Kill a worker with what it has started, and return its exit code; None where this process has ended."""
        if self.is_ended:
            return None
        self._ask(b"%s %d" % (END, process))
        try:
            return int(self.control.recv(64))
        except (OSError, ValueError):
            self.kill()
            return None

    def end(self) -> None:
        """End it, with its workers and what they have started."""
        self.is_ended = True
        with suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_MAX_END_S)
        self.kill()
        self._process.wait()
        self.control.close()

    def kill(self) -> None:
        """Kill it at once; the kernel tells its workers, which end with what they have started."""
        self.is_ended = True
        self._process.kill()

    def _verdict(self, what: str) -> PipelineError | None:
        try:
            message = self.control.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if message == READY:
            return None
        if message:
            text, is_unavailable = json.loads(message)
            return UnavailableHereError(text) if is_unavailable else PipelineError(text)
        self.kill()
        return PipelineError(
            f"{_KEY}.environment: {what} ended the process of environments, or took longer than {MAX_START_S:g} s"
        )

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a request; a process that does not take it is killed."""
        try:
            socket.send_fds(self.control, [request], descriptors)
        except OSError:
            self.kill()
