"""Pods that really run: a container's command as a process of this machine, with what it prints as the pod's log.

Folders are not mounted: the volume has to lie at the same path here. Names of pods are not found by DNS, so the nodes
of a job meet at this machine's own address.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import PODS
from tests.fake_cluster.pods import INDEX, Pods
from tests.fake_cluster.store import Change, Store

_ROOT = Path(__file__).parents[2]
_GRACE_S = 30
Ended = Callable[[Json, int], None]
"""Called with the pod and the exit code, as Kubernetes has it."""


class Processes:
    """The processes of all pods. One whose pod is removed gets SIGTERM, and SIGKILL after its time of grace."""

    def __init__(self, store: Store, pods: Pods) -> None:
        self._store, self._pods = store, pods
        self._running: dict[str, subprocess.Popen[str]] = {}
        store.listen(self._end_removed)

    def start(self, pod: Json, port: int, environment: Mapping[str, str], ended: Ended) -> None:
        """Start a pod's first container, and call back when it has ended."""
        container = pod["spec"]["containers"][0]
        process = subprocess.Popen(
            [*container["command"], *container.get("args", [])],
            cwd="/tmp",
            env={**environment, **_variables(pod, container, port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running[pod["metadata"]["uid"]] = process
        threading.Thread(target=self._attend, args=(pod, process, ended), daemon=True).start()

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._running.values():
            _signal(process, signal.SIGKILL)

    def _attend(self, pod: Json, process: subprocess.Popen[str], ended: Ended) -> None:
        assert process.stdout is not None
        changed = self._store.clock.changed
        for line in process.stdout:
            with changed:
                self._pods.print(pod, line.rstrip("\n"))
        code = process.wait()
        with changed:
            self._running.pop(pod["metadata"]["uid"], None)
            ended(pod, code if code >= 0 else 128 - code)

    def _end_removed(self, change: Change) -> None:
        process = self._running.get(change.after["metadata"]["uid"])
        if change.kind == PODS and change.type == "DELETED" and process is not None:
            _signal(process, signal.SIGTERM)
            grace = change.after["spec"].get("terminationGracePeriodSeconds", _GRACE_S)
            timer = threading.Timer(grace, _signal, (process, signal.SIGKILL))
            timer.daemon = True
            timer.start()


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _variables(pod: Json, container: Json, port: int) -> dict[str, str]:
    """Return the environment that the image would have, which is this interpreter and the code, and the container's."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    image = {"PATH": path, "HOME": "/tmp", "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}
    # Of sources there are fields only, and of those only the index.
    index = pod["metadata"]["annotations"][INDEX]
    variables = {each["name"]: each.get("value", index) for each in container.get("env", [])}
    return {**image, **variables, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
