import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file
from torch.distributed import get_rank, get_world_size

from components.cluster.launch import run_ranks
from components.policy.checkpoint import Checkpoint, save
from components.policy.packing import Shard, TokenSequence, pack_shard
from components.policy.parallel import Ranks
from components.shared import jsonl
from components.shared.errors import StoppedError
from components.shared.problem import Split, write_problems
from components.shared.tools import ToolsConfig
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import train_rank
from tests import tiny
from tests.rollout import acting as words
from tests.rollout.test_forks import FORGETTING
from tests.train_grpo.groups import SHORTNESS
from tests.train_grpo.runs import rows
from tests.train_grpo.settings import REWARD_MODEL, grpo_config

STRAIGHT, RESUMED = "straight", "resumed"
VALIDATION = {"validation": {"every_steps": 1}, "checkpoint__keep_best": True}
LORA = {"engine__lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "up_proj"]}}
AHEAD = {"sampler": {"max_staleness": 2, "correction": {"weight": {"max": 2.0}}, "max_mismatch": 1.0}}
SETTINGS = {"num_steps": 4, "prompts_per_step": 4, "learning_rate": 1e-2, "engine__micro_batch_tokens": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "solved problems that are left out, and groups that are resampled": {
        "prompts": {"max_pass_rate": 0.5, "max_resampling_rounds": 1},
        "updates_per_rollout": 2,
        "minibatches_per_rollout": 2,
    },
    "rollouts sampled ahead": AHEAD,
    "adapters, and the best in validation as the result": {**VALIDATION, **LORA, "num_iterations": 2},
    "adapters beside weights of 4 bits": {**LORA, "engine__quantise": "nf4"},
}


PLACEMENTS = {0: "replicated", 2: "offloaded", 3: "sharded"}
"""Where two processes have the reference, by the stage of ZeRO."""


def run_both(config: TrainGRPOConfig, *, problems: Path, reference: Path, folder: Path) -> dict[str, float]:
    """For each stage of ZeRO that has a folder, train in it twice: straight, and stopped after step 3 and resumed."""
    for stage, placement in PLACEMENTS.items():
        each = folder / f"zero_{stage}"
        if each.is_dir():
            changes: dict[str, Any] = {"engine": config.engine.model_copy(update={"zero_stage": stage})}
            changes |= {"reference": placement} if config.engine.num_processes > 1 else {}
            changed, inputs = config.model_copy(update=changes), {"problems": problems, "reference": reference}
            train_in(each / STRAIGHT, changed, **inputs)
            with _stopped_after_step(3), pytest.raises(StoppedError, match="step 3 of 4 is saved"):
                train_in(each / RESUMED, changed, **inputs)
            train_in(each / RESUMED, changed, **inputs)
    return {}


def train_in(folder: Path, config: TrainGRPOConfig, **inputs: Path) -> None:
    """Train in this process into a folder, or go on with what is there."""
    outputs = {name: folder / name for name in ("policy", "training", "timings")}
    for path in (*outputs.values(), folder / "work"):
        path.mkdir(parents=True, exist_ok=True)
    train_rank(config, work=folder / "work", **inputs, **outputs)


@contextmanager
def _stopped_after_step(number: int) -> Iterator[None]:
    record = Trainer._record

    def stop(self: Trainer, done: int, *arguments: Any) -> None:
        record(self, done, *arguments)
        if done == number and get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(Trainer, "_record", stop):
        yield


def _undecided(folder: Path, checkpoint: Checkpoint | None = None) -> dict[str, Path]:
    """Write problems, and a reference that guesses; short ones are rewarded, so that every group differs."""
    for name in ("problems", "reference"):
        (folder / name).mkdir()
    write_problems(folder / "problems", Split.TRAIN, tiny.PROBLEMS)
    held_out = [tiny.problem(number, split=Split.DEV) for number in range(30, 41)]
    write_problems(folder / "problems", Split.DEV, held_out)
    save(checkpoint or tiny.checkpoint(), folder / "reference")
    return {name: folder / name for name in ("problems", "reference")}


def _config(**changes: Any) -> TrainGRPOConfig:
    return grpo_config(**{**SETTINGS, "reward__weights": SHORTNESS, **changes})


def assert_equal(folder: Path, *, num_steps: int) -> None:
    """The two runs have the same weights, curves and completions to the last bit, and learned something."""
    straight, resumed = folder / STRAIGHT, folder / RESUMED
    names = [path.relative_to(straight) for name in ("policy", "training") for path in (straight / name).glob("*.*")]
    for name in names:
        assert (straight / name).read_bytes() == (resumed / name).read_bytes(), name
    curves = rows(resumed)
    assert [row["step"] for row in curves] == list(range(1, num_steps + 1))
    assert all(row["gradient_norm"] > 0 for row in curves)
    live = [row for _, row in jsonl.read_rows(resumed / "work" / "live" / "steps.jsonl")]
    assert [{name: each[name] for name in row} for each, row in zip(live, curves, strict=True)] == curves
    completions = (resumed / "work" / "live" / "completions.jsonl").read_bytes()
    assert completions == (resumed / "training" / "completions.jsonl").read_bytes()
    timings = [row["step"] for _, row in jsonl.read_rows(resumed / "timings" / "timings.jsonl")]
    assert timings == list(range(1, num_steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, variant: str) -> None:
    """In one process: everything that a step depends on is in the checkpoint."""
    (tmp_path / "zero_2").mkdir()
    run_both(_config(**VARIANTS[variant]), **_undecided(tmp_path), folder=tmp_path)
    assert_equal(tmp_path / "zero_2", num_steps=4)


@pytest.mark.slow
def test_a_run_with_an_environment_resumes_with_the_trajectories_sampled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chat template leaves out earlier thoughts: some have forked."""
    has_forks: list[bool] = []

    def packed(ranks: Ranks, sequences: Sequence[TokenSequence], **options: Any) -> Shard:
        has_forks.append(any(each.forks for each in sequences))
        return pack_shard(ranks, sequences, **options)

    monkeypatch.setattr("components.train_grpo.update.pack_shard", packed)
    checkpoint = words.checkpoint(words.qwen3, FORGETTING, b="</think>")
    tools = ToolsConfig(environment="tests.environments.own:Counting", max_turns=4, max_observation_tokens=12)
    model = checkpoint.config.model_copy(update={"tools": tools})
    inputs = _undecided(tmp_path, dataclasses.replace(checkpoint, config=model))
    (tmp_path / "zero_2").mkdir()
    config = _config(learning_rate=1e-3, sampling__max_new_tokens=24, **AHEAD)
    run_both(config, **inputs, folder=tmp_path)
    assert_equal(tmp_path / "zero_2", num_steps=4)
    assert any(has_forks)


@pytest.mark.slow
def test_two_processes_resume_where_they_were_stopped(tmp_path: Path) -> None:
    """Though only one got the request; what is learned depends on neither ZeRO's stage nor where the reference is."""
    for stage in PLACEMENTS:
        (tmp_path / f"zero_{stage}").mkdir()
    rewards = {"reward__weights": {**SHORTNESS, "reward_model": 0.1}, "reward__model": REWARD_MODEL}
    config = _config(engine__num_processes=2, num_iterations=2, **rewards, **VALIDATION)
    inputs = _undecided(tmp_path)
    folders = {**inputs, "folder": tmp_path}
    run_ranks(run_both, config, folders, num_processes=2, work=tmp_path / "work", grace_s=30)
    train_in(tmp_path / "alone", _config(num_steps=2, **VALIDATION), **inputs)
    measured = rows(tmp_path / "alone", "validation")
    policies, kls = [], []
    for stage in PLACEMENTS:
        folder = tmp_path / f"zero_{stage}"
        assert_equal(folder, num_steps=4)
        # That of the reference: each process has answered a part.
        assert rows(folder / STRAIGHT, "validation")[0] == measured[0]
        policies.append(load_file(folder / STRAIGHT / "policy" / "model.safetensors"))
        kls.append([row["kl"] for row in rows(folder / STRAIGHT)])
        timings = jsonl.read_rows(folder / STRAIGHT / "timings" / "timings.jsonl")
        assert {row["slowest_rank"] for _, row in timings} <= {0, 1}
    assert all(each == pytest.approx(kls[0], rel=1e-3, abs=1e-9) for each in kls[1:])
    initial = load_file(inputs["reference"] / "model.safetensors")
    for name, weight in policies[0].items():
        # Adam's first step is about as long where a gradient is nearly 0, and then differs with the order of sums.
        learned = (weight - initial[name]).norm()
        assert all((policy[name] - weight).norm() <= 1e-2 * learned for policy in policies[1:]), name


def go_on(config: TrainGRPOConfig, *, problems: Path, reference: Path, folder: Path) -> dict[str, float]:
    """Go on with what is in the folder."""
    train_in(folder, config, problems=problems, reference=reference)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, AHEAD], ids=["at once", "ahead"])
def test_a_run_resumes_in_another_number_of_processes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """From one to two, and under another stage of ZeRO; no step is lost or done twice."""
    inputs, folder = _undecided(tmp_path), tmp_path / "run"
    with _stopped_after_step(2), pytest.raises(StoppedError, match="step 2 of 4 is saved"):
        train_in(folder, _config(**changes), **inputs)
    two = _config(engine__num_processes=2, **changes)
    run_ranks(go_on, two, {**inputs, "folder": folder}, num_processes=2, work=tmp_path / "work", grace_s=30)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert all(row["gradient_norm"] > 0 for row in rows(folder))
