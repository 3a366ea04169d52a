import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from components.policy.config import CheckpointConfig
from components.policy.engine import load_parameters
from components.policy.parallel import SINGLE_PROCESS
from components.policy.resume import Resumption, TrainingCheckpoint
from components.shared.checkpoints import Writer
from components.shared.errors import PipelineError
from tests import tiny

MADE_FROM = {"config": {"seed": 1}, "inputs": {}, "code": "c1"}


def _state(**changes: Tensor | None) -> dict[str, Tensor]:
    """What is kept of a layer from 2 to 3 and its optimizer; a change to None takes a tensor away."""
    whole: dict[str, Tensor | None] = {
        **{f"weight/{key}": torch.ones(3, 2) for key in ("weight", "exp_avg", "exp_avg_sq")},
        **{f"bias/{key}": torch.ones(3) for key in ("weight", "exp_avg", "exp_avg_sq")},
        "num_steps": torch.tensor(4.0),
        **changes,
    }
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"bias/exp_avg": None}, "lacks the tensor `bias/exp_avg`, so it is of another model"),
        ({"num_steps": None}, "lacks the tensor `num_steps`, so it is of another model"),
        ({"head/weight": torch.ones(1)}, "has the tensor `head/weight`, so it is of another model"),
        ({"weight/weight": torch.ones(2, 3)}, "the tensor `weight/weight` is 2x3, where the model's is 3x2"),
        ({"weight/exp_avg_sq": torch.ones(6)}, "the tensor `weight/exp_avg_sq` is 6, where the model's is 3x2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    """In one line that names the file and a tensor, before any weight has changed."""
    layer = nn.Linear(2, 3)
    before = layer.weight.clone()
    path = tmp_path / "policy.safetensors"
    save_file(_state(**changes), path)
    with pytest.raises(PipelineError) as refused:
        load_parameters(layer, path)
    assert str(refused.value) == f"{path}: {fault}"
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("moments", [True, False])
def test_a_checkpoint_of_the_model_is_taken(tmp_path: Path, moments: bool) -> None:
    """Also from before the first step, when there are no moments."""
    layer = nn.Linear(2, 3)
    state = {name: tensor for name, tensor in _state().items() if moments or "exp_avg" not in name}
    save_file(state, tmp_path / "policy.safetensors")
    load_parameters(layer, tmp_path / "policy.safetensors")
    assert torch.equal(layer.weight, torch.ones(3, 2))


def test_a_checkpoint_is_read_to_the_cpu_whatever_gpu_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process writes it from its GPU: the others would all load to that one."""
    save_file({"weight": torch.zeros(1)}, tmp_path / "policy.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        torch.save({"reward_model": {"weight": torch.arange(3)}}, tmp_path / "values.pt")
    weight = TrainingCheckpoint(tmp_path).values["reward_model"]["weight"]
    assert (weight.device.type, weight.tolist()) == ("cpu", [0, 1, 2])


def test_a_checkpoint_knows_the_work_it_belongs_to(tmp_path: Path) -> None:
    """One that was copied from another run's folder is refused, one's own is gone on from."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, seed in ((own, 1), (other, 2)):
        (folder / "checkpoints").mkdir(parents=True)
        made_from = {**MADE_FROM, "config": {"seed": seed}}
        (folder / "fingerprint.json").write_text(json.dumps({**made_from, "files": {"a.py": str(seed)}}))
        writer = Writer(folder / "checkpoints", keep_last=1, keep_best=False, fingerprint=made_from)
        writer.save(seed, lambda folder: (folder / "policy.safetensors").touch(), score=None)
        del writer
    assert _resumed(own).steps_done == 1
    (other / "checkpoints/step-000002").rename(own / "checkpoints/step-000002")
    with pytest.raises(PipelineError, match=r"is a checkpoint of another run.* in sums\.seed: 2 -> 1; move"):
        _resumed(own)


def _resumed(work: Path) -> Resumption:
    config = CheckpointConfig.model_validate(tiny.CHECKPOINT)
    return Resumption(SINGLE_PROCESS, work, config, stage="sums", num_steps=9)
