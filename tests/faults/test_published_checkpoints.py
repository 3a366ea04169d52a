"""Checkpoints that are pushed into a registry while a run goes on, which is killed altogether at random moments."""

import random
import subprocess
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.register.checkpoints import StoredCheckpoint, fetch_checkpoint, stored_checkpoints
from components.register.snapshot import read_registry
from components.train_grpo.config import TrainGRPOConfig
from tests.faults.place import TIMEOUT_S, Place, fault_config, within

pytestmark = pytest.mark.long(minutes=3)
NUM_KILLS, NUM_STEPS = 3, 30
MOST_BETWEEN_KILLS_S = 4
CHANGES: dict[str, Any] = {
    "engine__num_processes": 2,
    "engine__deadline_s": 20,
    "engine__lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "up_proj"]},
}


def _config(place: Place) -> TrainGRPOConfig:
    config = fault_config("slow_in_all", num_steps=NUM_STEPS, **CHANGES)
    checkpoint = config.checkpoint.model_copy(update={"keep_in_registry": 2})
    return config.model_copy(update={"registry": str(place.folder / "registry"), "checkpoint": checkpoint})


def _stored(place: Place) -> list[StoredCheckpoint]:
    registry = place.folder / "registry"
    if not registry.is_dir():
        return []
    with read_registry(str(registry)) as snapshot:
        return stored_checkpoints(snapshot)


def _wait_for_another(place: Place, command: "subprocess.Popen[bytes]") -> None:
    """Wait until a checkpoint is pushed that was not there before."""
    before = _stored(place)
    assert within(TIMEOUT_S, lambda: _stored(place) != before or command.poll() is not None)
    assert command.poll() is None, place.err


def test_a_run_that_is_killed_leaves_a_usable_checkpoint_in_the_registry(places: tuple[Place, Place]) -> None:
    """Whatever was going on; nothing outlives the run, and the next one ends where an undisturbed run does."""
    straight, killed = places
    chance = random.Random(4)
    assert straight.run(fault_config("slow_in_all", num_steps=NUM_STEPS, **CHANGES)) == 0, straight.err
    reference = AutoModelForCausalLM.from_pretrained(killed.inputs["reference"]).state_dict()
    for number in range(NUM_KILLS):
        command = killed.start(_config(killed))
        _wait_for_another(killed, command)
        time.sleep(chance.uniform(0, MOST_BETWEEN_KILLS_S))
        killed.end()
        command.wait()
        killed.assert_nothing_runs()
        stored, destination = _stored(killed)[-1], killed.folder / f"fetched-{number}"
        fetch_checkpoint(str(killed.folder / "registry"), stored.name, destination)
        model = AutoModelForCausalLM.from_pretrained(destination).state_dict()
        assert AutoTokenizer.from_pretrained(destination).encode("Tom")
        assert any(not torch.equal(weight, reference[name]) for name, weight in model.items())
        assert stored.metrics["step"] == stored.step
    assert killed.run(_config(killed)) == 0, killed.err
    assert killed.results() == straight.results()
    assert [each.step for each in _stored(killed)][-1] == NUM_STEPS - 1
    killed.assert_nothing_left(num_temporary=NUM_KILLS)
