"""What goes wrong between client and server: by script, or at random with a seed."""

import random
import re
from dataclasses import dataclass, field, replace

from tests.fake_cluster.http import Request

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong with the requests it matches.

    Attributes:
        method: Such as GET; empty for any.
        path: A regular expression that is searched for in the path and query.
        status: Answer so instead: 429, 500, 503, 401, 409, 410 ...
        retry_after_s: Seconds, as the header Retry-After says.
        effect: With a status: whether the server has done what was asked all the same.
        drop: Close the connection without an answer, `before` the request has its effect or `after`.
        delay_s: Real seconds before the answer.
        cut_after: Break the connection of a stream after so many bytes; in mid-line if need be.
        ends_after: End a stream after so many bytes in good order, as servers do with watches at any time.
        skip: How many matching requests pass unharmed first.
        times: How many requests it befalls.
        chance: Of those that are left, the fraction that it befalls.
    """

    method: str = ""
    path: str = ""
    status: int = 0
    retry_after_s: int = 0
    effect: bool = False
    drop: str = ""
    delay_s: float = 0
    cut_after: int | None = None
    ends_after: int | None = None
    skip: int = 0
    times: int = 1
    chance: float = 1.0

    def matches(self, request: Request) -> bool:
        """Whether it is about this request; its own counts aside."""
        query = "&".join(f"{name}={value}" for name, value in request.query.items())
        return self.method in ("", request.method) and bool(re.search(self.path, f"{request.path}?{query}"))


@dataclass
class Faults:
    """The faults that are still to come."""

    seed: int = 0
    pending: list[Fault] = field(default_factory=list)
    injected: list[tuple[Fault, Request]] = field(default_factory=list)
    """What has gone wrong so far."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def add(self, *faults: Fault) -> None:
        """Have these happen, the first of them that matches a request."""
        self.pending.extend(faults)

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self.pending.clear()

    def befalls(self, request: Request) -> Fault | None:
        """What goes wrong with a request."""
        for number, fault in enumerate(self.pending):
            if not fault.matches(request):
                continue
            if fault.skip:
                self.pending[number] = replace(fault, skip=fault.skip - 1)
                continue
            if fault.chance < 1 and self._random.random() >= fault.chance:
                continue
            if fault.times > 1:
                self.pending[number] = replace(fault, times=fault.times - 1)
            else:
                del self.pending[number]
            self.injected.append((fault, request))
            return fault
        return None
