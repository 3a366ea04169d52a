"""What the system refused, in one line: memory, disk space, files.

Recognised by what errors say: nothing of torch is imported here.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from components.shared.durable import size
from components.shared.errors import PipelineError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""How a disk, a quota or a limit says that no more can be written."""
TRANSIENT_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
"""What a network or a shared file system answers when the same may well work the next time."""
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
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
def explain_out_of_memory(purpose: str, *remedies: str) -> Iterator[None]:
    """Have a failed allocation in the block raise NotEnoughMemoryError, which says what for and what helps."""
    try:
        yield
    except Exception as error:
        refused = out_of_memory(error)
        if refused is None or isinstance(error, PipelineError):
            raise
        raise NotEnoughMemoryError(out_of_memory_message(refused, purpose, *remedies)) from error


def out_of_memory(error: BaseException) -> str | None:
    """Return how much memory was refused, as far as the error says, or None for any other error."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not known and isinstance(error, Exception):
        known = errno_of(error) == errno.ENOMEM
    if not known and isinstance(error, RuntimeError):
        # Of an error with the end of a log below it, the first line alone says what it is.
        known = _REFUSED.search(str(error).strip().partition("\n")[0]) is not None
    return _amount(str(error)) if known else None


def out_of_memory_in_log(text: str) -> str | None:
    """Return how much memory was refused to a process, by what it printed, or None where it was not about memory."""
    found = _RAISED.search(text)
    return _amount(found[0]) if found else None


def out_of_memory_message(refused: str, purpose: str, *remedies: str) -> str:
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


def full_disk(error: Exception, folders: Sequence[Path]) -> str | None:
    """Return what is full, and how much room there is and was taken; None where an error is about something else.

    `folders` are those that were being filled: of these the fullest is named where the system does not say which file.
    """
    number = errno_of(error)
    if number not in NO_ROOM:
        return None
    free = {folder: shutil.disk_usage(folder).free for folder in folders if folder.is_dir()}
    fullest = min(free, key=lambda folder: free[folder])
    name = getattr(error, "filename", None)
    return (
        f"{name or fullest}: {os.strerror(number).lower()}: {size(fullest):,} bytes are in {fullest} so far, "
        f"{free[fullest]:,} are free; make room and run again"
    )


def errno_of(error: Exception) -> int | None:
    """Return the number of what the operating system refused; None for any other error, which is a bug."""
    if isinstance(error, OSError):
        return error.errno
    # Libraries in Rust (safetensors, tokenizers) raise exceptions of their own that carry the error as text.
    wrapped = _RUST_OS_ERROR.search(str(error))
    return int(wrapped[1]) if wrapped else None
