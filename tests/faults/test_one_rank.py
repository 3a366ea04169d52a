import os
import re
import signal
import statistics
from typing import Any

import pytest

from components.shared.errors import PipelineError, RetryableError
from components.train_grpo.config import TrainGRPOConfig
from tests.faults.place import Place, fault_config
from tests.faults.rewards import CALLS_BEFORE, FAULTY_RANK, SLOW_S

pytestmark = pytest.mark.long(minutes=4)
NUM_STEPS = 24
SETTINGS: dict[str, Any] = {"num_steps": NUM_STEPS, "grace_s": 1, "engine__deadline_s": 6}
CALLS_PER_STEP = 2
"""Of a reward in each of two processes."""


def test_nan_in_the_loss_of_one_rank_stops_all_before_the_step(place: Place) -> None:
    """The error says so, and the latest checkpoint is that of the step before."""
    assert place.run(fault_config("nan_in_one", **SETTINGS, engine__num_processes=2)) == PipelineError.exit_code
    assert place.error_line == "error: train_grpo: the loss is nan; stopped before the optimizer step"
    steps_done = CALLS_BEFORE // CALLS_PER_STEP
    assert place.checkpoints()[-1] == steps_done
    place.assert_latest_checkpoint(steps_done)
    place.assert_nothing_runs()


def test_a_slow_rank_is_reported_and_a_hung_rank_ends_the_run(place: Place) -> None:
    """The run is resumed in one process, and then in two again."""
    two, one = (fault_config("slow_in_one", **SETTINGS, engine__num_processes=number) for number in (2, 1))
    stopped_at = _hang_one_rank(place, two)
    resumed_to = _resume_for_a_while(place, one, stopped_at)
    assert place.run(two) == 0, place.err
    assert f"resuming after step {resumed_to}\n" in place.out
    place.assert_nothing_left()
    rows = place.rows("timings/timings.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    together = [row for row in rows if "slowest_rank" in row]
    assert [row["step"] for row in rows if row not in together] == list(range(stopped_at + 1, resumed_to + 1))
    assert {row["slowest_rank"] for row in together[1:]} == {FAULTY_RANK}
    behind_s = statistics.median(row["slowest_rank_behind_median_s"] for row in together)
    assert behind_s == pytest.approx(CALLS_PER_STEP * SLOW_S, rel=0.3)


def _hang_one_rank(place: Place, config: TrainGRPOConfig) -> int:
    """Stop a rank and see it named before the deadline; return the step of the latest checkpoint."""
    command = place.start(config)
    place.wait_for_checkpoint(2, command)
    rank = next(each for each in place.processes() if each.kind == f"rank {FAULTY_RANK}")
    os.kill(rank.pid, signal.SIGSTOP)
    assert command.wait(300) == RetryableError.exit_code
    assert re.search(
        rf"rank {FAULTY_RANK} \(.*, process {rank.pid}\) of 2 (did not reach|stopped responding)", place.err
    )
    assert place.error_line.startswith(f"error: train_grpo: rank {FAULTY_RANK} (")
    place.assert_nothing_runs()
    return place.checkpoints()[-1]


def _resume_for_a_while(place: Place, config: TrainGRPOConfig, stopped_at: int) -> int:
    """Resume after that step, stop again some steps later, and return the last step."""
    command = place.start(config)
    place.wait_for_checkpoint(NUM_STEPS // 2, command)
    command.terminate()
    assert command.wait(20) == RetryableError.exit_code
    assert f"resuming after step {stopped_at}\n" in place.out
    return place.checkpoints()[-1]
