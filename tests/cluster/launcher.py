"""Steps of runs as processes, in the time of a fake cluster: `python -m tests.cluster.launcher SOCKET`.

Reads a line of JSON for every step to start, and forks. The process runs the step as Kubeflow's task does, and reports
to the socket: first its pid, then every sleep, which lasts until there is an answer with the time, last its exit code.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from components.shared.watchdog import die_with_parent

_POLL_S, _POLLED_EVERY_S = 0.1, 5.0
"""Shorter sleeps are those of a library that polls: for a lock."""
_really_sleep = time.sleep


class Time:
    """The time of the cluster. It stands still while this process does anything but sleep."""

    _channel: socket.socket
    _now = 0.0

    def connect(self, address: str) -> None:
        """Connect to the cluster: once there is a process of its own."""
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.connect(address)

    def report(self, **message: Any) -> None:
        """Tell the cluster something."""
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def monotonic(self) -> float:
        """Return the seconds since the cluster was made."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Sleep until the cluster says so; a signal's handler may sleep meanwhile, and end the process."""
        if threading.current_thread() is not threading.main_thread():
            _really_sleep(seconds)
            return
        self.report(sleep=_POLLED_EVERY_S if seconds < _POLL_S else seconds)
        self._now = float(self._channel.recv(64) or sys.exit("the cluster is gone"))


def main() -> None:
    """Start steps until there is nothing more to read."""
    moment = Time()
    vars(time).update(sleep=moment.sleep, monotonic=moment.monotonic)  # before anybody takes them for a default
    from components.cluster import task, trainjob
    from components.cluster.kube import Clock
    from tests.cluster.launched import STEP
    from tests.fake_cluster.clock import START

    trainjob.Clock = lambda: Clock(now=lambda: START + timedelta(seconds=moment.monotonic()))  # type: ignore
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork():
            continue
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        Path(order["artifact"]).mkdir(parents=True)
        code = 0
        moment.connect(sys.argv[1])
        try:
            moment.report(pid=os.getpid())
            moment.sleep(0.2)
            place = {name: order[name] for name in ("cluster", "run_id", "run_name")}
            task.run_task(STEP, order["config"], order["artifact"], **place)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        moment.report(exit=code)
        os._exit(code)


if __name__ == "__main__":
    main()
