"""Checkpoints that are pushed into a registry while a run goes on, which is killed altogether at random moments."""

import random
import subprocess
import time
from pathlib import Path
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


def _config(place: Place, **changes: Any) -> TrainGRPOConfig:
    config = fault_config("slow_in_all", num_steps=NUM_STEPS, **changes)
    checkpoint = config.checkpoint.model_copy(update={"keep_in_registry": 2})
    return config.model_copy(update={"registry": str(place.folder / "registry"), "checkpoint": checkpoint})


def _stored(place: Place) -> list[StoredCheckpoint]:
    registry = place.folder / "registry"
    if not registry.is_dir():
        return []
    with read_registry(str(registry)) as snapshot:
        return stored_checkpoints(snapshot)


def _assert_usable(place: Place, stored: StoredCheckpoint, destination: Path) -> None:
    """The model is delivered, Hugging Face loads it, and it is another one than the reference."""
    fetch_checkpoint(str(place.folder / "registry"), stored.name, destination)
    model = AutoModelForCausalLM.from_pretrained(destination)
    assert AutoTokenizer.from_pretrained(destination).encode("Tom")
    reference = AutoModelForCausalLM.from_pretrained(place.inputs["reference"]).state_dict()
    assert model.state_dict().keys() == reference.keys()
    assert any(not torch.equal(weight, reference[name]) for name, weight in model.state_dict().items())
    assert stored.metrics["step"] == stored.step


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
    for number in range(NUM_KILLS):
        command = killed.start(_config(killed, **CHANGES))
        _wait_for_another(killed, command)
        time.sleep(chance.uniform(0, MOST_BETWEEN_KILLS_S))
        killed.end()
        command.wait()
        killed.assert_nothing_runs()
        _assert_usable(killed, _stored(killed)[-1], killed.folder / f"fetched-{number}")
    assert killed.run(_config(killed, **CHANGES)) == 0, killed.err
    assert killed.results() == straight.results()
    assert [each.step for each in _stored(killed)][-1] == NUM_STEPS - 1
    killed.assert_nothing_left(num_temporary=NUM_KILLS)
