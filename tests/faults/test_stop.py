import random
import time

import pytest

from components.shared.errors import PipelineError, RetryableError
from components.train_grpo.config import TrainGRPOConfig
from components.train_sft.config import TrainSFTConfig
from tests import tiny
from tests.faults.place import TIMEOUT_S, Place, fault_config, within

pytestmark = pytest.mark.long(minutes=2)
NUM_STOPS = 10
STEP_S = 2
"""Duration of a step with the reward `slow`."""
SFT = TrainSFTConfig.model_validate(
    {
        "model": tiny.MODEL.model_dump(),
        "seed": 1,
        "num_steps": 60,
        "examples_per_step": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "final_learning_rate_fraction": 0.1,
        "max_tokens": 64,
        "checkpoint": {"every_steps": 1, "keep_last": 1, "keep_best": True, "grace_s": 20},
        "engine": tiny.engine_config(num_processes=2),
    }
)


def _assert_stops_and_resumes(place: Place, config: TrainGRPOConfig | TrainSFTConfig, other: Place) -> None:
    """A run that is asked to stop ends in time with a checkpoint, and resumes to the results of the other run."""
    command = place.start(config)
    place.wait_for_checkpoint(3, command)
    command.terminate()
    assert command.wait(config.checkpoint.grace_s) == RetryableError.exit_code
    step = place.checkpoints()[-1]
    assert place.error_line == (
        f"error: {place.stage}: stopped on request: step {step} of {config.num_steps} is saved; "
        "start the same run again to resume"
    )
    place.assert_nothing_runs()
    assert place.run(config) == 0, place.err
    assert f"{place.stage}: resuming after step {step}\n" in place.out
    assert place.results() == other.results()
    place.assert_nothing_left()
    assert [line["event"] for line in place.rows("journal.jsonl")] == ["started", "failed", "started", "finished"]


def test_grpo_resumes_after_the_step_at_which_it_was_stopped(
    place: Place, config: TrainGRPOConfig, undisturbed: Place
) -> None:
    """In one process, without a launcher."""
    _assert_stops_and_resumes(place, config, undisturbed)


def test_sft_resumes_after_the_step_at_which_it_was_stopped(places: tuple[Place, Place]) -> None:
    """In two processes."""
    straight, stopped = places
    for place in places:
        place.stage, place.inputs = "train_sft", {"problems": place.inputs["problems"]}
    assert straight.run(SFT) == 0, straight.err
    _assert_stops_and_resumes(stopped, SFT, straight)


@pytest.mark.long(minutes=9)
@pytest.mark.timeout(1800)
def test_two_ranks_finish_the_step_in_progress_when_stopped(place: Place) -> None:
    """Stopped at ten random moments of steps of two seconds, each time with a complete checkpoint."""
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


def test_a_run_with_all_steps_done_only_writes_its_outputs(
    place: Place, config: TrainGRPOConfig, undisturbed: Place
) -> None:
    """After its outputs could not be written, the next start says that nothing else is left to do."""
    command = place.start(config)
    partial = place.folder / ".policy.partial"
    assert within(TIMEOUT_S, partial.is_dir)
    (partial / "model.safetensors").mkdir()
    assert command.wait(60) == PipelineError.exit_code
    assert place.error_line.endswith("is a directory")
    assert place.checkpoints()[-1] == config.num_steps
    assert place.run(config) == 0, place.err
    assert f"train_grpo: resuming after step {config.num_steps}: all steps are done\n" in place.out
    assert place.results() == undisturbed.results()
    place.assert_nothing_left()
