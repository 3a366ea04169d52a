"""Requests, answers and refusals, and the faults between a client and the server."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

Json = dict[str, Any]
BEFORE, AFTER = "before", "after"


class ApiError(Exception):
    """A refusal, which each API writes in another form."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    def status(self) -> Json:
        """Return it as the Status object of Kubernetes."""
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**status, "message": self.message, "code": self.code}


@dataclass
class Request:
    """One request, with headers in lower case; afterwards an entry of `server.requests`."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    time: float
    """Seconds of the server's clock at which it arrived."""
    status: int = 0
    """Status of the answer; 0 before it, or where the connection was dropped."""

    def object(self) -> Json:
        """Return the body, a JSON object; an empty one if there is no body."""
        value: Json = json.loads(self.body or b"{}")
        return value

    def upload(self, field: str) -> tuple[str, str]:
        """Return name and text of the file in a field of a form."""
        head = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode()
        (part,) = BytesParser(policy=HTTP).parsebytes(head + self.body).iter_parts()
        disposition = part["content-disposition"]
        assert disposition.params["name"] == field
        return str(disposition.params["filename"]), part.get_content()

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
    """One thing that goes wrong with the requests it matches."""

    method: str = ""
    path: str = ""
    """A regular expression that is searched for in the path and query."""
    status: int = 0
    """Status of the answer instead, with the message."""
    message: str = "injected fault"
    retry_after_s: int = 0
    drop: str = ""
    """Close the connection without an answer, `before` the request has its effect or `after`."""
    delay_s: float = 0
    cut_after: int | None = None
    """Bytes after which the connection of a stream breaks; in mid-line if need be."""
    skip: int = 0
    """Matching requests that pass unharmed first."""
    times: int = 1
    """Requests that it hits."""


class Faults:
    """The faults to come, and those that were injected."""

    def __init__(self) -> None:
        self.pending: list[Fault] = []
        self.injected: list[Fault] = []

    def add(self, *faults: Fault) -> None:
        """Add faults; the first of them that matches a request hits it."""
        self.pending.extend(faults)

    def clear(self) -> None:
        """Remove those that are still to come."""
        self.pending.clear()

    def next(self, request: Request) -> Fault:
        """Return the fault that hits a request; without any, one that does nothing."""
        address = f"{request.path}?{'&'.join(f'{name}={value}' for name, value in request.query.items())}"
        for number, fault in enumerate(self.pending):
            if fault.method not in ("", request.method) or not re.search(fault.path, address):
                continue
            if fault.skip:
                self.pending[number] = replace(fault, skip=fault.skip - 1)
            else:
                self.pending[number : number + 1] = [replace(fault, times=fault.times - 1)] if fault.times > 1 else []
                self.injected.append(fault)
                return fault
        return Fault()
