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

from components.policy.config import EngineConfig
from components.policy.engine import NonFiniteError, Policy, load_parameters
from components.policy.logprobs import LogprobModel
from components.policy.parallel import init_ranks
from components.shared.errors import PipelineError
from tests import tiny
from tests.policy import plain, processes

_WEIGHT_DECAY = 0.5
"""Large enough for three steps to show what decays."""


def _trained(
    *, steps: int = 3, max_tokens: int = 100, **settings: object
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after some optimizer steps on the same examples, and the gradient norms on the way."""
    checkpoint = tiny.checkpoint()
    config = tiny.engine_config(weight_decay=_WEIGHT_DECAY, **settings)
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), config)
    examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]]
    num_tokens = sum(len(example.completion_ids) for example in examples)
    norms = []
    for _ in range(steps):
        for batch in tiny.batches(examples, max_tokens):
            engine.backward(-engine(batch).logprobs_N.sum() / num_tokens)
        norms.append(engine.step(1e-2)["gradient_norm"])
    with engine.gather_full_parameters():
        return {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}, norms


def _plainly_trained(steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same with nothing but torch: one batch, AdamW whose decay leaves norms alone, clipping."""
    checkpoint = tiny.checkpoint()
    scorer = LogprobModel(checkpoint.model, temperature=1.0)
    norms_of_layers: list[Tensor] = []
    matrices: list[Tensor] = []
    for name, weight in checkpoint.model.named_parameters():
        (norms_of_layers if "norm" in name else matrices).append(weight)
    groups = [{"params": norms_of_layers, "weight_decay": 0.0}, {"params": matrices, "weight_decay": _WEIGHT_DECAY}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    (batch,) = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100_000)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (-scorer(batch).logprobs_N.mean()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)))
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}, norms


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 100_000])
def test_training_equals_plain_torch_for_any_sharding_and_split(zero_stage: int, max_tokens: int) -> None:
    """Weights and gradient norms after three clipped AdamW steps are those of plain torch on one batch."""
    weights, norms = _trained(zero_stage=zero_stage, max_tokens=max_tokens)
    expected_weights, expected_norms = _plainly_trained()
    assert min(expected_norms) > 1.0, "the test wants clipping to act"
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointed_layers_are_computed_again(checkpointing: bool) -> None:
    """Gradient checkpointing runs each layer a second time in the backward pass; without it once is enough."""
    checkpoint = tiny.checkpoint()
    scorer = LogprobModel(checkpoint.model.eval(), temperature=1.0)  # as a model is that was loaded
    engine = Policy(scorer, tiny.engine_config(gradient_checkpointing=checkpointing))
    calls: list[int] = []
    layers: Any = checkpoint.model.get_decoder().layers
    layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[0])], 100)
    engine.backward(-engine(batch).logprobs_N.mean())
    assert len(calls) == (2 if checkpointing else 1)


def test_bf16_trains_and_keeps_its_type() -> None:
    """In bf16 the loss falls, and the weights stay bf16."""
    checkpoint = tiny.checkpoint(dtype=torch.bfloat16)
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(precision="bf16", zero_stage=2))
    (batch,) = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100_000)
    losses = []
    for _ in range(8):
        engine.backward(-engine(batch).logprobs_N.mean())
        losses.append(engine.step(1e-2)["loss"])
    assert losses[-1] < losses[0] - 1.0
    assert {weight.dtype for weight in checkpoint.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    """One bad micro-batch among good ones raises, and no weight has changed."""
    checkpoint = tiny.checkpoint()
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config())
    before = [weight.detach().clone() for weight in checkpoint.model.parameters()]
    first, second, *_ = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100)
    engine.backward(-engine(first).logprobs_N.mean())
    engine.backward(-engine(second).logprobs_N.mean() * bad)
    with pytest.raises(NonFiniteError, match="stopped before the optimizer step"):
        engine.step(1e-2)
    for weight, kept in zip(checkpoint.model.parameters(), before, strict=True):
        assert torch.equal(weight, kept)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_bf16_sums_micro_batches_without_rounding_them(zero_stage: int) -> None:
    """In bf16 the norm of the summed gradient is within bf16's own precision of that of one batch."""
    norms = []
    for max_tokens in (1, 100_000):
        checkpoint = tiny.checkpoint(dtype=torch.bfloat16)
        engine = Policy(
            LogprobModel(checkpoint.model, temperature=1.0),
            tiny.engine_config(precision="bf16", zero_stage=zero_stage),
        )
        examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS]
        num_tokens = sum(len(example.completion_ids) for example in examples)
        for batch in tiny.batches(examples, max_tokens):
            engine.backward(-engine(batch).logprobs_N.sum() / num_tokens)
        norms.append(engine.step(1e-3)["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_ends_the_run(zero_stage: int) -> None:
    """A finite loss with an infinite slope (the root of zero) is an error, not a step."""
    checkpoint = tiny.checkpoint()
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(zero_stage=zero_stage))
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[0])], 1000)
    logprobs_N = engine(batch).logprobs_N
    engine.backward((logprobs_N - logprobs_N.detach()).clamp(min=0).sum().sqrt())
    with pytest.raises(NonFiniteError, match="norm of the gradient"):
        engine.step(1e-3)


@pytest.mark.parametrize(
    ("zero_stage", "offload"), [(0, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "all")]
)
def test_an_engine_goes_on_from_the_state_of_another(tmp_path: Path, zero_stage: int, offload: str) -> None:
    """Two steps, and one with the second in another engine, end in the same bits, wherever the optimizer is kept."""
    config = tiny.engine_config(zero_stage=zero_stage, offload=offload)
    straight = _stepped(LogprobModel(tiny.checkpoint().model, temperature=1.0), config, 2)
    state = _stepped(LogprobModel(tiny.checkpoint().model, temperature=1.0), config, 1)
    scorer = LogprobModel(tiny.checkpoint(seed=2).model, temperature=1.0)
    load_parameters(scorer, _saved(state, tmp_path))
    resumed = _stepped(scorer, config, 1, tmp_path / "state")
    assert float(resumed["num_steps"]) == 2
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert any(not torch.equal(resumed[name], state[name]) for name in state if name.endswith("weight"))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_state_from_before_the_first_step_is_one(tmp_path: Path, zero_stage: int) -> None:
    """A run may have had nothing to learn from so far: it goes on as if it had not been stopped."""
    config = tiny.engine_config(zero_stage=zero_stage)
    straight = _stepped(LogprobModel(tiny.checkpoint().model, temperature=1.0), config, 1)
    state = Policy(LogprobModel(tiny.checkpoint().model, temperature=1.0), config).state()
    assert float(state["num_steps"]) == 0
    scorer = LogprobModel(tiny.checkpoint(seed=2).model, temperature=1.0)
    load_parameters(scorer, _saved(state, tmp_path))
    resumed = _stepped(scorer, config, 1, tmp_path / "state")
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_where_the_optimizer_is_does_not_change_what_it_does() -> None:
    """In host memory or not, cut up or not, two steps move the weights alike, up to rounding."""
    expected, *others = (
        _stepped(LogprobModel(tiny.checkpoint().model, temperature=1.0), tiny.engine_config(**settings), 2)
        for settings in (
            {"zero_stage": 0},
            {"zero_stage": 2, "offload": "optimizer"},
            {"zero_stage": 3, "offload": "all"},
        )
    )
    for each in others:
        for name, value in expected.items():
            torch.testing.assert_close(each[name], value, rtol=1e-4, atol=1e-6)


def _saved(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "state")
    return folder / "state"


def _stepped(scorer: LogprobModel, config: EngineConfig, steps: int, state: Path | None = None) -> dict[str, Tensor]:
    """The state after some steps, from that of another engine if there is one."""
    engine = Policy(scorer, config)
    if state is not None:
        engine.load_state(state)
    checkpoint = tiny.checkpoint()
    done = 0 if state is None else int(load_file(state)["num_steps"])
    for number in range(done, done + steps):
        for batch in tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[number : number + 4]], 60):
            engine.backward(-engine(batch).logprobs_N.sum() / 100)
        engine.step(1e-3)
    return engine.state()


@pytest.mark.parametrize(("asked", "launched"), [(1, 2), (2, 1)])
def test_another_number_of_processes_than_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: int, launched: int
) -> None:
    """A process that finds itself alone would do all of the work, and each of too many as well."""
    monkeypatch.setenv("WORLD_SIZE", str(launched))
    with pytest.raises(PipelineError, match=f"num_processes is {asked}, but {launched} w"):
        init_ranks(tiny.engine_config(num_processes=asked))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process measured that has all groups, and each of two that have half of them."""
    folder = tmp_path_factory.mktemp("two_processes")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    launched = [*launch, "-m", "tests.policy.processes", str(folder)]
    done = subprocess.run(launched, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [processes.measure(), *(torch.load(folder / f"{rank}.pt") for rank in range(2))]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_figures_and_weights_are_those_of_all_processes(measured: list[dict[str, Any]], zero_stage: int) -> None:
    """Loss and norm are those of the whole step in every process, and so are the weights that come of it."""
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


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_bad_loss_in_one_process_stops_all(measured: list[dict[str, Any]], zero_stage: int) -> None:
    """Where one process has a loss that is not a number, each of them says so, and no weight has changed."""
    for process in measured:
        assert process["bad"][zero_stage] == {
            "error": "the loss is nan; stopped before the optimizer step",
            "changed": False,
        }
