"""One rank of a job: `python -m components.cluster.rank FOLDER PARENT`, as torchrun's launcher starts it."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from components.cluster.job import Job
from components.shared.errors import PipelineError, explain_out_of_memory
from components.shared.execution import current_environment, current_place
from components.shared.watchdog import die_with_parent


def main() -> None:
    """Run this rank and exit at once: Python's finalisation would wait for collectives that other ranks have left."""
    die_with_parent(int(sys.argv[2]))
    current_environment()  # cached before anything changes it
    job, rank = Job.read(Path(sys.argv[1])), int(os.environ["RANK"])
    job.clear_rank(rank)
    if rank:  # only the first rank prints for the user
        log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
    outcome = _outcome(job)
    job.write_outcome(rank, outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome["exit_code"])


def _outcome(job: Job) -> dict[str, Any]:
    """Call the job's function; return its result, or its error as `failures.error_of_ranks` reads it."""
    try:
        size = int(os.environ["WORLD_SIZE"])
        if size != job.num_processes:  # results would look right but be wrong
            raise PipelineError(f"the job is for {job.num_processes} processes, but {size} were launched (WORLD_SIZE)")
        with explain_out_of_memory("this stage"):
            return {"result": job.call(), "place": current_place().model_dump(mode="json"), "exit_code": 0}
    except PipelineError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        traceback.print_exc()
        file = None if error.filename is None else str(error.filename)
        return {"error": str(error), "errno": error.errno, "file": file, "exit_code": 1}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "exit_code": 1}


if __name__ == "__main__":
    main()
