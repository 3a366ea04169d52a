"""The error of a job, from what its ranks have left behind."""

import os
import signal
from collections.abc import Mapping

from components.cluster.job import Job
from components.shared.errors import PipelineError, RetryableError

_LINES_SHOWN = 20


class SilentEndError(RetryableError):
    """A rank has ended without a word."""


def error_of_ranks(job: Job) -> Exception | None:
    """Return the error that ended the job: of what several ranks say, that which is not about the loss of another.

    None where none of them has failed, as far as they or their launchers have told.
    """
    outcomes = {rank: job.outcome(rank) for rank in range(job.num_processes)}
    said = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and "error" in outcome}
    for rank, outcome in said.items():
        if outcome["exit_code"] != RetryableError.exit_code:
            return _as_error(job, rank, outcome)
    for rank, code in list(job.ended().items())[:1]:
        if rank not in said:
            return SilentEndError(f"{_ending(rank, code)}; run the same again to go on from the last checkpoint")
        return RetryableError(said[rank]["error"])
    for outcome in said.values():
        return RetryableError(outcome["error"])
    return None


def _as_error(job: Job, rank: int, outcome: Mapping[str, str | int]) -> Exception:
    message = str(outcome["error"])
    if outcome.get("errno") is not None:
        return OSError(outcome["errno"], os.strerror(int(outcome["errno"])), outcome["file"])
    if outcome["exit_code"] == PipelineError.exit_code:
        return PipelineError(message)
    if rank == 0:
        return RuntimeError(f"rank 0: {message}")
    lines = job.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]
    return RuntimeError("\n".join([f"rank {rank}: {message}", *lines]))


def _ending(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} ended with exit code {code} without reporting an error"
