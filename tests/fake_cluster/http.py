"""Requests, answers and refusals, and the faults between a client and the server."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

Json = dict[str, Any]
_REASONS = {409: "Conflict", 410: "Expired", 422: "Invalid", 500: "InternalError", 504: "Timeout"}
BEFORE, AFTER = "before", "after"


class ApiError(Exception):
    """A refusal, which each API writes in a form of its own."""

    def __init__(self, code: int, message: str, *, reason: str = "", details: Json | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.details = code, message, details or {}
        self.reason = reason or _REASONS.get(code, HTTPStatus(code).phrase.title().replace(" ", ""))

    def status(self) -> Json:
        """Return it as the Status object of Kubernetes."""
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**status, "message": self.message, "reason": self.reason, "details": self.details, "code": self.code}


@dataclass
class Request:
    """One request; afterwards an entry of `server.requests`."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    time: float
    """Seconds of the server's clock at which it arrived."""
    status: int = 0
    """Of the answer; 0 while there is none, or where the connection was dropped."""

    def object(self) -> Json:
        """Return the body, which must be a JSON object; an empty one if there is no body."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError as error:
            raise ApiError(400, f"couldn't read the request body: {error}") from None
        if not isinstance(value, dict):
            raise ApiError(400, "the object provided is unrecognized (must be of type Object)")
        return value

    def check_query(self, *known: str) -> None:
        """Fail the test if the client uses a query parameter that the fake does not implement."""
        unknown = set(self.query) - set(known)
        if unknown:
            raise NotImplementedError(f"{self.method} {self.path}: query parameters {sorted(unknown)}")


@dataclass
class Answer:
    """A JSON body, or text, or a stream of chunks with which the connection ends."""

    body: Json | str | None = None
    status: int = 200
    stream: Iterator[bytes] | None = None


Route = tuple[str, str, Callable[..., Answer]]
"""Method, path with `{}` for each name in it, and the function called with the request and the names."""


def dispatch(routes: Sequence[Route], request: Request, path: str) -> Answer:
    """Answer a request by the first route that has its method and path; fail the test where none has."""
    for method, template, handler in routes:
        names = re.fullmatch(re.escape(template).replace(r"\{\}", "([^/]+)"), path)
        if names and method == request.method:
            return handler(request, *names.groups())
    raise NotImplementedError(f"{request.method} {request.path}")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong with the requests it matches.

    Attributes:
        method: Such as GET; empty for any.
        path: A regular expression that is searched for in the path and query.
        status: Answer so instead: 429, 500, 503, 401, 409, 410 ...
        retry_after_s: Seconds, as the header Retry-After says.
        effect: With a status: whether the request has its effect all the same.
        drop: Close the connection without an answer, `before` the request has its effect or `after`.
        delay_s: Real seconds before the answer.
        cut_after: Break the connection of a stream after so many bytes; in mid-line if need be.
        skip: How many matching requests pass unharmed first.
        times: How many requests it hits.
        chance: Of the requests that are left, the fraction that it hits.
    """

    method: str = ""
    path: str = ""
    status: int = 0
    retry_after_s: int = 0
    effect: bool = False
    drop: str = ""
    delay_s: float = 0
    cut_after: int | None = None
    skip: int = 0
    times: int = 1
    chance: float = 1.0

    def matches(self, request: Request) -> bool:
        """Tell whether method and path are those of the request."""
        query = "&".join(f"{name}={value}" for name, value in request.query.items())
        return self.method in ("", request.method) and bool(re.search(self.path, f"{request.path}?{query}"))


@dataclass
class Faults:
    """The faults to come, and those that were injected."""

    seed: int = 0
    pending: list[Fault] = field(default_factory=list)
    injected: list[tuple[Fault, Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def add(self, *faults: Fault) -> None:
        """Add faults; the first of them that matches a request hits it."""
        self.pending.extend(faults)

    def clear(self) -> None:
        """Remove those that are still to come."""
        self.pending.clear()

    def next(self, request: Request) -> Fault:
        """Return the fault that hits a request; one that does nothing where there is none."""
        for number, fault in enumerate(self.pending):
            if not fault.matches(request):
                continue
            if fault.skip:
                self.pending[number] = replace(fault, skip=fault.skip - 1)
            elif fault.chance == 1 or self._random.random() < fault.chance:
                self.pending[number : number + 1] = [replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                self.injected.append((fault, request))
                return fault
        return Fault()
