"""How a step reacts to a request to stop while its job runs: it deletes the job, then prints what is left of the run.

Kubeflow leaves about a second between the signal and the end of the process, whatever the pod's grace period is.
"""

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

from components.cluster.failures import condition
from components.cluster.kube import Json, TrainJobs, connect
from components.shared.progress import fitted
from components.shared.work import last_step

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DELETE_TIMEOUT, _POD_TIMEOUT = (0.5, 0.5), (0.2, 0.2)
_TRIES, _RETRY_S = 3, 0.15  # short, because only the first try is sure to fit into that second
_KEEP_ALIVE_S = 15.0
_CONTAINER_LOG = "/proc/1/fd/1"
"""Standard output of the container's first process, which outlives the reader of this process's output."""


class Termination:
    """Handles requests to stop while a job is in the cluster or is being created there.

    It deletes the job, except if this step's own pod is being deleted, or if its node is drained, shuts down or evicts
    the pod. Then another attempt of the step adopts the job, or the job ends with the run.
    """

    def __init__(self, stage: str, namespace: str, name: str, *, pod: tuple[str, str] | None, work: Path) -> None:
        self._stage, self._pod, self._work = stage, pod, work
        self.job_name = name
        # A separate connection: a signal handler must not wait for a lock of the thread that it interrupts.
        self._api = connect()
        self._jobs = TrainJobs(self._api, namespace)
        self._is_over = threading.Event()
        self.is_creating = False
        """Whether a request that creates the job is under way: the job may appear after the first deletion."""
        self.stop_other_requests: Callable[[], None] = lambda: None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle requests to stop while the block runs: delete the job and exit with 128 plus the signal's number."""
        before = {number: signal.signal(number, self._handle_signal) for number in _SIGNALS}
        threading.Thread(target=self._keep_alive, name="connection for termination", daemon=True).start()
        try:
            yield
        finally:
            self._is_over.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._is_pod_disrupted():
            outcome = (
                f"this pod is being deleted: the training job {self.job_name} goes on; "
                "another attempt of this step adopts it, or it ends with the run"
            )
        elif self._delete():
            outcome = f"the training job {self.job_name} is removed"
        else:
            outcome = f"the training job {self.job_name} could not be removed; the reaper will remove it"
        step = last_step(self._work)
        if step is None:
            checkpoint = "there is no checkpoint yet, unless ranks write one as they end"
        else:
            newest = f"the checkpoint of step {step}, or from one that ranks write as they end"
            checkpoint = f"the next run resumes from {newest}"
        self._print(f"stopped by {signal.Signals(number).name}: {outcome}", checkpoint)
        raise SystemExit(128 + number)

    def _print(self, *lines: str) -> None:
        """Print without buffers or locks; to the container's log if Kubeflow's launcher no longer reads our output."""
        text = "".join(fitted(f"{self._stage}: {line}\n") for line in lines).encode()
        try:
            os.write(1, text)
        except OSError:
            with suppress(OSError):
                log = os.open(_CONTAINER_LOG, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
                os.write(log, text)
                os.close(log)

    def _is_pod_disrupted(self) -> bool:
        """Tell whether this step's pod is being deleted or evicted, as it is not when a user stops the run."""
        pod: Json | None = None
        if self._pod is not None:
            namespace, name = self._pod
            with suppress(client.ApiException, HTTPError):
                pod = TrainJobs(self._api, namespace).pod(name, _POD_TIMEOUT)
        if pod is None:
            return False
        # A kubelet that evicts a pod, or shuts down with its node, sets a condition but does not delete the pod.
        return "deletionTimestamp" in pod["metadata"] or condition(pod, "DisruptionTarget")["status"] == "True"

    def _delete(self) -> bool:
        """Delete the job, again after a failure or while a request may create it; return whether that succeeded."""
        for attempt in range(_TRIES):
            is_deleted = False
            with suppress(client.ApiException, HTTPError):
                self._jobs.delete(self.job_name, timeout=_DELETE_TIMEOUT)
                is_deleted = True
            if attempt == 0:  # not earlier, because nothing may delay the first try
                self.stop_other_requests()
            if is_deleted and not self.is_creating:
                break
            time.sleep(_RETRY_S)
        return is_deleted

    def _keep_alive(self) -> None:
        """Use the connection regularly, so that the signal handler need not open one."""
        while True:
            with suppress(client.ApiException, HTTPError):
                self._jobs.get(self.job_name)
            if self._is_over.wait(_KEEP_ALIVE_S):
                return
