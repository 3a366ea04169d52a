"""The interface of a service that the workers of a pool run."""

import errno
from typing import Any


class Service:
    """Answers requests, each on its own or as a turn of a session with a state; requests and replies are JSON.

    The fork server builds it once, before it forks workers. Sessions must be deterministic: if a worker is lost,
    another one begins its sessions again and replays their past requests.
    """

    def begin(self, start: Any) -> Any:
        """Return the state of a session."""

    def answer(self, state: Any, request: Any) -> Any:
        """Return the reply to a request; the state of one without a session is None. An error ends the session."""
        raise NotImplementedError

    def end(self, state: Any) -> None:
        """Free what a session holds."""

    def described(self, error: BaseException) -> str:
        """Return how an answer failed; the text must not depend on the process."""
        return f"raised {type(error).__name__}: {error}"

    def is_used_up(self) -> bool:
        """Tell whether this process should answer no other request."""
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the process has no memory left."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
