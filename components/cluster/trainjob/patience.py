"""Calls of the API server, made again until it answers or patience is over: it is restarted, upgraded and busy."""

import json
from collections.abc import Callable
from typing import TypeVar

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster.clock import Clock
from components.shared.errors import PipelineError, RetryableError

_PATIENCE_S = 900.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_PASSING = {401, 408, 409, 410, 429, 500, 502, 503, 504}
"""Answers that may be others the next time: a token that is being replaced, a lost race, a busy server."""
_PASSING_WORDS = ("context deadline exceeded", "failed calling webhook", "failed to call webhook")
"""Said of a webhook that did not answer in time, also by one that denies a request because it waited itself."""
_Answer = TypeVar("_Answer")


class UnansweredError(RetryableError):
    """The API server has not done in time what it was asked for; what it was asked about is as it was."""


class Patience:
    """Asks again where the answer may be another the next time, by default for a quarter of an hour."""

    def __init__(self, clock: Clock, patience_s: float = _PATIENCE_S) -> None:
        self._clock, self._patience_s = clock, patience_s

    def ask(self, what: str, call: Callable[[], _Answer]) -> _Answer:
        """Return the answer; `what` says in an error what was to be done.

        Raises:
            UnansweredError: There was none in time.
            PipelineError: The API server refuses.
        """
        began, pause = self._clock.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except (client.ApiException, HTTPError) as error:
                if not is_passing(error):
                    raise PipelineError(f"the cluster refuses to {what}: {reason(error)}") from None
                left = self._patience_s - (self._clock.monotonic() - began)
                if left <= 0:
                    said = f"the API server did not {what} within {self._patience_s:g} s: {reason(error)}"
                    raise UnansweredError(said) from None
                self._clock.sleep(min(_retry_after_s(error) or pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)


def is_passing(error: client.ApiException | HTTPError) -> bool:
    """Tell whether the same call may be answered the next time."""
    if isinstance(error, HTTPError) or error.status in _PASSING:
        return True
    return any(words in reason(error) for words in _PASSING_WORDS)


def reason(error: client.ApiException | HTTPError) -> str:
    """Return in one line why a call failed."""
    if isinstance(error, HTTPError):
        return str(error).split("\n", 1)[0]
    try:
        said = json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        said = error.reason
    return f"{said} ({error.status})"


def _retry_after_s(error: client.ApiException | HTTPError) -> float | None:
    headers = getattr(error, "headers", None) or {}
    wait: str = headers.get("Retry-After", "")
    return min(float(wait), _LONGEST_PAUSE_S) if wait.isdigit() else None
