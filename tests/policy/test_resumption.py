from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from components.policy.resumption import Saved


def test_a_checkpoint_is_read_to_the_cpu_whatever_gpu_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process writes it from its GPU: the others would all load to that one."""
    save_file({"weight": torch.zeros(1)}, tmp_path / "policy.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        torch.save({"reward_model": {"weight": torch.arange(3)}}, tmp_path / "values.pt")
    weight = Saved(tmp_path).values["reward_model"]["weight"]
    assert (weight.device.type, weight.tolist()) == ("cpu", [0, 1, 2])
