import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from components.policy.checkpoint import Checkpoint
from components.policy.config import LoraConfig
from components.policy.engine import NonFiniteError, Policy
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters
from components.policy.parallel import Ranks
from tests import tiny
from tests.policy import plain, processes

slow = pytest.mark.slow
LORA = LoraConfig(rank=2, alpha=6.0, targets=["q_proj", "down_proj"])
_WEIGHT_DECAY = 0.5
"""Large enough for three steps to show what decays."""
_BETAS, _EPSILON = (0.8, 0.99), 1e-4
"""Unlike the defaults of torch and of the config."""


def _train_with_torch_alone(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and gradient norms after steps on one batch with AdamW, whose decay leaves norms alone, and clipping."""
    checkpoint = tiny.checkpoint()
    model = LogprobModel(checkpoint.model, temperature=1.0)
    layer_norms = [weight for name, weight in checkpoint.model.named_parameters() if "norm" in name]
    matrices = [weight for name, weight in checkpoint.model.named_parameters() if "norm" not in name]
    groups = [{"params": layer_norms, "weight_decay": 0.0}, {"params": matrices, "weight_decay": _WEIGHT_DECAY}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=_BETAS, eps=_EPSILON)
    (batch,) = tiny.batches(checkpoint.examples(tiny.PROBLEMS[:8]), 100_000)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (-model(batch).logprobs_N.mean()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("zero_stage", "offload", "max_tokens"),
    [
        (0, "none", 1),
        (0, "none", 100_000),
        (2, "none", 100_000),
        pytest.param(1, "optimizer", 1, marks=slow),
        pytest.param(2, "optimizer", 1, marks=slow),
        pytest.param(3, "none", 60, marks=slow),
        pytest.param(3, "all", 100_000, marks=slow),
    ],
)
def test_training_equals_plain_torch(zero_stage: int, offload: str, max_tokens: int) -> None:
    """Weights and norms after three clipped steps, for any sharding, place of the optimizer, and micro-batches."""
    checkpoint = tiny.checkpoint()
    adam = {"betas": _BETAS, "epsilon": _EPSILON, "weight_decay": _WEIGHT_DECAY}
    policy = plain.policy(checkpoint, zero_stage=zero_stage, offload=offload, **adam)
    norms = [plain.step(policy, learning_rate=1e-2, max_tokens=max_tokens)["gradient_norm"] for _ in range(3)]
    expected_weights, expected_norms = _train_with_torch_alone(3)
    assert min(expected_norms) > 1.0, "clipping has to act in this test"
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    with policy.gather_full_parameters():
        for name, weight in checkpoint.model.named_parameters():
            torch.testing.assert_close(weight.detach(), expected_weights[name], rtol=1e-3, atol=2e-5)


def test_a_part_that_text_does_not_reach_is_in_the_state_too() -> None:
    """As an encoder of images is: it has no gradient, and stays as it is but for weight decay."""
    checkpoint = tiny.checkpoint()
    checkpoint.model.encoder = nn.Linear(4, 4)
    policy = plain.policy(checkpoint, zero_stage=0)
    plain.step(policy, learning_rate=1e-2, max_tokens=100_000)
    moments = [each for name, each in policy.state().items() if "encoder" in name and "exp_avg" in name]
    assert len(moments) == 4
    assert not any(each.any() for each in moments)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointed_layers_are_computed_again(checkpointing: bool) -> None:
    """Gradient checkpointing runs each layer a second time in the backward pass; without it once is enough."""
    checkpoint = tiny.checkpoint()
    policy = plain.policy(checkpoint, gradient_checkpointing=checkpointing)
    calls: list[int] = []
    layers: Any = checkpoint.model.get_decoder().layers
    layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    (batch,) = tiny.batches(checkpoint.examples([tiny.PROBLEMS[0]]), 100)
    policy.backward(-policy(batch).logprobs_N.mean())
    assert len(calls) == (2 if checkpointing else 1)
    assert not any(module.training for module in checkpoint.model.modules())


@slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_bf16_trains_keeps_its_type_and_sums_micro_batches_without_rounding(zero_stage: int) -> None:
    """The loss falls, and a gradient in 512 equal parts is that of the whole: sums in bf16 lose a quarter of it."""
    norms = []
    for num_parts in (1, 512):
        checkpoint = tiny.checkpoint(dtype=torch.bfloat16)
        policy = plain.policy(checkpoint, precision="bf16", zero_stage=zero_stage)
        (batch,) = tiny.batches(checkpoint.examples([tiny.PROBLEMS[0]]), 100)
        for _ in range(num_parts):
            policy.backward(-policy(batch).logprobs_N.mean() / num_parts)
        norms.append(policy.step(1e-3)["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    losses = [plain.step(policy, learning_rate=1e-2)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 1.0
    assert {weight.dtype for weight in checkpoint.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run(zero_stage: int, is_loss: bool) -> None:
    """A finite loss may have an infinite slope (the root of zero). A bad loss changes no weight and no moment."""
    checkpoint = tiny.checkpoint()
    policy = plain.policy(checkpoint, zero_stage=zero_stage)
    plain.step(policy, learning_rate=1e-2, max_tokens=100_000)
    before = policy.state()
    (batch,) = tiny.batches(checkpoint.examples([tiny.PROBLEMS[0]]), 1000)
    logprobs_N = policy(batch).logprobs_N
    loss = logprobs_N.sum() * torch.nan if is_loss else (logprobs_N - logprobs_N.detach()).clamp(min=0).sum().sqrt()
    policy.backward(loss)
    message = "the loss is nan; stopped before the optimizer step" if is_loss else "norm of the gradient"
    with pytest.raises(NonFiniteError, match=message):
        policy.step(1e-2)
    assert not is_loss or all(torch.equal(before[name], value) for name, value in policy.state().items())


@pytest.mark.parametrize(
    ("zero_stage", "offload", "steps_before", "lora"),
    [
        (0, "none", 1, None),
        (0, "none", 1, LORA),
        (2, "none", 1, None),
        pytest.param(1, "optimizer", 1, None, marks=slow),
        pytest.param(2, "optimizer", 0, None, marks=slow),
        pytest.param(3, "none", 0, None, marks=slow),
        pytest.param(3, "all", 1, None, marks=slow),
        pytest.param(3, "none", 1, LORA, marks=slow),
    ],
)
def test_a_resumed_policy_ends_in_the_same_bits(
    tmp_path: Path, zero_stage: int, offload: str, steps_before: int, lora: LoraConfig | None
) -> None:
    """Its state after a step, or before the first one, without moments; with adapters, frozen weights are not in it."""

    def checkpoint(seed: int) -> Checkpoint:
        checkpoint = tiny.checkpoint(seed=1 if lora else seed)
        add_adapters(checkpoint.model, lora, seed=seed)
        return checkpoint

    settings = {"zero_stage": zero_stage, "offload": offload}
    straight = plain.policy(checkpoint(1), **settings)
    for number in range(steps_before):
        plain.step(straight, number)
    save_file(straight.state(), tmp_path / "state")
    plain.step(straight, steps_before)
    resumed = Policy(
        LogprobModel(checkpoint(2).model, temperature=1.0), tiny.engine_config(**settings), tmp_path / "state"
    )
    plain.step(resumed, steps_before)
    before, state, expected = load_file(tmp_path / "state"), resumed.state(), straight.state()
    assert (float(before["num_steps"]), float(state["num_steps"])) == (steps_before, steps_before + 1)
    assert all(("lora_" in name) == bool(lora) for name in before if name != "num_steps")
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert any(not torch.equal(state[name], before[name]) for name in before if name.endswith("weight"))


@slow
def test_training_imports_no_libraries_that_it_does_not_use() -> None:
    """Scikit-learn, pandas, PyArrow and MLflow would take two seconds and 150 MB of each process."""
    code = (
        "import sys, components.evaluate.worker, components.train_sft.worker, components.train_grpo.worker\n"
        "from components.policy.engine import import_deepspeed; import_deepspeed()\n"
        "assert not {'sklearn', 'pandas', 'pyarrow', 'mlflow'} & sys.modules.keys()\n"
        "import sklearn.metrics, mlflow\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    """What one process measured that has all groups, and each of two that have half of them."""
    folder = tmp_path_factory.mktemp("two_processes")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.policy.processes", str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=variables, timeout=240, check=True)
    return [processes.measure(), *(torch.load(folder / f"{rank}.pt") for rank in range(2))]


@slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_step_depends_on_neither_processes_nor_sharding(measured: list[dict[int, Any]], zero_stage: int) -> None:
    """Gradient, loss and norm are those of the whole sum in float64, to float32's precision; all weights agree."""
    expected = plain.alone(plain.gpt2(), processes.SEQUENCES, temperature=0.7)
    norm = float(torch.cat([gradient.flatten() for gradient in expected.gradients.values()]).norm())
    alone = measured[0][zero_stage]["weights"]
    for process in measured:
        actual = process[zero_stage]
        assert len(actual["gradients"]) == (len(alone) if process is not measured[2] else 0)
        for name, gradient in actual["gradients"].items():
            plain.assert_near(gradient, expected.gradients[name.removeprefix("model.")], 2e-5, name)
        assert actual["figures"]["loss"] == pytest.approx(expected.loss, rel=1e-5)
        assert actual["figures"]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    ranks = [process[zero_stage]["weights"] for process in measured[1:]]
    assert all(torch.equal(weight, ranks[1][name]) for name, weight in ranks[0].items())
    before = dict(LogprobModel(plain.gpt2(), temperature=1.0).named_parameters())
    moved = max(float((weight - before[name].detach()).abs().max()) for name, weight in alone.items())
    assert moved == pytest.approx(processes.LEARNING_RATE, rel=0.01)


def test_a_bad_loss_in_another_process_stops_this_one() -> None:
    """Before its weights change: all stop together."""
    checkpoint = tiny.checkpoint()
    policy = plain.policy(checkpoint, zero_stage=0)
    (batch,) = tiny.batches(checkpoint.examples([tiny.PROBLEMS[0]]), 1000)
    before = {name: value.clone() for name, value in policy.state().items()}
    policy.backward(policy(batch).logprobs_N.sum())
    with (
        patch.object(Ranks, "all_gather", lambda _, value, what: [value, math.nan]),
        pytest.raises(NonFiniteError, match="the loss is nan; stopped before the optimizer step"),
    ):
        policy.step(1e-3)
    assert all(torch.equal(before[name], value) for name, value in policy.state().items())
