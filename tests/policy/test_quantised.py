from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from components.policy.checkpoint import Checkpoint, create, load, save
from components.policy.config import EngineConfig, LoraConfig
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters, merged_state_dict
from components.policy.packing import MicroBatch
from components.shared.errors import PipelineError
from tests import tiny

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which this platform has no wheel of")

_LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    path = tmp_path_factory.mktemp("models") / "model"
    path.mkdir()
    save(tiny.checkpoint(), path)
    return path


def _quantised(folder: Path) -> Checkpoint:
    """Return the model in 4 bits, with adapters that do something."""
    checkpoint = load(folder, dtype=torch.float32, quantise="nf4")
    add_adapters(checkpoint.model, _LORA, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return checkpoint


def _batch(checkpoint: Checkpoint) -> MicroBatch:
    (batch,) = tiny.batches(checkpoint.examples(tiny.PROBLEMS[:3]), 1000)
    return batch


def _gradients(model: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs_N = LogprobModel(model, temperature=1.0)(batch).logprobs_N
    logprobs_N.sum().backward()
    return logprobs_N.detach(), {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None and ".lora_" in name
    }


def test_a_saved_policy_is_the_one_that_was_trained(folder: Path, tmp_path: Path) -> None:
    """A plain folder of full weights, with the same log-probabilities, and nothing about 4 bits in its config."""
    checkpoint = _quantised(folder)
    logprobs_N, _ = _gradients(checkpoint.model, _batch(checkpoint))
    (tmp_path / "policy").mkdir()
    save(checkpoint, tmp_path / "policy")
    assert "quantization" not in (tmp_path / "policy/config.json").read_text()
    plain = load(tmp_path / "policy", dtype=torch.float32)
    expected_N, _ = _gradients(plain.model, _batch(plain))
    torch.testing.assert_close(logprobs_N, expected_N, rtol=1e-4, atol=1e-4)
    exact, _ = _gradients(load(folder, dtype=torch.float32).model, _batch(plain))
    assert (exact - expected_N).abs().max() > 1e-2  # four bits are not the model


def test_adapters_have_the_gradients_of_full_weights(folder: Path) -> None:
    """Those of the model whose weights are the rounded ones, in float32."""
    checkpoint = _quantised(folder)
    _, gradients = _gradients(checkpoint.model, _batch(checkpoint))
    plain = load(folder, dtype=torch.float32)
    rounded = load(folder, dtype=torch.float32, quantise="nf4")
    add_adapters(rounded.model, _LORA, seed=1)  # which change nothing
    plain.model.load_state_dict(merged_state_dict(rounded.model))
    add_adapters(plain.model, _LORA, seed=1)
    adapters = {name: each for name, each in checkpoint.model.state_dict().items() if ".lora_" in name}
    plain.model.load_state_dict(adapters, strict=False)
    _, expected = _gradients(plain.model, _batch(plain))
    assert expected
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


def test_frozen_weights_take_four_bits_and_stay_as_they_are(folder: Path) -> None:
    """After steps of the optimizer, which changes the adapters alone."""
    checkpoint = _quantised(folder)
    weights = {name: each for name, each in checkpoint.model.named_parameters() if each.dtype == torch.uint8}
    full = load(folder, dtype=torch.float32).model
    num_weights = sum(each.numel() for name, each in full.named_parameters() if "proj" in name)
    assert sum(each.numel() for each in weights.values()) == num_weights / 2
    before = {name: each.clone() for name, each in weights.items()}
    adapters = {name: each.clone() for name, each in checkpoint.model.named_parameters() if ".lora_A." in name}
    config = tiny.engine_config(lora=_LORA.model_dump(), quantise="nf4")
    policy = Policy(LogprobModel(checkpoint.model, temperature=1.0), config)
    for _ in range(2):
        policy.backward(-policy(_batch(checkpoint)).logprobs_N.mean())
        policy.step(1e-2)
    after = dict(checkpoint.model.named_parameters())
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert not any(torch.equal(after[name], each) for name, each in adapters.items())


def test_what_cannot_be_quantised_is_refused() -> None:
    """Trained weights, sharded ones, and random ones."""
    for changes in ({"quantise": "nf4"}, {"quantise": "nf4", "lora": {}, "zero_stage": 3}):
        with pytest.raises(ValidationError, match="quantise needs"):
            EngineConfig.model_validate(changes)
    with pytest.raises(PipelineError, match="random weights"):
        create(tiny.MODEL, tiny.PROBLEMS, seed=1, dtype=torch.float32, quantise="nf4")
