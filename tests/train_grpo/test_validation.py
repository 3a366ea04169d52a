"""Validation beside the training: it changes nothing that is learned, and decides which policy is the result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from components.policy.checkpoint import save
from components.shared import jsonl
from components.shared.config import without_operational
from components.shared.errors import PipelineError
from components.shared.problem import Split
from components.train_grpo.records import History
from components.train_grpo.trainer import Trainer
from components.train_grpo.validation import EarlyStop, best_validation, early_stop
from tests import tiny
from tests.train_grpo.groups import SHORTNESS
from tests.train_grpo.runs import rows, run
from tests.train_grpo.settings import grpo_config

EVERY_STEP = {"validation": {"every_steps": 1}, "checkpoint__keep_best": True}
DEV = [tiny.problem(number, split=Split.DEV) for number in range(30, 42)]
Run = Callable[..., dict[str, float]]


def _measured(*accuracies: float) -> list[dict[str, Any]]:
    return [{"step": number, "accuracy": accuracy} for number, accuracy in enumerate(accuracies)]


@pytest.fixture
def validated(tmp_path: Path) -> Run:
    """Return a function that trains a tiny model into a folder, with a reward for short answers; returns metrics."""
    (tmp_path / "reference").mkdir()
    save(tiny.checkpoint(), tmp_path / "reference")

    settings = {"num_steps": 2, "learning_rate": 1e-2, "reward__weights": SHORTNESS}
    return lambda folder, held_out=DEV, **changes: run(
        folder, tiny.PROBLEMS, tmp_path / "reference", held_out, **{**settings, **changes}
    )


def test_the_best_is_the_first_with_the_highest_accuracy() -> None:
    """The reference, before the first step, is only for comparison."""
    assert best_validation([]) is best_validation(_measured(0.9)) is None
    assert best_validation(_measured(0.9, 0.3, 0.5, 0.5, 0.4)) == {"step": 2, "accuracy": 0.5}


def test_training_stops_when_patience_is_exhausted() -> None:
    """An equal accuracy is no better one; the reference does not count."""

    def stop(*accuracies: float, patience: int | None) -> EarlyStop | None:
        config = grpo_config(validation={"every_steps": 1, "patience": patience})
        return early_stop(config, History(validation=_measured(*accuracies)))

    assert stop(0.9, 0.3, 0.5, 0.5, 0.4, patience=3) is None
    assert stop(0.9, 0.3, 0.5, 0.4, 0.6, patience=2) is None
    assert stop(0.9, 0.3, 0.5, 0.4, 0.3, patience=None) is stop(0.9, patience=1) is None
    stopped = stop(0.9, 0.3, 0.5, 0.5, 0.4, patience=2)
    assert stopped
    assert not stopped.fails
    assert stopped.reason.startswith("2 validations without a better accuracy than the 50.0\u202f% of step 2")


FIGURES = {"kl": 0.1, "entropy": 1.0, "completion_length_tokens": 10.0, "truncated_fraction": 0.0}


@pytest.mark.parametrize(
    ("limit", "value", "column", "measured", "reason"),
    [
        ("max_kl", 0.5, "kl", [0.0, 0.4, 0.8], "KL divergence from the reference 0.6 over the last 2 steps, above"),
        ("min_entropy", 0.2, "entropy", [1.0, 0.1, 0.2], "entropy 0.15 over the last 2 steps, below"),
        ("max_completion_tokens", 20.0, "completion_length_tokens", [1.0, 20.0, 22.0], "mean completion length 21"),
        ("max_truncated_fraction", 0.5, "truncated_fraction", [0.0, 0.5, 0.6], "fraction of truncated completions"),
    ],
)
def test_training_stops_at_a_limit_on_the_mean_of_the_last_steps(
    limit: str, value: float, column: str, measured: list[float], reason: str
) -> None:
    """With the best policy before as the result; otherwise it fails, and can resume with another limit."""
    limits = {"limits": {limit: value, "over_steps": 2}}
    config = grpo_config(**EVERY_STEP, **limits)
    assert "limits" in without_operational(config)
    assert "limits" not in without_operational(grpo_config(**limits))
    curves: list[dict[str, float | None]] = [{**FIGURES, column: each} for each in measured]
    for steps in (curves[:2], curves[2:]):
        assert early_stop(config, History(steps, validation=_measured(0.0, 0.1))) is None
    stop = early_stop(config, History(curves, validation=_measured(0.0, 0.1)))
    assert stop
    assert not stop.fails
    assert stop.reason.startswith(reason)
    assert stop.reason.endswith(f"train_grpo.limits.{limit}: {value:g}")
    for without in (_measured(0.0), []):
        stop = early_stop(config, History(curves, validation=without))
        assert stop
        assert stop.fails


def test_validation_changes_nothing_that_is_learned(validated: Run, tmp_path: Path) -> None:
    """Weights and records are the same bytes without it, but for its columns, also of several sources."""
    validated(tmp_path / "without")
    sources = [each.model_copy(update={"source": "other"}) if number % 3 else each for number, each in enumerate(DEV)]
    metrics = validated(tmp_path / "with", sources, validation={"every_steps": 2, "num_problems": 8})
    for name in ("policy/model.safetensors", "training/completions.jsonl"):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes(), name
    curves = rows(tmp_path / "with")
    measured = rows(tmp_path / "with", "validation")
    assert [row["step"] for row in measured] == [0, 2]
    for source in ("", "_other", "_sums"):
        last = measured[1]["by_source"][source[1:]] if source else measured[1]
        assert [row.pop(f"validation_accuracy{source}") for row in curves] == [None, last["accuracy"]]
    assert curves == rows(tmp_path / "without")
    assert metrics["policy_step"] == 2
    assert measured[1]["total"] == 8


def test_exhausted_patience_ends_the_run_with_its_best_policy(
    validated: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All validations find the same accuracy here: the first policy is the result. Log and records say so."""
    record, weights = Trainer._record, []

    def collect(self: Trainer, *arguments: Any) -> None:
        state = self.checkpoint.model.state_dict()
        weights.append({name: tensor.detach().clone() for name, tensor in state.items()})
        record(self, *arguments)

    with patch.object(Trainer, "_record", collect):
        metrics = validated(tmp_path, num_steps=20, **EVERY_STEP, validation__patience=2)
    saved = load_file(tmp_path / "policy" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights[0].items() if name in saved)
    assert any(not torch.equal(saved[name], tensor) for name, tensor in weights[-1].items() if name in saved)
    assert metrics["policy_step"] == 1
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    result = jsonl.read_json(tmp_path / "training" / "result.json")
    assert (result["policy_step"], result["num_steps"]) == (1, 3)
    assert result["stopped"].startswith("2 validations without a better accuracy than the 0\u202f% of step 1")
    output = capsys.readouterr().out
    assert f"stopped after step 3 of 20: {result['stopped']}" in output
    assert "the policy is that of step 1 of 3" in output


def test_a_limit_without_a_validated_policy_fails_the_run(validated: Run, tmp_path: Path) -> None:
    """There is nothing to fall back on."""
    with pytest.raises(PipelineError, match=r"above train_grpo\.limits\.max_completion_tokens: 1; no policy was"):
        validated(tmp_path, limits={"max_completion_tokens": 1.0, "over_steps": 1})
    assert not (tmp_path / "policy" / "model.safetensors").exists()
