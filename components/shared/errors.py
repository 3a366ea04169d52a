"""Errors that people read: one line each, with the exit code that says what to do next."""

from collections.abc import Sequence


class PipelineError(Exception):
    """Bad configuration, data or environment: correct what the message names, then run again."""

    exit_code = 2
    keeps_outputs = False
    """True where the stage has done all its work and the error is its verdict."""


class DataRejectedError(PipelineError):
    """The data do not pass validation; the validation report names the rows."""

    keeps_outputs = True


class GateMissedError(PipelineError):
    """The model did not pass the promotion gate; nothing was registered."""

    exit_code = 3


class UnchangedRunError(PipelineError):
    """The run would reproduce the newest registered version, and was asked to stop then; nothing was done."""

    exit_code = 4


class RetryableError(PipelineError):
    """Nothing is wrong with the inputs (a lost peer, a preemption, I/O): run the same again."""

    exit_code = 75
    is_final = False
    """True where the same process should not retry: a stop was requested, or retries are exhausted."""


class StoppedError(RetryableError):
    """A stop was requested; the same run resumes from its last checkpoint."""

    is_final = True


class RetriesExhaustedError(RetryableError):
    """It may work another time, but retries or the time to wait that the settings allow are used up."""

    is_final = True


def raise_all(problems: Sequence[str]) -> None:
    """Raise one PipelineError with a line for each problem; do nothing where there is none."""
    if len(problems) == 1:
        raise PipelineError(problems[0])
    if problems:
        raise PipelineError("\n".join([f"{len(problems)} to correct before this run can start", *problems]))
