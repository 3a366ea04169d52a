import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import get_world_size
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.cluster.launch import run_ranks
from components.policy.checkpoint import Checkpoint, load, save
from components.policy.config import LoraConfig
from components.policy.engine import Policy, load_parameters
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.lora import add_adapters, copy_merged_weights, merged_state_dict
from components.rollout.sampler import Sampler, Sampling
from components.rollout.transformers_sampler import ShardedSampler, TransformersSampler
from components.shared import jsonl
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.problem import Split, write_problems
from components.train_sft.config import TrainSFTConfig
from components.train_sft.worker import train_rank
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
    """The log-probabilities of random completion tokens, in the order of the sequences."""
    sequences = plain.sequences()
    batches = tiny.batches(sequences, 30)
    num_tokens = sum(len(each.completion_ids) for each in sequences)
    return completion_logprobs(LogprobModel(model, temperature=1.0), batches, num_tokens)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names in the same order, with the same tensors to the last bit."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_adapters_change_nothing(dtype: torch.dtype) -> None:
    """Log-probabilities, saved weights and random state stay the same to the last bit; so they do without a config."""
    model = plain.qwen2().to(dtype)
    logprobs_M, state, random_numbers = _logprobs(model), _state(model), torch.get_rng_state()
    add_adapters(model, None, seed=1)
    assert all(parameter.requires_grad for parameter in model.parameters())
    add_adapters(model, _lora(), seed=1)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert torch.equal(_logprobs(model), logprobs_M)
    _assert_same(merged_state_dict(model), state)


def test_adapters_depend_only_on_the_seed() -> None:
    """Not on random numbers used before, which may differ between processes."""
    drawn: list[dict[str, Tensor]] = []
    for seed in (1, 1, 2):
        model = plain.qwen2()
        torch.rand(len(drawn))
        add_adapters(model, _lora(), seed=seed)
        drawn.append({name: weight for name, weight in _state(model).items() if "lora_A" in name})
    _assert_same(drawn[0], drawn[1])
    assert not any(torch.equal(drawn[0][name], drawn[2][name]) for name in drawn[0])


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["v_proj", "up_proj"], {"v_proj", "up_proj"}),
        (["all-linear"], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_the_named_layers_get_adapters(targets: list[str], expected: set[str]) -> None:
    """In every block, with both matrices of the rank; nothing else has a gradient, not even the output layer."""
    model = plain.qwen2()
    add_adapters(model, _lora(targets=targets), seed=1)
    trained = {name: weight.shape for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-4] for name in trained} == expected
    assert len(trained) == 2 * 2 * len(expected)
    assert all(2 in shape for shape in trained.values())


def test_gradients_by_hand() -> None:
    """Of (W + alpha / rank B A) x, in float64; W and its bias have none."""
    torch.manual_seed(0)
    model: Any = nn.Sequential()
    model.layer = nn.Linear(3, 2).double()
    model.get_output_embeddings = lambda: None
    add_adapters(model, _lora(targets=["layer"]), seed=1)
    a_RI, b_OR = (matrices["default"].weight for matrices in (model.layer.lora_A, model.layer.lora_B))
    assert a_RI.dtype == b_OR.dtype == torch.float64
    with torch.no_grad():
        b_OR.copy_(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    x_I, slope_O = torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([0.3, -0.7]).double()
    (slope_O * model.layer(x_I)).sum().backward()
    torch.testing.assert_close(b_OR.grad, 3.0 * torch.outer(slope_O, a_RI @ x_I), rtol=1e-12, atol=0)
    torch.testing.assert_close(a_RI.grad, 3.0 * torch.outer(b_OR.T @ slope_O, x_I), rtol=1e-12, atol=0)
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == [
        "layer.base_layer.weight",
        "layer.base_layer.bias",
    ]


@pytest.mark.parametrize("make", [plain.qwen2, plain.qwen3], ids=["with biases", "with a tied output layer"])
def test_a_saved_model_has_its_adapters_merged(tmp_path: Path, make: Any) -> None:
    """AutoModelForCausalLM loads the base's class and names, with what the adapted model says; which stays itself."""
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
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("base", "saved")]
    assert files[0] == files[1]
    configs = [(tmp_path / name / "config.json").read_text() for name in ("base", "saved")]
    assert configs[0] == configs[1]
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("base", "saved")]
    assert tensors[0].keys() == tensors[1].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(checkpoint.model)
    torch.testing.assert_close(_logprobs(loaded), with_adapters_M, rtol=0, atol=2e-5)


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


def _engine(checkpoint: Checkpoint, **changes: Any) -> Policy:
    return Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(**changes))


def _adapted(dtype: torch.dtype = torch.float32) -> Checkpoint:
    checkpoint = tiny.checkpoint(dtype=dtype)
    add_adapters(checkpoint.model, _lora(targets=["all-linear"]), seed=1)
    return checkpoint


def _train(engine: Policy, checkpoint: Checkpoint, num_steps: int) -> list[float]:
    """Learn some solutions; return the loss of each step."""
    examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS[:6]]
    num_tokens = sum(len(example.completion_ids) for example in examples)
    losses = []
    for _ in range(num_steps):
        for batch in tiny.batches(examples, 100):
            engine.backward(-engine(batch).logprobs_N.sum() / num_tokens)
        losses.append(engine.step(1e-2)["loss"])
    return losses


def _plain(engine: Policy, checkpoint: Checkpoint) -> dict[str, Tensor]:
    with engine.gather_full_parameters():
        return copy.deepcopy(merged_state_dict(checkpoint.model))


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
    checkpoint = _adapted(torch.bfloat16 if changes.get("precision") else torch.float32)
    before = _state(checkpoint.model)
    engine = _engine(checkpoint, **changes)
    losses = _train(engine, checkpoint, 6)
    assert losses[-1] < losses[0] - 1.0
    with engine.gather_full_parameters():
        for name, weight in checkpoint.model.state_dict().items():
            assert weight.dtype == before[name].dtype
            assert torch.equal(weight, before[name]) == ("lora_" not in name), name


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_adapters_and_their_optimizer_are_resumed(tmp_path: Path, zero_stage: int) -> None:
    """To the last bit, though one of them saved its model on the way; frozen weights are not in what is kept."""
    straight = _adapted()
    engine = _engine(straight, zero_stage=zero_stage)
    _train(engine, straight, 2)
    state = engine.state()
    save_file(state, tmp_path / "state")
    with engine.gather_full_parameters():
        save(straight, tmp_path)
    _train(engine, straight, 2)
    assert all("lora_" in name for name in state if name != "num_steps")
    resumed = _adapted()
    scorer = LogprobModel(resumed.model, temperature=1.0)
    load_parameters(scorer, tmp_path / "state")
    other = Policy(scorer, tiny.engine_config(zero_stage=zero_stage))
    other.load_state(tmp_path / "state")
    _train(other, resumed, 2)
    _assert_same(_plain(other, resumed), _plain(engine, straight))


def _sampled(sampler: Sampler) -> tuple[list[tuple[int, ...]], Tensor]:
    """Completions, and the log-probability of every token of them."""
    questions = [problem.question for problem in tiny.PROBLEMS[:4]]
    groups = sampler.generate(questions, Sampling(num_samples=4, temperature=1.0, max_new_tokens=12, seed=1))
    completions = [completion for group in groups for completion in group]
    logprobs = torch.tensor([logprob for each in completions for logprob in each.logprobs])
    return [each.tokens.completion_ids for each in completions], logprobs


@pytest.mark.slow
def test_every_sampler_samples_from_the_adapted_model(tmp_path: Path) -> None:
    """In process, from a copy under ZeRO 3, and whoever loads the saved folder: the same tokens, the same odds."""
    checkpoint = tiny.checkpoint()
    sharded = ShardedSampler(checkpoint, 64)
    before_ids, _ = _sampled(TransformersSampler(checkpoint, 64))
    add_adapters(checkpoint.model, _lora(), seed=1)
    _scatter(checkpoint.model)
    ids, logprobs = _sampled(TransformersSampler(checkpoint, 64))
    assert ids != before_ids
    engine = _engine(checkpoint, zero_stage=3)
    sharded.attach(engine, [])
    sharded.update_weights(1)
    with engine.gather_full_parameters():
        save(checkpoint, tmp_path)
    for sampler in (sharded, TransformersSampler(load(tmp_path, dtype=torch.float32), 64)):
        found_ids, found_logprobs = _sampled(sampler)
        assert found_ids == ids
        torch.testing.assert_close(found_logprobs, logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "self_attn", "proj"])
def test_an_unknown_target_is_refused_with_the_accepted_ones(target: str) -> None:
    """With those that can: the output layer is not one of them."""
    with pytest.raises(PipelineError) as raised:
        add_adapters(plain.qwen2(), _lora(targets=["q_proj", target]), seed=1)
    assert str(raised.value) == (
        f"engine.lora.targets: Qwen2ForCausalLM has no layer `{target}` to adapt; accepted: q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj, down_proj, or all-linear for all of them"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["all-linear", "q_proj"]}, "all-linear means all layers"),
        ({"targets": []}, "lora.targets"),
        ({"rank": 0}, "lora.rank"),
        ({"alpha": 0}, "lora.alpha"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    """By the key that has to change."""
    with pytest.raises(PipelineError, match=message):
        validate(LoraConfig, {**LORA, **changes}, name="lora")


STAGES = {1: (2,), 2: (0, 2, 3)}
"""The stages of ZeRO for each number of processes."""


def fine_tune(config: TrainSFTConfig, *, problems: Path, folder: Path) -> dict[str, float]:
    """Fine-tune under each of `STAGES`, the outputs in folder/zero_STAGE-PROCESSES."""
    for stage in STAGES[config.engine.num_processes]:
        each = folder / f"zero_{stage}-{config.engine.num_processes}"
        outputs = {name: each / name for name in ("base_model", "reference", "training", "work")}
        for path in outputs.values():
            path.mkdir(parents=True, exist_ok=True)
        changed = config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": stage})})
        train_rank(changed, problems=problems, **outputs)
    return {"processes": get_world_size()}


def _fine_tuning(num_processes: int) -> TrainSFTConfig:
    fields = {
        "model": tiny.MODEL.model_dump(),
        "seed": 1,
        "num_steps": 5,
        "examples_per_step": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "final_learning_rate_fraction": 0.1,
        "max_tokens": 64,
        "checkpoint": tiny.CHECKPOINT,
        "engine": tiny.engine_config(num_processes=num_processes, lora=LORA).model_dump(),
    }
    return TrainSFTConfig.model_validate(fields)


@pytest.mark.long
@pytest.mark.slow
def test_fine_tuning_does_not_depend_on_processes_or_sharding(tmp_path: Path) -> None:
    """One process, or two under ZeRO 0, 2 and 3: the same plain reference, which is better than its base."""
    (tmp_path / "problems").mkdir()
    write_problems(tmp_path / "problems", Split.TRAIN, tiny.PROBLEMS)
    folders = {"problems": tmp_path / "problems", "folder": tmp_path}
    for number in STAGES:
        found = run_ranks(
            fine_tune,
            _fine_tuning(number),
            folders,
            num_processes=number,
            work=tmp_path / "work",
            grace_s=1,
        )
        assert found == {"processes": number}
    runs = [tmp_path / f"zero_{stage}-{number}" for number, stages in STAGES.items() for stage in stages]
    references = [load_file(run / "reference" / "model.safetensors") for run in runs]
    for run, reference in zip(runs, references, strict=True):
        base = load_file(run / "base_model" / "model.safetensors")
        _assert_same(base, {name: tiny.checkpoint().model.state_dict()[name] for name in base})
        changed = {name for name in base if not torch.equal(base[name], reference[name])}
        assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}
        for name, weight in references[0].items():
            torch.testing.assert_close(reference[name], weight, rtol=1e-3, atol=1e-4, msg=f"{run.name}: {name}")
        rows = [row for _, row in jsonl.read_rows(run / "training" / "steps.jsonl")]
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
