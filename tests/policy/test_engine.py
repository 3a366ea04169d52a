import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.policy.engine import NonFiniteError, Policy, load_parameters
from components.policy.logprobs import LogprobModel
from tests import tiny
from tests.policy import plain, processes

pytestmark = pytest.mark.slow

_WEIGHT_DECAY = 0.5
"""Large enough for three steps to show what decays."""


def _policy(checkpoint: Checkpoint, **settings: Any) -> Policy:
    return Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(**settings))


def _step(policy: Policy, first: int = 0, *, learning_rate: float = 1e-3, max_tokens: int = 60) -> dict[str, float]:
    """Take a step on eight problems."""
    checkpoint = tiny.checkpoint()
    examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS[first : first + 8]]
    num_tokens = sum(len(example.completion_ids) for example in examples)
    for batch in tiny.batches(examples, max_tokens):
        policy.backward(-policy(batch).logprobs_N.sum() / num_tokens)
    return policy.step(learning_rate)


def _train_with_torch_alone(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and gradient norms after steps on one batch with AdamW, whose decay leaves norms alone, and clipping."""
    checkpoint = tiny.checkpoint()
    model = LogprobModel(checkpoint.model, temperature=1.0)
    layer_norms = [weight for name, weight in checkpoint.model.named_parameters() if "norm" in name]
    matrices = [weight for name, weight in checkpoint.model.named_parameters() if "norm" not in name]
    groups = [{"params": layer_norms, "weight_decay": 0.0}, {"params": matrices, "weight_decay": _WEIGHT_DECAY}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    (batch,) = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100_000)
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
        (1, "optimizer", 1),
        (2, "none", 100_000),
        (2, "optimizer", 1),
        (3, "none", 60),
        (3, "all", 100_000),
    ],
)
def test_training_equals_plain_torch(zero_stage: int, offload: str, max_tokens: int) -> None:
    """Weights and norms after three clipped steps, for any sharding, place of the optimizer, and micro-batches."""
    checkpoint = tiny.checkpoint()
    policy = _policy(checkpoint, zero_stage=zero_stage, offload=offload, weight_decay=_WEIGHT_DECAY)
    norms = [_step(policy, learning_rate=1e-2, max_tokens=max_tokens)["gradient_norm"] for _ in range(3)]
    expected_weights, expected_norms = _train_with_torch_alone(3)
    assert min(expected_norms) > 1.0, "clipping has to act in this test"
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    with policy.gather_full_parameters():
        for name, weight in checkpoint.model.named_parameters():
            torch.testing.assert_close(weight.detach(), expected_weights[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointed_layers_are_computed_again(checkpointing: bool) -> None:
    """Gradient checkpointing runs each layer a second time in the backward pass; without it once is enough."""
    checkpoint = tiny.checkpoint()
    checkpoint.model.eval()  # as a loaded model is
    policy = _policy(checkpoint, gradient_checkpointing=checkpointing)
    calls: list[int] = []
    layers: Any = checkpoint.model.get_decoder().layers
    layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[0])], 100)
    policy.backward(-policy(batch).logprobs_N.mean())
    assert len(calls) == (2 if checkpointing else 1)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_bf16_trains_keeps_its_type_and_sums_micro_batches_without_rounding(zero_stage: int) -> None:
    """The loss falls, and the norm of a gradient of many micro-batches is that of one batch, to bf16's precision."""
    norms = []
    for max_tokens in (1, 100_000):
        checkpoint = tiny.checkpoint(dtype=torch.bfloat16)
        policy = _policy(checkpoint, precision="bf16", zero_stage=zero_stage)
        norms.append(_step(policy, max_tokens=max_tokens)["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    losses = [_step(policy, learning_rate=1e-2)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 1.0
    assert {weight.dtype for weight in checkpoint.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    """One bad micro-batch among good ones raises, and no weight has changed."""
    checkpoint = tiny.checkpoint()
    policy = _policy(checkpoint)
    before = [weight.detach().clone() for weight in checkpoint.model.parameters()]
    first, second, *_ = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100)
    policy.backward(-policy(first).logprobs_N.mean())
    policy.backward(-policy(second).logprobs_N.mean() * bad)
    with pytest.raises(NonFiniteError, match="stopped before the optimizer step"):
        policy.step(1e-2)
    assert all(torch.equal(*pair) for pair in zip(checkpoint.model.parameters(), before, strict=True))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_stops_the_run(zero_stage: int) -> None:
    """A finite loss with an infinite slope (the root of zero) is an error."""
    checkpoint = tiny.checkpoint()
    policy = _policy(checkpoint, zero_stage=zero_stage)
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[0])], 1000)
    logprobs_N = policy(batch).logprobs_N
    policy.backward((logprobs_N - logprobs_N.detach()).clamp(min=0).sum().sqrt())
    with pytest.raises(NonFiniteError, match="norm of the gradient"):
        policy.step(1e-3)


@pytest.mark.parametrize(
    ("zero_stage", "offload", "steps_before"),
    [(0, "none", 1), (1, "optimizer", 1), (2, "none", 1), (2, "optimizer", 0), (3, "none", 0), (3, "all", 1)],
)
def test_a_resumed_policy_ends_in_the_same_bits(
    tmp_path: Path, zero_stage: int, offload: str, steps_before: int
) -> None:
    """After one more step its state is that of the policy that went on; before the first step there are no moments."""
    settings = {"zero_stage": zero_stage, "offload": offload}
    straight = _policy(tiny.checkpoint(), **settings)
    for number in range(steps_before):
        _step(straight, number)
    save_file(straight.state(), tmp_path / "state")
    _step(straight, steps_before)
    other = tiny.checkpoint(seed=2)
    load_parameters(LogprobModel(other.model, temperature=1.0), tmp_path / "state")
    resumed = _policy(other, **settings)
    resumed.load_state(tmp_path / "state")
    _step(resumed, steps_before)
    before, state, expected = load_file(tmp_path / "state"), resumed.state(), straight.state()
    assert float(before["num_steps"]) == steps_before
    assert float(state["num_steps"]) == steps_before + 1
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert any(not torch.equal(state[name], before[name]) for name in before if name.endswith("weight"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process measured that has all groups, and each of two that have half of them."""
    folder = tmp_path_factory.mktemp("two_processes")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.policy.processes", str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [processes.measure(), *(torch.load(folder / f"{rank}.pt") for rank in range(2))]


@pytest.mark.parametrize(("zero_stage", "relative"), [(0, 1e-10), (2, 1e-6), (3, 1e-6)])
def test_gradients_depend_on_neither_processes_nor_sharding(
    measured: list[dict[str, Any]], zero_stage: int, relative: float
) -> None:
    """Each process ends up with the gradient that autograd gives of the whole sum, computed in float64.

    To 1e-10 as it leaves the backward pass, summed over micro-batches and processes, and unsharded also as DeepSpeed
    hands it to the optimizer. Sharded, DeepSpeed keeps it in float32, and there it is right to that precision.
    """
    expected = plain.alone(plain.gpt2(), processes.SEQUENCES, temperature=0.7).gradients
    for process in measured:
        found = process[f"zero_{zero_stage}"]
        for key, error in (("gradients", 1e-10), ("held", relative)):
            assert found[key].keys() == {f"model.{name}" for name in expected}
            for name, gradient in expected.items():
                plain.assert_near(found[key][f"model.{name}"], gradient, error, f"{key} of {name}")


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_metrics_and_weights_are_those_of_all_processes(measured: list[dict[str, Any]], zero_stage: int) -> None:
    """Loss and norm are those of the whole step in every process, and so are the new weights."""
    expected = plain.alone(plain.gpt2(), processes.SEQUENCES, temperature=0.7)
    scores = zip(processes.SEQUENCES, expected.logprobs, expected.entropies, strict=True)
    loss = sum(float((plain.weights(each) * torch.stack(of_each, dim=1)).sum()) for each, *of_each in scores)
    norm = float(torch.cat([gradient.flatten() for gradient in expected.gradients.values()]).norm())
    alone = measured[0][f"zero_{zero_stage}"]
    for process in measured:
        found = process[f"zero_{zero_stage}"]
        assert found["figures"]["loss"] == pytest.approx(loss, rel=1e-10)
        assert found["figures"]["gradient_norm"] == pytest.approx(norm, rel=1e-6)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-6)
    before = dict(LogprobModel(plain.gpt2(), temperature=1.0).named_parameters())
    moved = max(float((weight - before[name].detach()).abs().max()) for name, weight in alone["weights"].items())
    assert moved == pytest.approx(processes.LEARNING_RATE, rel=0.01)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_bad_loss_in_one_process_stops_all(measured: list[dict[str, Any]], zero_stage: int) -> None:
    """Where one process has a loss that is NaN, each of them reports it, and no weight has changed."""
    expected = {"error": "the loss is nan; stopped before the optimizer step", "changed": False}
    assert [process["bad"][zero_stage] for process in measured] == [expected] * 3
