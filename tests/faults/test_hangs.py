import os
import re
import signal
import statistics
import time

import pytest

from components.shared.errors import RetryableError
from tests.faults.place import Place, fault_config
from tests.faults.rewards import FAULTY_RANK, SLOW_S

pytestmark = pytest.mark.long(minutes=4)
NUM_STEPS = 12
CALLS_PER_STEP = 2
"""Of a reward in each of two processes."""


def test_a_slow_rank_is_reported_and_a_hung_rank_ends_the_run(place: Place) -> None:
    """The hung one is named before the deadline, and the run is resumed after the latest checkpoint."""
    config = fault_config("slow_in_one", num_steps=NUM_STEPS, grace_s=1, engine__deadline_s=6, engine__num_processes=2)
    command = place.start(config)
    place.wait_for_checkpoint(2, command)
    rank = next(each for each in place.processes() if each.kind == f"rank {FAULTY_RANK}")
    os.kill(rank.pid, signal.SIGSTOP)
    assert command.wait(300) == RetryableError.exit_code
    hung = rf"rank {FAULTY_RANK} \(.*, process {rank.pid}\) of 2 (did not reach|stopped responding)"
    assert re.search(hung, place.err)
    assert place.error_line.startswith(f"error: train_grpo: rank {FAULTY_RANK} (")
    place.assert_nothing_runs()
    stopped_at = place.checkpoints()[-1]
    assert place.run(config) == 0, place.err
    assert f"resuming after step {stopped_at}\n" in place.out
    place.assert_nothing_left()
    rows = place.rows("timings/timings.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert statistics.mode(row["slowest_rank"] for row in rows) == FAULTY_RANK
    behind_s = statistics.median(row["slowest_rank_behind_median_s"] for row in rows)
    assert behind_s == pytest.approx(CALLS_PER_STEP * SLOW_S, rel=0.3)


@pytest.mark.long(minutes=1)
def test_a_step_longer_than_the_grace_period_is_abandoned(place: Place) -> None:
    """The run ends after its grace period, and the checkpoints before stay."""
    command = place.start(fault_config("endless", num_steps=9, grace_s=1))
    place.wait_for_checkpoint(2, command)
    command.terminate()
    stopped = time.monotonic()
    assert command.wait(120) == RetryableError.exit_code
    assert time.monotonic() - stopped > 0.9
    assert place.error_line.startswith(
        "error: stopped during a step, which took longer than checkpoint.grace_s (1 s): the current step and 0 before "
        "it are lost; start the same run again to resume"
    )
    assert place.checkpoints() == [1, 2]
    place.assert_latest_checkpoint(2)
    place.assert_nothing_runs()
