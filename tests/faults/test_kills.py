import os
import random
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.register.checkpoints import fetch_checkpoint, stored_checkpoints
from components.register.snapshot import read_registry
from components.shared.errors import RetryableError
from components.train_grpo.config import TrainGRPOConfig
from tests.faults.place import TIMEOUT_S, Place, fault_config, within

pytestmark = pytest.mark.long(minutes=8)

SEED = 8
NUM_KILLS, NUM_ENDINGS = 44, 7
"""Processes killed during one run, and how many of these kills end it.

For a campaign raise both, the steps with them, and give pytest a longer --timeout.
"""
NUM_STEPS = 40
MOST_BETWEEN_KILLS_S = 0.3
ENDING = ("rank 0", "everything", "command", "rank 1", "launcher")
"""What ends the run when it is killed."""
UNREPORTED = ("everything", "command")
"""After whose end nobody is left to report it."""
MEMORY = Path("/dev/shm")
CONFIG = fault_config(
    num_steps=NUM_STEPS, prompts_per_step=4, group_size=4, grace_s=2, engine__num_processes=2, engine__deadline_s=20
)


def _kill_one(kind: str, place: Place, command: "subprocess.Popen[bytes]", chance: random.Random) -> bool:
    """Kill a process of that kind at a random moment; return False if the run has ended before."""
    deadline = time.monotonic() + TIMEOUT_S
    while command.poll() is None:
        time.sleep(chance.uniform(0, MOST_BETWEEN_KILLS_S))
        there = [each for each in place.processes() if each.kind == kind]
        if kind == "everything":
            place.end()
            return True
        if there:
            # Between fork and exec a process looks like its parent.
            victim = chance.choice(there) if kind == "grader" else min(there, key=lambda each: each.pid)
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
                return True
        assert time.monotonic() < deadline, f"there is no {kind}"
    return False


def _disturbed(place: Place) -> list[str]:
    """Run with kills, starting again after each that ends the run; return what was killed before each start."""
    chance, config = random.Random(SEED), _with_registry(place)
    victims = [ENDING[number % len(ENDING)] for number in range(NUM_ENDINGS)]
    victims += ["grader"] * (NUM_KILLS - NUM_ENDINGS)
    chance.shuffle(victims)
    ended_by = []
    command = place.start(config)
    for number, victim in enumerate(victims):
        # Spread over the run, the last before its end.
        place.wait_for_checkpoint(number * (NUM_STEPS - 10) // NUM_KILLS, command)
        assert _kill_one(victim, place, command, chance), f"the run ended before a {victim} could be killed"
        if victim in ENDING:
            exit_code = command.wait(60)
            assert exit_code == (-signal.SIGKILL if victim in UNREPORTED else RetryableError.exit_code), place.err
            place.assert_nothing_runs()
            _assert_published_is_usable(place, number)
            ended_by.append(victim)
            command = place.start(config)
    assert command.wait(TIMEOUT_S) == 0, place.err
    return ended_by


def _with_registry(place: Place) -> TrainGRPOConfig:
    checkpoint = CONFIG.checkpoint.model_copy(update={"keep_in_registry": 2})
    return CONFIG.model_copy(update={"registry": str(place.folder / "registry"), "checkpoint": checkpoint})


def _assert_published_is_usable(place: Place, number: int) -> None:
    """The newest checkpoint in the registry is delivered, and is another model than the reference."""
    registry, destination = place.folder / "registry", place.folder / f"fetched-{number}"
    with read_registry(str(registry)) if registry.is_dir() else nullcontext() as snapshot:
        stored = stored_checkpoints(snapshot) if snapshot else []
    for newest in stored[-1:]:
        fetch_checkpoint(str(registry), newest.name, destination)
        model, reference = map(AutoModelForCausalLM.from_pretrained, (destination, place.inputs["reference"]))
        assert AutoTokenizer.from_pretrained(destination).encode("Tom")
        before = reference.state_dict()
        assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        assert newest.metrics["step"] == newest.step


def test_kills_do_not_change_the_results(places: tuple[Place, Place]) -> None:
    """Kills of processes, and of all at once, at random moments leave the results byte-identical.

    Each kill that ends the run is reported in a line that names the process killed, if one is left that can. A
    checkpoint that was pushed into the registry before a kill can be used.
    """
    straight, disturbed = places
    in_memory = set(MEMORY.iterdir())
    assert straight.run(CONFIG) == 0, straight.err
    ended_by = _disturbed(disturbed)
    assert disturbed.results() == straight.results()
    assert [row["step"] for row in disturbed.rows("training/steps.jsonl")] == list(range(1, NUM_STEPS + 1))
    straight.assert_nothing_left()
    disturbed.assert_nothing_left(num_temporary=sum(by in UNREPORTED for by in ended_by))
    assert set(MEMORY.iterdir()) <= in_memory
    assert list(disturbed.folder.glob("fetched-*"))
    _assert_reported(disturbed, ended_by)


def _assert_reported(place: Place, ended_by: list[str]) -> None:
    """The journal has every failure that somebody was left to report, and the end."""
    journal = [row for row in place.rows("journal.jsonl") if row["event"] in {"failed", "finished"}]
    expected = ["failed" for by in ended_by if by not in UNREPORTED]
    assert [line["event"] for line in journal] == [*expected, "finished"]
    reported = [line["error"] for line in journal if line["event"] == "failed"]
    for by, error in zip([by for by in ended_by if by not in UNREPORTED], reported, strict=True):
        killed = "the launcher of the processes was killed" if by == "launcher" else f"{by} was killed by SIGKILL"
        assert killed in error


@pytest.mark.long(minutes=1)
def test_nothing_outlives_a_command_that_is_killed_while_it_starts(place: Place) -> None:
    """Not even a launcher that is still importing."""
    command = place.start(CONFIG)
    assert within(TIMEOUT_S, lambda: "launcher" in {each.kind for each in place.processes()})
    command.kill()
    command.wait()
    place.assert_nothing_runs()
