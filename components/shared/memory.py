"""Memory that could not be had, told in one line: what for, how much, and which keys lower it.

Recognised by what the errors say of themselves: nothing of torch is imported here.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from components.shared import durable
from components.shared.errors import PipelineError

_REFUSED = re.compile(
    r"out of memory|can(?:no|')t allocate memory|not enough memory|std::bad_alloc|_ALLOC_FAILED"
    # What vLLM says where the memory that it was given does not do.
    r"|No available memory for the cache|larger than the available KV cache|less than desired GPU memory utilization",
    re.IGNORECASE,
)
_RAISED = re.compile(rf"Error: [^\n]*?(?:{_REFUSED.pattern})[^\n]*", re.IGNORECASE)
_BYTES = re.compile(r"tried to allocate (\d+) bytes")
_AMOUNT = re.compile(r"(?:Tried|Unable) to allocate ([\d.]+ [KMGTPE]?i?B)|([\d.]+ GiB) KV cache is needed")
_FREE = re.compile(r"GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class NotEnoughMemoryError(PipelineError):
    """The memory of the host or of a GPU is not enough for the config."""


@contextmanager
def memory_for(purpose: str, *remedies: str) -> Iterator[None]:
    """Have a failed allocation in the block raise NotEnoughMemoryError, which says what for and what helps."""
    try:
        yield
    except Exception as error:
        refused = refused_memory(error)
        if refused is None or isinstance(error, PipelineError):
            raise
        raise NotEnoughMemoryError(described(refused, purpose, *remedies)) from error


def refused_memory(error: BaseException) -> str | None:
    """Return how much memory was refused, as far as the error says, or None for any other error."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not known and isinstance(error, Exception):
        known = durable.errno_of(error) == errno.ENOMEM
    if not known and isinstance(error, RuntimeError):
        # Of an error with the end of a log below it, the first line alone says what it is.
        known = _REFUSED.search(str(error).strip().partition("\n")[0]) is not None
    return _amount(str(error)) if known else None


def refused_in(text: str) -> str | None:
    """Return how much memory was refused to a process, by what it printed, or None where it was not about memory."""
    found = _RAISED.search(text)
    return _amount(found[0]) if found else None


def described(refused: str, purpose: str, *remedies: str) -> str:
    """Return the line about memory that was refused."""
    asked = f": {refused}" if refused else ""
    return f"not enough memory for {purpose}{asked}" + (f"; {', or '.join(remedies)}" if remedies else "")


def _amount(text: str) -> str:
    exact, amount, free = _BYTES.search(text), _AMOUNT.search(text), _FREE.search(text)
    needed = _in_units(int(exact[1])) if exact else (amount[1] or amount[2]) if amount else ""
    asked = f"tried to allocate another {needed}" if needed else ""
    return asked + (f", {free[3]} of {free[2]} are free on GPU {free[1]}" if free else "")


def _in_units(num_bytes: float) -> str:
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} {_UNITS[-1]}"
