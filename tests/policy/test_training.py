import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from components.policy.config import CheckpointConfig
from components.policy.engine import Policy
from components.policy.optimizer_state import load_parameters
from components.policy.parallel import SINGLE_PROCESS
from components.policy.shutdown import StopRequest
from components.policy.training import Resumption, TrainingCheckpoint, learning_rate
from components.shared.errors import PipelineError
from tests import tiny

_STATE: dict[str, Tensor] = {
    **{f"weight/{key}": torch.ones(3, 2) for key in ("weight", "exp_avg", "exp_avg_sq")},
    **{f"bias/{key}": torch.ones(3) for key in ("weight", "exp_avg", "exp_avg_sq")},
    "num_steps": torch.tensor(4.0),
}
"""The state of a layer from 2 to 3 and its optimizer."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias/exp_avg": None}, "lacks the tensor `bias/exp_avg`, so it is of another model"),
        ({"head/weight": torch.ones(1)}, "has the tensor `head/weight`, so it is of another model"),
        ({"weight/weight": torch.ones(2, 3)}, "the tensor `weight/weight` is 2x3, where the model's is 3x2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """In one line that names the file and a tensor, before any weight has changed."""
    layer = nn.Linear(2, 3)
    before = layer.weight.clone()
    save_file({name: each for name, each in {**_STATE, **changes}.items() if each is not None}, tmp_path / "policy")
    with pytest.raises(PipelineError) as raised:
        load_parameters(layer, tmp_path / "policy")
    assert str(raised.value) == f"{tmp_path / 'policy'}: {message}"
    assert torch.equal(layer.weight, before)


def test_a_checkpoint_is_read_to_the_cpu_whatever_gpu_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process writes it from its GPU: the others would all load to that one."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        torch.save({"reward_model": {"weight": torch.arange(3)}}, tmp_path / "values.pt")
    weight = TrainingCheckpoint(tmp_path).values["reward_model"]["weight"]
    assert (weight.device.type, weight.tolist()) == ("cpu", [0, 1, 2])


class _Policy:
    """What a checkpoint is made of, without a model."""

    def state(self) -> dict[str, Tensor]:
        return {"num_steps": torch.tensor(1.0)}


def test_the_last_step_is_saved_and_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    """Also where none is due: who resumes a finished training finds its end."""
    config, policy = CheckpointConfig.model_validate(tiny.CHECKPOINT), cast(Policy, _Policy())
    first = Resumption(SINGLE_PROCESS, tmp_path, config, stage="train", num_steps=3)
    for step in (1, 2, 3):
        first.after_step(step, policy, dict, stop=StopRequest())
    expected = torch.rand(3), random.random()
    del first  # and with it the lock of the folder
    again = Resumption(SINGLE_PROCESS, tmp_path, config, stage="train", num_steps=3)
    assert again.steps_done == 3
    again.load()
    torch.manual_seed(0)
    random.seed(0)
    again.restore_random_state()
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [1.0, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4]),
        ("cosine", [1.0, 2.0, 2.0, 1.765685425, 1.2, 0.634314575, 0.4]),
        ("constant", [1.0, *[2.0] * 6]),
    ],
)
def test_the_learning_rate_rises_to_its_peak_and_decays_by_its_schedule(schedule: Any, rates: list[float]) -> None:
    """Warm-up counts from the first step; the last step has the final fraction; no warm-up is allowed."""
    settings: dict[str, Any] = {"peak": 2.0, "num_steps": 7, "final_fraction": 0.2, "schedule": schedule}
    assert [learning_rate(step, warmup_steps=2, **settings) for step in range(7)] == pytest.approx(rates)
    assert learning_rate(0, warmup_steps=0, **{**settings, "num_steps": 1}) == 2.0
