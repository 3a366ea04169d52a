import random
import time

import pytest

from components.shared.errors import RetryableError
from tests.faults.place import TIMEOUT_S, Place, fault_config

pytestmark = pytest.mark.long(minutes=2)
NUM_STOPS = 4
STEP_S = 2
"""Duration of a step with the reward `slow`."""


@pytest.mark.long(minutes=4)
@pytest.mark.timeout(1800)
def test_two_ranks_finish_the_step_in_progress_when_stopped(place: Place) -> None:
    """Stopped at four random moments of steps of two seconds, each time with a complete checkpoint."""
    config = fault_config("slow", num_steps=90, grace_s=60, engine__num_processes=2)
    chance, step = random.Random(3), 0
    for _ in range(NUM_STOPS):
        command = place.start(config)
        place.wait_for_checkpoint(step + 1, command)
        time.sleep(chance.uniform(0, 2 * STEP_S))
        done = place.checkpoints()[-1]
        command.terminate()
        assert command.wait(TIMEOUT_S) == RetryableError.exit_code, place.err
        step = place.checkpoints()[-1]
        # A request during the writing of a checkpoint takes effect after the next step.
        assert step in (done + 1, done + 2)
        assert place.error_line.startswith(f"error: train_grpo: stopped on request: step {step} of 90 is saved")
        place.assert_latest_checkpoint(step)
        place.assert_nothing_runs()
