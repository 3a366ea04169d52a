"""Kills of vLLM's processes at random moments of a run."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.policy.checkpoint import save
from components.shared.problem import Split, write_problems
from tests import tiny
from tests.faults.place import TIMEOUT_S, Place, fault_config, within
from tests.rollout.vllm_policies import policy
from tests.train_grpo.settings import SERVERS

SEED = 3
VICTIMS = (b"api_server", b"VLLM::EngineCor")
"""The HTTP server and its engine."""
SETTINGS: dict[str, Any] = {
    "group_size": 4,
    "learning_rate": 1e-4,
    "sampling__max_new_tokens": 24,
    "sampler__servers": {
        **SERVERS,
        "num_servers": 1,
        "max_tokens": 256,
        "cache_gib": 0.25,
        "start_deadline_s": 240,
        "request_deadline_s": 60,
        "lost_deadline_s": 240,
    },
}


@pytest.fixture
def places() -> Iterator[tuple[Place, Place]]:
    """Places for an undisturbed and a disturbed run, in a folder with a name as short as the sockets in it need."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        inputs = {name: Path(folder, "inputs", name) for name in ("problems", "reference")}
        for path in inputs.values():
            path.mkdir(parents=True)
        write_problems(inputs["problems"], Split.TRAIN, tiny.PROBLEMS)
        save(policy(1), inputs["reference"])
        both = Place(Path(folder, "straight"), inputs), Place(Path(folder, "disturbed"), inputs)
        yield both
        for place in both:
            place.end()


def _processes(place: Place, name: bytes) -> list[int]:
    """Processes of the run with that name, without the watchdog, whose arguments name the server."""
    commands = {each.pid: Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in place.processes()}
    return [pid for pid, command in commands.items() if name in command and b"watchdog.py" not in command]


def _kill(place: Place, command: "subprocess.Popen[bytes]", name: bytes, after_step: int, delay_s: float) -> None:
    """Kill such a process a moment after a step."""
    place.wait_for_checkpoint(after_step, command)
    time.sleep(delay_s)
    assert within(TIMEOUT_S, lambda: bool(_processes(place, name)) or command.poll() is not None)
    assert command.poll() is None, place.err
    os.kill(max(_processes(place, name)), signal.SIGKILL)


def _assert_same_results(straight: Place, disturbed: Place, num_restarts: int) -> None:
    assert disturbed.out.count("; starting it again") == num_restarts
    assert disturbed.rows("training/completions.jsonl") == straight.rows("training/completions.jsonl")
    assert disturbed.results() == straight.results()
    for place in (straight, disturbed):
        place.assert_nothing_left()


@pytest.mark.long(minutes=6)
@pytest.mark.timeout(1200)
def test_kills_of_the_sampler_do_not_change_the_results(places: tuple[Place, Place]) -> None:
    """Server and engine are killed in turns; each is restarted, and completions and weights stay byte-identical."""
    straight, disturbed = places
    config, chance = fault_config(num_steps=12, **SETTINGS), random.Random(SEED)
    assert straight.run(config) == 0, straight.err
    command = disturbed.start(config)
    for number in range(3):
        _kill(disturbed, command, VICTIMS[number % 2], 1 + 3 * number, chance.uniform(0, 0.5))
    assert command.wait(TIMEOUT_S) == 0, disturbed.err
    _assert_same_results(straight, disturbed, 3)
