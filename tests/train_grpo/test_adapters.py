from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import equal

from components.policy.checkpoint import save
from components.shared import jsonl
from components.shared.problem import Split, write_problems
from components.train_grpo.train import train
from tests import tiny
from tests.train_grpo.settings import grpo_config

SETTINGS = {
    "num_steps": 4,
    "learning_rate": 3e-2,
    "reward__weights": {"accuracy": 1.0, "tests.train_grpo.test_adapters:brevity": 1.0},
    "engine__lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "up_proj"]},
}


def brevity(problem: Any, completion: Any, grade: Any) -> float:
    """A reward that differs between almost any two completions."""
    del problem, grade
    return -len(completion.text) / 10


@pytest.mark.slow
def test_a_policy_with_adapters_is_saved_in_plain_form(tmp_path: Path) -> None:
    """It differs from the reference in the layers that were adapted; under ZeRO 3 too it is what was sampled from."""
    folders = {name: tmp_path / name for name in ("problems", "reference", "policy", "training", "timings")}
    for folder in folders.values():
        folder.mkdir()
    write_problems(folders["problems"], Split.TRAIN, tiny.PROBLEMS)
    save(tiny.checkpoint(), folders["reference"])
    train(grpo_config(**SETTINGS, engine__zero_stage=3), **folders, work=tmp_path / "work")
    before, after = (load_file(folders[name] / "model.safetensors") for name in ("reference", "policy"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "up_proj" in name}
    rows = [row for _, row in jsonl.read_rows(folders["training"] / "steps.jsonl")]
    assert rows[0]["kl"] == 0.0
    assert rows[-1]["kl"] > 1e-3
    assert max(row["sampler_mismatch"] for row in rows) < 1e-5
