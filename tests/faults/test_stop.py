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


def test_a_step_longer_than_the_grace_period_is_abandoned(place: Place) -> None:
    """The run ends after its grace period, and the checkpoints before stay."""
    command = place.start(fault_config("endless", num_steps=9, grace_s=1))
    place.wait_for_checkpoint(2, command)
    command.terminate()
    stopped = time.monotonic()
    assert command.wait(120) == RetryableError.exit_code
    assert time.monotonic() - stopped > 0.9
    message = (
        "error: stopped during a step, which took longer than checkpoint.grace_s (1 s): "
        "the current step and 0 before it are lost; "
        "start the same run again to resume"
    )
    assert place.error_line.startswith(message)
    assert place.checkpoints() == [1, 2]
    place.assert_latest_checkpoint(2)
    place.assert_nothing_runs()
