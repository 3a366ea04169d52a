"""One process of a job: `python -m components.cluster.rank FOLDER`, as torchrun starts it on any host."""

import os
import sys
import traceback
from pathlib import Path

from components.cluster.job import Job
from components.cluster.tether import die_with_parent
from components.shared.environment import TERMINAL_VARIABLE
from components.shared.errors import PipelineError
from components.shared.system_errors import explain_out_of_memory


def run_rank(job: Job, rank: int) -> int:
    """Make the job's call and keep its outcome; return the exit code."""
    try:
        _require_all(job)
        with explain_out_of_memory("this stage"):
            result = job.call()
    except PipelineError as error:
        job.write_outcome(rank, {"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except OSError as error:
        job.write_outcome(rank, {"error": str(error), "errno": error.errno, "file": _name(error), "exit_code": 1})
        traceback.print_exc()
        return 1
    except Exception as error:
        traceback.print_exc()
        job.write_outcome(rank, {"error": f"{type(error).__name__}: {error}", "exit_code": 1})
        return 1
    job.write_outcome(rank, {"result": result, "exit_code": 0})
    return 0


def _require_all(job: Job) -> None:
    """Refuse to run as one of another number of processes: what is computed would look right and be wrong."""
    size = int(os.environ["WORLD_SIZE"])
    if size != job.num_processes:
        raise PipelineError(f"the job is for {job.num_processes} processes, but {size} were launched (WORLD_SIZE)")


def _name(error: OSError) -> str | None:
    return None if error.filename is None else str(error.filename)


def _talk_to(log: Path) -> None:
    """Send everything that this process prints to a file: only the first rank talks to the person."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.environ.pop(TERMINAL_VARIABLE, None)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]) if sys.argv[2:] else os.getppid())
    this = Job.read(Path(sys.argv[1]))
    number = int(os.environ["RANK"])
    this.begin(number)
    if number:
        _talk_to(this.log(number))
    exit_code = run_rank(this, number)
    sys.stdout.flush()
    sys.stderr.flush()
    # No finalisation: a collective that another process has left would be waited for.
    os._exit(exit_code)
