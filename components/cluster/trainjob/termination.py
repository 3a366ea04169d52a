"""The end of a step that is told to stop: its job is deleted before anything else, and then its log says so.

Kubeflow leaves about a second between the signal and the end of the process, whatever the pod's grace period says.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import names
from components.cluster.api import connect
from components.cluster.trainjob.manifest import STALE_AFTER_S
from components.shared import checkpoints

_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TIMEOUT_S = 0.5
_POD_TIMEOUT_S = 0.2
_TRIES = 3
_BETWEEN_S = 0.15
_WARM_S = 15.0
_CONTAINER_LOG = "/proc/1/fd/1"
"""Standard output of the container's first process, which outlives the one that reads this process's output."""


class Termination:
    """What a request to stop does while a job is in the cluster, or on its way there.

    The job goes, unless this step's own pod is being deleted: its node is drained, and another attempt of the step is
    likely to adopt the job. Where none does, the reaper removes it.

    The connection is its own, and kept open: a handler must not wait for a lock that its own thread holds.
    """

    def __init__(self, stage: str, namespace: str, name: str, *, pod: tuple[str, str] | None, work: Path) -> None:
        self._stage, self._name, self._work = stage, name, work
        self._job = (names.GROUP, names.VERSION, namespace, names.PLURAL, name)
        self._pod = pod
        """Namespace and name."""
        api = connect()
        self._custom, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)
        self._over = threading.Event()
        self.is_creating = False
        """Whether a call is under way that makes the job: it may have its effect after the first deletion."""
        self.silence: Callable[[], None] = lambda: None
        """Has all others stop talking to the cluster."""

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Handle requests to stop while the block runs: SystemExit with 128 and the signal, the job being deleted."""
        before = {number: signal.signal(number, self._stop) for number in _REQUESTS}
        threading.Thread(target=self._keep_warm, name="connection for the end", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if self._over.is_set():
            return
        self._over.set()
        if self._is_pod_deleted():
            after = f"the reaper removes it {STALE_AFTER_S:g} s from now or later, if no other attempt has adopted it"
            outcome = f"this pod is being deleted: the training job {self._name} goes on, and {after}"
        elif self._delete_surely():
            outcome = f"the training job {self._name} is removed"
        else:
            outcome = f"the training job {self._name} could not be removed, which is left to clean_up and the reaper"
        self._tell(f"stopped by {signal.Signals(number).name}: {outcome}", self._kept())
        raise SystemExit(128 + number)

    def _kept(self) -> str:
        """What there is to go on from."""
        step = checkpoints.last_step(self._work)
        if step is None:
            return "no checkpoint is kept yet, except for one that the ranks write as they end"
        return f"the checkpoint of step {step} is kept, or a later one that the ranks write as they end"

    def _tell(self, *lines: str) -> None:
        """Print lines, past all buffers and locks: this is a signal handler.

        Kubeflow's launcher, which passes output on, ends by the same signal: then they go to the container's log.
        """
        text = "".join(f"{self._stage}: {line}\n" for line in lines).encode()
        try:
            os.write(1, text)
        except OSError:
            with suppress(OSError):
                log = os.open(_CONTAINER_LOG, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
                os.write(log, text)
                os.close(log)

    def _is_pod_deleted(self) -> bool:
        """Tell whether this step's pod is on its way out of the cluster; not where the run is ended or out of time."""
        if self._pod is None:
            return False
        namespace, name = self._pod
        timeouts = (_POD_TIMEOUT_S, _POD_TIMEOUT_S)
        try:
            response = self._core.list_namespaced_pod(
                namespace, field_selector=f"metadata.name={name}", _request_timeout=timeouts, _preload_content=False
            )
        except (client.ApiException, HTTPError):
            return False
        return any("deletionTimestamp" in pod["metadata"] for pod in json.loads(response.data)["items"])

    def _delete_surely(self) -> bool:
        """Delete the job; return whether it is gone or going."""
        done = False
        for turn in range(_TRIES):
            done = self._delete()
            if turn == 0:
                self.silence()
            if done and not self.is_creating:
                break
            time.sleep(_BETWEEN_S)
        return done

    def _delete(self) -> bool:
        """Ask for the deletion; return whether the job is gone or going."""
        options = client.V1DeleteOptions(propagation_policy="Background")
        try:
            # As a pair: this client leaves out a single number that is no integer, and would wait for ever.
            timeouts = (_TIMEOUT_S, _TIMEOUT_S)
            self._custom.delete_namespaced_custom_object(*self._job, body=options, _request_timeout=timeouts)
        except client.ApiException as error:
            return bool(error.status == 404)
        except HTTPError:
            return False
        return True

    def _keep_warm(self) -> None:
        while True:
            with suppress(client.ApiException, HTTPError):
                self._custom.get_namespaced_custom_object(*self._job)
            if self._over.wait(_WARM_S):
                return
