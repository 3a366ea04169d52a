"""The disk space that a run takes, told before it starts."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.preflight.config import Params
from pipelines.requirements import short_of_disk
from tests.presets import preset


def _have_free(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=num_bytes))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        # 7.6 billion parameters: policy and reference in bf16; three checkpoints of weights, moments and the model.
        ({}, "350.3 GB there (30.5 for models, 319.9 for checkpoints)"),
        ({"num_steps": 0}, "335.1 GB there (15.2 for models, 319.9 for checkpoints)"),
    ],
)
def test_what_a_run_takes_and_what_is_free_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], needed: str
) -> None:
    """With the folder that is too full; a run that fits is let through."""
    values = preset()
    values["train_sft"] |= {"model": {"base": "Qwen/Qwen2.5-7B"}, **changes}
    values["validate_data"].pop("model", None)
    for stage in ("train_sft", "train_grpo"):
        values[stage] |= {"engine": {"precision": "bf16"}, "checkpoint": {"keep_last": 1, "keep_best": True}}
    params = Params.model_validate(values)
    _have_free(100 * 10**9, monkeypatch)
    line = short_of_disk(params, tmp_path / "outputs")
    assert line == (
        f"{tmp_path}: 100.0 GB are free, and a run takes about {needed}; make room, or lower checkpoint.keep_last"
    )
    _have_free(10**12, monkeypatch)
    assert short_of_disk(params, tmp_path) is None


def test_adapters_take_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checkpoints are not counted."""
    values = preset()
    for stage in ("train_sft", "train_grpo"):
        values[stage]["engine"] = {"lora": {}}
    _have_free(0, monkeypatch)
    line = short_of_disk(Params.model_validate(values), tmp_path)
    assert line
    assert "0.0 for checkpoints" in line
