"""Kills of vLLM's processes at random moments of a run."""

import functools
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.policy.checkpoint import save
from components.shared.problem import Split, write_problems
from components.train_grpo.config import TrainGRPOConfig
from tests import tiny
from tests.faults.place import TIMEOUT_S, Place, within
from tests.rollout.vllm_policies import policy
from tests.train_grpo.settings import grpo_config

SEED = 3
NUM_STEPS = 12
NUM_ENGINES_KILLED = 5
VICTIMS = (b"api_server", b"VLLM::EngineCor")
"""The HTTP server and its engine."""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a name as short as the sockets in it need."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        yield Path(folder)


def _config(num_steps: int = NUM_STEPS) -> TrainGRPOConfig:
    return grpo_config(
        num_steps=num_steps,
        prompts_per_step=2,
        group_size=4,
        learning_rate=1e-4,
        reward__weights={"accuracy": 1.0, "tests.faults.rewards:shortness": 1.0},
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_best": False, "grace_s": 20},
        sampling__max_new_tokens=24,
        sampler__servers={
            "num_servers": 1,
            "devices": None,
            "max_tokens": 256,
            "cache_gib": 0.25,
            "compile": False,
            "start_deadline_s": 240,
            "request_deadline_s": 60,
            "lost_deadline_s": 240,
            "weights_by": "folder",
        },
    )


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


def _places(folder: Path) -> tuple[Place, Place]:
    inputs = {name: folder / "inputs" / name for name in ("problems", "reference")}
    for path in inputs.values():
        path.mkdir(parents=True)
    write_problems(inputs["problems"], Split.TRAIN, tiny.PROBLEMS)
    save(policy(1), inputs["reference"])
    straight, disturbed = (Place(folder / name, "train_grpo", inputs) for name in ("straight", "disturbed"))
    return straight, disturbed


@pytest.mark.long(minutes=6)
@pytest.mark.timeout(1200)
def test_kills_of_the_sampler_do_not_change_the_results(short_path: Path) -> None:
    """Server and engine are killed in turns; each is restarted, and completions and weights stay byte-identical."""
    straight, disturbed = _places(short_path)
    chance = random.Random(SEED)
    try:
        assert straight.run(_config()) == 0, straight.err
        command = disturbed.start(_config())
        for number in range(3):
            _kill(disturbed, command, VICTIMS[number % 2], 1 + 3 * number, chance.uniform(0, 0.5))
        assert command.wait(TIMEOUT_S) == 0, disturbed.err
        assert disturbed.out.count("; starting it again") == 3
        for place in (straight, disturbed):
            place.assert_nothing_left()
        assert disturbed.rows("training/completions.jsonl") == straight.rows("training/completions.jsonl")
        assert disturbed.results() == straight.results()
    finally:
        for place in (straight, disturbed):
            place.end()


def _kill_during_a_load(place: Place, command: "subprocess.Popen[bytes]", delay_s: float) -> None:
    """Kill the engine while it loads weights: it is suspended while they are written, so it cannot have finished."""
    folder = Path(f"/dev/shm/grpo-pipeline-{command.pid}")
    while True:
        assert within(TIMEOUT_S, lambda: bool(list(folder.glob(".*.partial"))) or command.poll() is not None)
        assert command.poll() is None, place.err
        (engine,) = _processes(place, VICTIMS[1])
        os.kill(engine, signal.SIGSTOP)
        if partial := list(folder.glob(".*.partial")):
            break
        os.kill(engine, signal.SIGCONT)  # too late: they may have been loaded
    assert within(TIMEOUT_S, lambda: not partial[0].exists())
    time.sleep(delay_s)
    os.kill(engine, signal.SIGKILL)


@pytest.mark.long(minutes=8)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("while_loading", [True, False])
def test_an_engine_is_restarted_after_each_kill(short_path: Path, while_loading: bool) -> None:
    """Kills while loading weights or between steps; completions and weights stay byte-identical."""
    straight, disturbed = _places(short_path)
    config = _config(2 * NUM_ENGINES_KILLED + 4)
    chance = random.Random(SEED)
    seconds = []
    try:
        assert straight.run(config, within_s=1200) == 0, straight.err
        command = disturbed.start(config)
        disturbed.wait_for_checkpoint(1, command)
        for number in range(1, NUM_ENGINES_KILLED + 1):
            if while_loading:
                _kill_during_a_load(disturbed, command, chance.uniform(0.05, 0.5))
            else:
                _kill(disturbed, command, VICTIMS[1], disturbed.checkpoints()[-1] + 1, chance.uniform(0, 0.5))
            killed = time.monotonic()
            back = functools.partial(_has_printed, disturbed, "answers again, with the current weights", number)
            assert within(TIMEOUT_S, lambda: back() or command.poll() is not None)  # noqa: B023
            seconds.append(time.monotonic() - killed)
            assert command.poll() is None, disturbed.err
        assert command.wait(TIMEOUT_S) == 0, disturbed.err
        assert disturbed.out.count("; starting it again") == NUM_ENGINES_KILLED
        assert disturbed.rows("training/completions.jsonl") == straight.rows("training/completions.jsonl")
        assert disturbed.results() == straight.results()
        disturbed.assert_nothing_left()
    finally:
        print("seconds until it sampled again:", *(f"{each:.0f}" for each in seconds))
        for place in (straight, disturbed):
            place.end()


def _has_printed(place: Place, text: str, times: int) -> bool:
    return place.out.count(text) >= times
