from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from components.grading.verifier import Verifier
from components.policy.checkpoint import load, save
from components.rollout.vllm.config import WeightsBy
from components.rollout.vllm.verification import StaleWeightsError
from components.shared.environment import WEIGHTS_VARIABLE
from components.train_grpo.plain_groups import from_plain, to_plain
from components.train_grpo.sampling import vllm_sampler
from components.train_grpo.train_rank import build_trainer
from components.train_grpo.trainer import Trainer
from tests import tiny
from tests.train_grpo.own_weights import OwnWeights
from tests.train_grpo.settings import grpo_config

SERVERS = {
    "num_servers": 1,
    "devices": None,
    "max_tokens": 64,
    "cache_gib": 0.1,
    "compile": False,
    "start_deadline_s": 1,
    "request_deadline_s": 1,
    "lost_deadline_s": 1,
    "weights_by": "folder",
}
SHORTNESS = {"accuracy": 1.0, "tests.train_grpo.test_resume:shortness": 1.0}
AHEAD = {"sampler__servers": SERVERS, "sampler__overlap": True, "sampler__max_importance_weight": 2.0}
Make = Callable[..., tuple[Trainer, OwnWeights]]


@pytest.fixture
def make(tmp_path: Path, verify: Verifier, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that makes a trainer whose sampler has weights of its own."""
    (tmp_path / "reference").mkdir()
    save(tiny.checkpoint(), tmp_path / "reference")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()

    def trainer(
        *, stale: bool = False, saved: Any = None, weights_by: WeightsBy = "folder", **changes: Any
    ) -> tuple[Trainer, OwnWeights]:
        config = grpo_config(**{"reward__weights": SHORTNESS, "num_steps": 4, **changes})
        checkpoint = load(tmp_path / "reference", dtype=torch.float32)
        sampler = OwnWeights(checkpoint, tmp_path / "reference", stale=stale, weights_by=weights_by)
        wrapped = vllm_sampler(config, checkpoint, sampler)
        return build_trainer(config, checkpoint, tiny.PROBLEMS, verify, wrapped, saved), sampler

    return trainer


def _run(trainer: Trainer, *, steps_done: int = 0, after_step: Callable[[int], None] = lambda _: None) -> None:
    trainer.run(steps_done=steps_done, after_step=after_step)


def test_the_sampler_gets_the_weights_of_every_update(make: Make, tmp_path: Path) -> None:
    """Each rollout is sampled from the newest, its log-probabilities are the trainer's, and one copy is left."""
    trainer, sampler = make()
    _run(trainer)
    assert sampler.versions == sampler.sampled_from == [0, 1, 2, 3]
    assert all((row["sampler_mismatch"] or 0.0) < 1e-5 for row in trainer.history.curves)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["3"]


def test_weights_that_are_sent_leave_no_file(make: Make, tmp_path: Path) -> None:
    """Adapters are added to what is sent, and the run is as good as one whose weights go by files."""
    lora = {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}
    trainer, sampler = make(weights_by="nccl", engine__lora=lora)
    _run(trainer)
    assert sampler.versions == sampler.sampled_from == [0, 1, 2, 3]
    assert all((row["sampler_mismatch"] or 0.0) < 1e-5 for row in trainer.history.curves)
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize(("learning_rate", "weights_by"), [(1e-3, "folder"), (1e-5, "folder"), (1e-5, "nccl")])
def test_a_sampler_that_keeps_stale_weights_stops_the_run_after_the_first_step(
    make: Make, learning_rate: float, weights_by: WeightsBy
) -> None:
    """Before anything is sampled from them, also where a step is too small for the bound on the mismatch."""
    trainer, sampler = make(stale=True, weights_by=weights_by, learning_rate=learning_rate, sampler__max_mismatch=0.1)
    with pytest.raises(StaleWeightsError, match=r"a copy (still samples from|was given the trainer)"):
        _run(trainer)
    assert len(trainer.history.curves) == 1
    assert sampler.sampled_from == [0]


def test_sampling_ahead_is_one_update_behind(make: Make) -> None:
    """Never more, and what is learned from is what was sampled: the mismatch is an update's worth."""
    trainer, sampler = make(**AHEAD, sampler__max_mismatch=1.0)
    _run(trainer)
    assert sampler.sampled_from == [0, 0, 1, 2]
    mismatches = [row["sampler_mismatch"] or 0.0 for row in trainer.history.curves]
    assert mismatches[0] < 1e-5
    assert min(mismatches[1:]) > 1e-4
    assert all(row["gradient_norm"] for row in trainer.history.curves)


def test_a_rollout_that_is_under_way_is_part_of_a_checkpoint(make: Make, tmp_path: Path) -> None:
    """A run gone on with after step 2 learns from what had been sampled, and ends with the same weights."""
    kept: dict[str, Any] = {}
    straight, _ = make(**AHEAD, sampler__max_mismatch=1.0)

    def keep(step: int) -> None:
        if step == 2:
            save_file(straight.policy.state(), tmp_path / "policy.safetensors")
            kept.update(values=straight.values(), policy=tmp_path / "policy.safetensors")

    _run(straight, after_step=keep)
    resumed, sampler = make(**AHEAD, sampler__max_mismatch=1.0, saved=type("Saved", (), kept))
    _run(resumed, steps_done=2)
    assert sampler.sampled_from == [2]  # the fourth rollout; the third was there
    assert resumed.history.curves == straight.history.curves
    pairs = zip(resumed.checkpoint.model.parameters(), straight.checkpoint.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_groups_come_back_from_plain_values(make: Make) -> None:
    """With everything that learning from them needs."""
    trainer, _ = make()
    trainer.sampler.update_weights(0)
    groups = trainer._roll_out("test").sampled
    assert [from_plain(to_plain(group)) for group in groups] == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler__overlap": True}, "overlap needs servers"),
        ({"sampler__overlap": True, "sampler__servers": SERVERS}, "overlap needs max_importance_weight"),
        ({**AHEAD, "prompts__max_resampling_rounds": 1}, "overlap needs prompts.max_resampling_rounds: 0"),
        ({"sampler__servers": SERVERS, "sampler__vllm": {**SERVERS}}, "Extra inputs|exclude one another"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    """Each is refused with what is needed."""
    with pytest.raises(ValidationError, match=message):
        grpo_config(**changes)
