"""The client side of the fork server (server.py): start it, fork and end workers, end it."""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.workers.server import END, FORK, READY

MAX_START_S = 60.0
MAX_SEND_S = 5
_MAX_END_S = 15.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class PoolConfig:
    """The service of a pool's workers, and their limits."""

    service: str
    """`module:function`; the function returns a `Service`."""
    arguments: Sequence[Any]
    """Arguments of that function, which must be representable as JSON."""
    num_workers: int
    memory_bytes: int
    """Address space of a worker."""
    timeout_s: float
    """Wall-clock time that an answer may take."""
    environment: Mapping[str, str]
    path: Sequence[str]
    """Folders to import modules from."""


class ForkServer:
    """A process that has built the service and forks workers, which end with it."""

    def __init__(self, config: PoolConfig) -> None:
        self.is_ended = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # As the kernel's timeval: seconds and microseconds.
        for option, limit_s in ((socket.SO_SNDTIMEO, MAX_SEND_S), (socket.SO_RCVTIMEO, int(MAX_START_S))):
            self.control.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))
        command = (sys.executable, "-P", "-W", "ignore", "-m", "components.workers.server")
        arguments = (config.service, json.dumps(config.arguments), str(config.memory_bytes))
        # The fork server finds the modules that this process finds.
        path = os.pathsep.join([str(_ROOT), *config.path])
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**config.environment, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which then ends its workers
            )

    @property
    def exit_code(self) -> int:
        """Exit code, negative for a signal; 0 while it runs."""
        return self._process.poll() or 0

    def wait_until_ready(self) -> str | None:
        """Wait until the service is built; return None, or end it and return the reason for its failure."""
        try:
            if self.control.recv(len(READY)) == READY:
                return None
            reason = f"ended {ending(self._process.wait(_MAX_END_S))}"
        except (OSError, subprocess.TimeoutExpired):  # OSError: `recv` has timed out
            reason = f"was not ready within {MAX_START_S:g} s"
        self.end()
        return reason

    def fork(self, channel: socket.socket) -> None:
        """Fork a worker that talks through this end of a socket pair."""
        self._ask(FORK, [channel.fileno()])

    def end_worker(self, process: int) -> int | None:
        """Kill a worker and what it started; return its exit code, None if the fork server has ended.

        A fork server that does not answer is killed.
        """
        if self.is_ended:
            return None
        self._ask(b"%s %d" % (END, process))
        try:
            return int(self.control.recv(64))
        except (OSError, ValueError):
            self.kill()
            return None

    def end(self) -> None:
        """End it, its workers and what they started; wait until it has ended."""
        self.is_ended = True
        with suppress(OSError):  # the other end is closed
            self.control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_MAX_END_S)
        self.kill()
        self._process.wait()
        self.control.close()

    def kill(self) -> None:
        """Kill it at once; the kernel then signals the supervisors of its workers, which kill what they started."""
        self.is_ended = True
        self._process.kill()

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a request with file descriptors; kill the fork server if it does not take it."""
        try:
            socket.send_fds(self.control, [request], descriptors)
        except OSError:
            self.kill()


def ending(code: int) -> str:
    """Return an exit code in words: "by signal 9" or "with exit code 1"."""
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
