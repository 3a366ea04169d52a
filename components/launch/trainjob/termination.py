"""The end of a step that is told to stop: its job is deleted before anything else.

Kubeflow leaves about a second between the signal and the end of the process, whatever the pod's grace period says.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.launch import names
from components.launch.api import connect

_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TIMEOUT_S = 0.5
_TRIES = 3
_BETWEEN_S = 0.15
_WARM_S = 15.0


class Termination:
    """What a request to stop does while a job is in the cluster, or on its way there.

    The connection is its own, and kept open: a handler must not wait for a lock that its own thread holds.
    """

    def __init__(self, namespace: str, name: str) -> None:
        self._job = (names.GROUP, names.VERSION, namespace, names.PLURAL, name)
        self._custom = client.CustomObjectsApi(connect())
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
        self._delete_surely()
        raise SystemExit(128 + number)

    def _delete_surely(self) -> None:
        for turn in range(_TRIES):
            done = self._delete()
            if turn == 0:
                self.silence()
            if done and not self.is_creating:
                return
            time.sleep(_BETWEEN_S)

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
