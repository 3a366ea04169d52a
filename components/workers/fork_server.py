"""The fork server (server.py), as the process that starts it sees it."""

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
    """What the workers of a pool do, with what, and their limits."""

    service: str
    """`module:function`, which returns a `Service`."""
    arguments: Sequence[Any]
    """Of the function, as JSON."""
    num_workers: int
    memory_bytes: int
    """Address space of a worker."""
    timeout_s: float
    """Time by the clock that an answer may take."""
    environment: Mapping[str, str]
    path: Sequence[str]
    """Folders in which modules are found."""


class ForkServer:
    """A process that has made a service, and forks workers; they end with it."""

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
        """How it has ended; 0 where it has not."""
        return self._process.poll() or 0

    def wait_until_ready(self) -> str | None:
        """Wait until the service is made; return why it was not."""
        why = f"was not ready within {MAX_START_S:g} s"
        with suppress(OSError):
            if self.control.recv(len(READY)) == READY:
                return None
            why = f"ended {ending(self._process.wait(_MAX_END_S))}"
        self.end()
        return why

    def fork(self, channel: socket.socket) -> None:
        """Have a worker forked that has the other end of a socket."""
        self._ask(FORK, [channel.fileno()])

    def end_worker(self, process: int) -> int | None:
        """Kill a worker with what it has started, and return its exit code; None where the fork server has ended.

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

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a request; a process that does not take it is killed."""
        try:
            socket.send_fds(self.control, [request], descriptors)
        except OSError:
            self.kill()


def ending(code: int) -> str:
    """Return how a process ended, in words."""
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
