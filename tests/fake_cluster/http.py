"""Requests and answers, as the parts of the server hand them to one another."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fake_cluster.errors import ApiError, Json


@dataclass
class Request:
    """One request; afterwards a line of `server.requests`."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    time: float
    """When it came, in seconds of the server's clock."""
    arrived: float
    """When it came, as `time.monotonic()` of this process says."""
    status: int = 0
    """The answer's; 0 while there is none, or where the connection was dropped."""
    user: str = ""

    def json(self) -> Any:
        """The body; None if there is none.

        Raises:
            ApiError: It is not JSON.
        """
        try:
            return json.loads(self.body) if self.body else None
        except ValueError as error:
            raise ApiError(400, f"couldn't read the request body: {error}") from None

    def object(self) -> Json:
        """The body as an object.

        Raises:
            ApiError: It is something else.
        """
        value = self.json()
        if not isinstance(value, dict):
            raise ApiError(400, "the object provided is unrecognized (must be of type Object)")
        return value

    def flag(self, name: str) -> bool:
        """A query parameter that is yes or no."""
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass
class Answer:
    """What goes back: a JSON body, or a stream of lines."""

    body: Json | str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    stream: Iterator[bytes] | None = None
    """Chunks as they come. The connection ends with it."""


Handler = Callable[[Request], Answer]
