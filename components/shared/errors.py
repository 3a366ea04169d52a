"""The errors a person is meant to read: one line each, with the exit code that says what to do next."""

from collections.abc import Sequence


class PipelineError(Exception):
    """Bad configuration, data or environment: correct what the message names, then run again."""

    exit_code = 2
    keeps_outputs = False
    """True where the stage did all its work and this is its verdict: its outputs are kept."""


class DataRejectedError(PipelineError):
    """The data do not pass validation; the validation report says which rows."""

    keeps_outputs = True


class GateMissedError(PipelineError):
    """The model did not clear the promotion gate; nothing was registered."""

    exit_code = 3


class UnchangedRunError(PipelineError):
    """A run would make anew what is registered already, and was told to end then; nothing was done."""

    exit_code = 4


class RetryableError(PipelineError):
    """Nothing is wrong with the inputs (a lost peer, a preemption, I/O): run the same thing again."""

    exit_code = 75
    is_final = False
    """True where the same process is not to try again: it was told to stop, or has tried often enough."""


class StoppedError(RetryableError):
    """The run was told to stop; the same run goes on from its last checkpoint."""

    is_final = True


class RetriesExhaustedError(RetryableError):
    """It may work another time, but was tried as often, or waited for as long, as the settings allow."""

    is_final = True


def raise_all(problems: Sequence[str]) -> None:
    """Raise one PipelineError that names every problem, a line each; do nothing where there is none."""
    if len(problems) == 1:
        raise PipelineError(problems[0])
    if problems:
        raise PipelineError("\n".join([f"{len(problems)} to correct before this run can start", *problems]))
