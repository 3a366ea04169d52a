from pathlib import Path

import pytest

from components.cluster.failures import error_of_ranks
from components.cluster.job import Job
from components.shared.system_errors import out_of_memory


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of two ranks that has been written down."""
    job = Job(
        folder=tmp_path / "launch",
        function="tests.cluster.ranks:act",
        config={},
        folders={},
        outputs={},
        num_processes=2,
        grace_s=1,
        with_samplers=False,
    )
    job.write()
    return job


def test_an_error_of_the_system_without_a_number_is_told_as_any_other(job: Job) -> None:
    """Such as a time-out that Python raises itself."""
    job.write_outcome(0, {"error": "took too long", "errno": None, "file": None, "exit_code": 1})
    assert str(error_of_ranks(job)) == "rank 0: took too long"


def test_the_log_below_an_error_does_not_say_what_it_is(job: Job) -> None:
    """A line about memory further up in the log of a rank makes no other error one of memory."""
    job.log(1).write_text("warning: may run out of memory\nKeyError: 'x'\n")
    job.write_outcome(1, {"error": "KeyError: 'x'", "exit_code": 1})
    error = error_of_ranks(job)
    assert error is not None
    assert "out of memory" in str(error)
    assert out_of_memory(error) is None
    job.write_outcome(1, {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "exit_code": 1})
    error = error_of_ranks(job)
    assert error is not None
    assert out_of_memory(error) is not None
