import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.policy.checkpoint import Checkpoint, save
from components.policy.config import LoraConfig
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters, copy_merged_weights, merged_state_dict, save_adapters
from components.rollout.vllm.verification import weights_in
from components.shared.config import validate
from components.shared.errors import PipelineError
from tests import tiny
from tests.policy import plain

LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}


def _lora(**changes: Any) -> LoraConfig:
    return LoraConfig.model_validate({**LORA, **changes})


def _scatter(model: PreTrainedModel) -> None:
    """Give every adapter weights that matter, as long training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3, generator=generator)


def _logprobs(model: PreTrainedModel) -> Tensor:
    return plain.logprobs(LogprobModel(model, temperature=1.0), plain.sequences(), 30)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names in the same order, with the same tensors to the last bit."""
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_adapters_change_nothing(dtype: torch.dtype) -> None:
    """Saved weights and random state stay the same to the last bit, and log-probabilities up to rounding."""
    model = plain.qwen2().to(dtype)
    logprobs_M, state, random_numbers = _logprobs(model), _state(model), torch.get_rng_state()
    add_adapters(model, None, seed=1)
    assert all(parameter.requires_grad for parameter in model.parameters())
    add_adapters(model, _lora(), seed=1)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    torch.testing.assert_close(_logprobs(model), logprobs_M, rtol=1e-6, atol=0)
    _assert_same(merged_state_dict(model), state)


@pytest.mark.parametrize("make", [plain.qwen2, plain.qwen3], ids=["with biases", "with a tied output layer"])
def test_a_saved_model_has_its_adapters_merged(tmp_path: Path, make: Any) -> None:
    """Its folder is as that of the base, with what the adapted model computes; which is not changed by saving it."""
    base = tiny.checkpoint()
    checkpoint = Checkpoint(make(), base.tokenizer, base.config)
    save(checkpoint, tmp_path / "base")
    before_M = _logprobs(checkpoint.model)
    add_adapters(checkpoint.model, _lora(targets=["all-linear"]), seed=1)
    _scatter(checkpoint.model)
    with_adapters_M, state = _logprobs(checkpoint.model), _state(checkpoint.model)
    assert (with_adapters_M - before_M).abs().mean() > 0.1
    save(checkpoint, tmp_path / "saved")
    _assert_same(checkpoint.model.state_dict(), state)
    assert torch.equal(_logprobs(checkpoint.model), with_adapters_M)
    described = [
        ({path.name for path in folder.iterdir()}, (folder / "config.json").read_text(), weights_in(folder).keys())
        for folder in (tmp_path / "base", tmp_path / "saved")
    ]
    assert described[0] == described[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(checkpoint.model)
    torch.testing.assert_close(_logprobs(loaded), with_adapters_M, rtol=0, atol=2e-5)


def test_saved_adapters_are_those_that_peft_loads(tmp_path: Path) -> None:
    """Beside the model that they were trained with, they compute the same, and the files are small."""
    model = plain.qwen2()
    other = copy.deepcopy(model)
    add_adapters(model, _lora(targets=["all-linear"]), seed=1)
    _scatter(model)
    save_adapters(model, tmp_path)
    adapted = PeftModel.from_pretrained(other, tmp_path).base_model.model
    torch.testing.assert_close(_logprobs(adapted), _logprobs(model), rtol=0, atol=1e-5)


def test_merged_weights_are_rounded_once_and_can_be_copied() -> None:
    """In bf16, each is the nearest to W + alpha / rank B A; a copy made before the adapters gets the same weights."""
    model = plain.qwen2().bfloat16()
    other = copy.deepcopy(model)
    add_adapters(model, _lora(), seed=1)
    _scatter(model)
    for name, layer in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            w_OI, b_OR, a_RI = (
                part.weight.double() for part in (layer.base_layer, layer.lora_B["default"], layer.lora_A["default"])
            )
            exact_OI = (w_OI + 3.0 * b_OR @ a_RI).detach()
            saved_OI = merged_state_dict(model)[f"{name}.weight"]
            assert saved_OI.dtype == torch.bfloat16
            torch.testing.assert_close(saved_OI.double(), exact_OI, rtol=1.001 * 2**-8, atol=1e-7)
    copy_merged_weights(model, to=other)
    _assert_same(_state(other), merged_state_dict(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 0},
        {"zero_stage": 2, "gradient_checkpointing": True},
        {"zero_stage": 2, "precision": "bf16"},
        {"zero_stage": 3},
    ],
    ids=str,
)
def test_training_changes_only_the_adapters(changes: dict[str, Any]) -> None:
    """All of them, and the loss falls; the weights of the base stay as they were to the last bit."""
    checkpoint = tiny.checkpoint(dtype=torch.bfloat16 if changes.get("precision") else torch.float32)
    add_adapters(checkpoint.model, _lora(targets=["all-linear"]), seed=1)
    before = _state(checkpoint.model)
    policy = plain.policy(checkpoint, **changes)
    losses = [plain.step(policy, learning_rate=1e-2)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 1.0
    with policy.gather_full_parameters():
        for name, weight in checkpoint.model.state_dict().items():
            assert weight.dtype == before[name].dtype
            assert torch.equal(weight, before[name]) == ("lora_" not in name), name


def test_wrong_targets_are_refused() -> None:
    """An unknown layer, with the accepted ones (not the output layer); `all-linear` beside named layers."""
    refused = (
        r"lora\.targets: Qwen2ForCausalLM has no layer `lm_head` to adapt; accepted: q_proj, .*, down_proj, or all"
    )
    with pytest.raises(PipelineError, match=refused):
        add_adapters(plain.qwen2(), _lora(targets=["q_proj", "lm_head"]), seed=1)
    with pytest.raises(PipelineError, match="all-linear means all layers; remove it or the other targets"):
        validate(LoraConfig, {**LORA, "targets": ["all-linear", "q_proj"]}, name="lora")
