"""Errors for people: one line each, with the exit code that says what to do next.

Failed allocations and full disks are recognised by the numbers and texts of errors: torch is not imported here.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# A network or a shared file system failed: a retry may succeed.
_TRANSIENT_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH),
}
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NUMBER_IN_TEXT = re.compile(r"(?:\(os error |\[Errno )(\d+)")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can(?:no|')t allocate memory|not enough memory|std::bad_alloc|_ALLOC_FAILED"
    # vLLM's messages when its share of the memory is too small.
    r"|No available memory for the cache|larger than the available KV cache|less than desired GPU memory utilization",
    re.IGNORECASE,
)
_MEMORY_ERROR = re.compile(rf"Error: [^\n]*?(?:{_OUT_OF_MEMORY.pattern})[^\n]*", re.IGNORECASE)
_BYTES = re.compile(r"tried to allocate (\d+) bytes")
_AMOUNT = re.compile(r"(?:Tried|Unable) to allocate ([\d.]+ [KMGTPE]?i?B)|([\d.]+ GiB) KV cache is needed")
_FREE = re.compile(r"GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


class PipelineError(Exception):
    """Bad configuration, data or environment: correct what the message names, then run again."""

    exit_code = 2
    keeps_outputs = False
    """True if the stage has done all its work and the error is its verdict."""


class DataRejectedError(PipelineError):
    """The data did not pass validation; the validation report names the rows."""

    keeps_outputs = True


class GateMissedError(PipelineError):
    """The model did not pass the promotion gate; nothing was registered."""

    exit_code = 3


class RetryableError(PipelineError):
    """A temporary failure (a lost peer, a preemption, I/O): run the same again."""

    exit_code = 75
    is_final = False
    """True if this process should not retry: a stop was requested, or retries are exhausted."""


class StoppedError(RetryableError):
    """A stop was requested; the same run resumes from its last checkpoint."""

    is_final = True


class RetriesExhaustedError(RetryableError):
    """A temporary failure after the last retry, or after the longest wait, that the settings allow."""

    is_final = True


class NotEnoughMemoryError(PipelineError):
    """The memory of the host or of a GPU is too small for the config."""


def raise_all(problems: Sequence[str], note: str = "") -> None:
    """Raise one PipelineError with a line for each problem, and the note; do nothing without a problem."""
    if problems:
        heading = f"{len(problems)} problems to correct before this run can start" if len(problems) > 1 else ""
        raise PipelineError("\n".join(filter(None, [heading, *problems, note])))


def explain(error: Exception) -> PipelineError | None:
    """Return `error` as an error for people if it is one or comes from the operating system; None for a bug."""
    if isinstance(error, PipelineError):
        return error
    if is_failed_allocation(error):
        return NotEnoughMemoryError(out_of_memory_message(_amount(str(error)), "this stage"))
    number = _errno(error)
    if number is None:
        return None
    path = _path(error, number)
    where = f"{path}: " if path else ""
    kind = RetryableError if number in _TRANSIENT_ERRNOS else PipelineError
    return kind(f"{where}{os.strerror(number).lower()}")


@contextmanager
def explain_out_of_memory(purpose: str, *remedies: str) -> Iterator[None]:
    """Turn a failed allocation in the block into NotEnoughMemoryError, with its purpose and remedies."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PipelineError) or not is_failed_allocation(error):
            raise
        raise NotEnoughMemoryError(out_of_memory_message(_amount(str(error)), purpose, *remedies)) from error


def is_failed_allocation(error: BaseException) -> bool:
    """Return whether an error means that memory of the host or of a GPU could not be allocated."""
    # An error may end with a log; only its first line is the message.
    first_line = str(error).strip().partition("\n")[0]
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _errno(error) == errno.ENOMEM
        or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(first_line) is not None)
    )


def out_of_memory_in_log(text: str) -> str | None:
    """Return the `_amount` of the first failed allocation in the output of a process; None if there is none."""
    line = _MEMORY_ERROR.search(text)
    return _amount(line[0]) if line else None


def out_of_memory_message(amount: str, purpose: str, *remedies: str) -> str:
    """Return the message about a failed allocation."""
    message = f"not enough memory for {purpose}: {amount}" if amount else f"not enough memory for {purpose}"
    return f"{message}; {', or '.join(remedies)}" if remedies else message


def _amount(text: str) -> str:
    """Return what the message of a failed allocation says about the memory requested and free; empty for nothing."""
    exact, rounded, free = _BYTES.search(text), _AMOUNT.search(text), _FREE.search(text)
    amount = ""
    if exact:
        amount = f"tried to allocate another {int(exact[1]) / 2**30:,.1f} GiB"
    elif rounded:
        amount = f"tried to allocate another {rounded[1] or rounded[2]}"
    return f"{amount}, {free[3]} of {free[2]} are free on GPU {free[1]}" if free else amount


def raise_if_disk_is_full(error: Exception, path: Path, usage: str) -> None:
    """Raise PipelineError if the error is a full disk; `usage` is a phrase on the bytes written or needed."""
    number = _errno(error)
    if number in _FULL_ERRNOS:
        existing = next(each for each in (path, *path.parents) if each.exists())
        free = shutil.disk_usage(existing).free
        reason = f"{path}: {os.strerror(number).lower()}"
        raise PipelineError(f"{reason}: {usage}, {free:,} are free; make room and run again") from error


def _path(error: BaseException, number: int) -> str | None:
    """Return the file of an error of the operating system; for a copy to a full disk, the destination."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of copytree: (source, target, reason)
        return str(error.args[0][0][1])
    if not isinstance(error, OSError):
        return None
    path: str | None = error.filename2 if number in _FULL_ERRNOS and error.filename2 else error.filename
    return path


def _errno(error: BaseException) -> int | None:
    """Return the error number of the operating system; None for any other error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    # Exceptions of Rust libraries (safetensors, tokenizers) and shutil have the error number in their text.
    number = _NUMBER_IN_TEXT.search(str(error))
    return int(number[1]) if number else None
