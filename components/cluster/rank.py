"""One rank of a job: `python -m components.cluster.rank FOLDER PARENT`, as torchrun's launcher starts it."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from components.cluster.job import Job
from components.cluster.watchdog import die_with_parent
from components.shared.environment import TERMINAL_VARIABLE
from components.shared.errors import PipelineError, explain_out_of_memory


def run_rank(job: Job, rank: int) -> int:
    """Make the job's call and write its outcome; return the exit code."""
    outcome: dict[str, Any]
    try:
        _check_world_size(job)
        with explain_out_of_memory("this stage"):
            outcome = {"result": job.call(), "exit_code": 0}
    except PipelineError as error:
        outcome = {"error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        traceback.print_exc()
        file = None if error.filename is None else str(error.filename)
        outcome = {"error": str(error), "errno": error.errno, "file": file, "exit_code": 1}
    except Exception as error:
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}", "exit_code": 1}
    job.write_outcome(rank, outcome)
    exit_code: int = outcome["exit_code"]
    return exit_code


def _check_world_size(job: Job) -> None:
    """Refuse to run as one of another number of processes: the results would look right and be wrong."""
    size = int(os.environ["WORLD_SIZE"])
    if size != job.num_processes:
        raise PipelineError(f"the job is for {job.num_processes} processes, but {size} were launched (WORLD_SIZE)")


def _redirect_output(log: Path) -> None:
    """Send everything that this process prints to a file: only the first rank prints for the user."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.environ.pop(TERMINAL_VARIABLE, None)


def main() -> None:
    """Run this rank, and end without finalisation, which would wait for collectives that other ranks have left."""
    die_with_parent(int(sys.argv[2]))
    job, rank = Job.read(Path(sys.argv[1])), int(os.environ["RANK"])
    job.start_rank(rank)
    if rank:
        _redirect_output(job.log(rank))
    exit_code = run_rank(job, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
