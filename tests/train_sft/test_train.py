from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.policy.checkpoint import create, load, save
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.lineage import digest
from components.shared.model import ModelConfig, weights_folder
from components.shared.problem import Split, write_problems
from components.train_sft.config import TrainSFTConfig
from components.train_sft.train import train
from components.train_sft.worker import _step
from tests import chat_model, tiny
from tests.train_grpo.written_out import plain_scores


def _config(**changes: Any) -> TrainSFTConfig:
    sizes = {"num_steps": 3, "examples_per_step": 6, "max_tokens": 64}
    rate = {"learning_rate": 1e-2, "warmup_steps": 1, "final_learning_rate_fraction": 0.1}
    parts = {"model": tiny.MODEL, "checkpoint": tiny.CHECKPOINT, "engine": tiny.engine_config().model_dump()}
    fields = {"seed": 1, **sizes, **rate, **parts}
    return TrainSFTConfig.model_validate({**fields, **changes})


def _run(folder: Path, config: TrainSFTConfig) -> dict[str, float]:
    """Run the step function over the tiny problems, its outputs in `folder`."""
    folders = {name: folder / name for name in ("problems", "base_model", "reference", "training")}
    for path in folders.values():
        path.mkdir(parents=True)
    write_problems(folder / "problems", Split.TRAIN, tiny.PROBLEMS)
    return train(config, **folders, work=folder / "work")


@pytest.mark.parametrize("num_steps", [0, 3])
def test_observations_without_room_are_refused_before_training(tmp_path: Path, num_steps: int) -> None:
    """With the least limit, and whether or not there is fine-tuning."""
    tools = {"environment": "calculator", "max_observation_tokens": 13}
    model = {**tiny.MODEL.model_dump(), "tools": tools}
    with pytest.raises(PipelineError, match=r"^train_sft\.model\.tools\.max_observation_tokens: .* to 14 or more$"):
        _run(tmp_path, _config(model=model, num_steps=num_steps, warmup_steps=0))
    assert not list((tmp_path / "reference").iterdir())


def test_what_an_environment_wrote_is_read_and_not_learned() -> None:
    """By hand: of a call, its output and the boxed answer the first and the last are learned, with the end token."""
    call, output, answer = "Multiply.\n```calculator\n2*3\n```\n", "```output\n6\n```\n", "#### 6"
    problems = [tiny.problem(1, solution=call + output + answer), tiny.problem(2)]
    values = {"base": "scratch:tiny", "answer": "boxed", "tools": {"environment": "calculator"}}
    model = ModelConfig.model_validate(values)
    checkpoint = create(model, problems, seed=1, dtype=torch.float32)
    acting, plain = checkpoint.examples(problems)
    ((start, stop),), ids = acting.environment, acting.completion_ids
    assert ids[start:stop] == checkpoint.read_observation("6", ended=False).ids
    assert (ids[:start], checkpoint.decode(ids[stop:-1]), ids[-1]) == (checkpoint.encode(call), r"\boxed{6}", 1)
    assert plain.environment == ()
    with torch.no_grad():
        logprobs = [plain_scores(checkpoint.model, sequence)[0] for sequence in (acting, plain)]
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(micro_batch_tokens=50))
    loss = _step(_config(), checkpoint, engine, [acting, plain], step=1)["loss"]
    assert loss == pytest.approx(-float(torch.cat(logprobs).mean()), rel=1e-5)


def test_it_writes_the_base_model_the_reference_and_the_curves(tmp_path: Path) -> None:
    """The base is the untrained model, the reference differs from it, and there is a row per step.

    With ZeRO 3 it writes whole weights, equal to those of stage 2 up to rounding.
    """
    metrics = _run(tmp_path / "two", _config())
    _run(tmp_path / "three", _config(engine=tiny.engine_config(zero_stage=3).model_dump()))
    folders = ("two/base_model", "two/reference", "three/reference")
    base, reference, other = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters()) for name in folders
    )
    untrained = dict(tiny.checkpoint().model.named_parameters())
    torch.testing.assert_close(base, untrained, rtol=0, atol=0)
    assert not any(torch.equal(weight, untrained[name]) for name, weight in reference.items())
    torch.testing.assert_close(other, reference, rtol=1e-3, atol=1e-4)
    rows = [row for _, row in jsonl.read_rows(tmp_path / "two/training/steps.jsonl")]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["loss"] == metrics["loss"] < rows[0]["loss"]
    assert (tmp_path / "two/training/curves.csv").read_text().splitlines()[0] == ",".join(rows[0])


@pytest.mark.parametrize("is_scratch", [True, False])
def test_without_steps_the_reference_is_the_base_model(tmp_path: Path, is_scratch: bool) -> None:
    """An existing one is not copied, and the curves have their columns and no row."""
    save(tiny.checkpoint(), tmp_path / "existing")
    base = tiny.MODEL.base if is_scratch else str(tmp_path / "existing")
    model = {**tiny.MODEL.model_dump(), "base": base, "prompt": "Q: {question}"}
    assert _run(tmp_path, _config(model=model, num_steps=0, warmup_steps=5)) == {}
    assert digest(tmp_path / "reference") == digest(tmp_path / "base_model")
    assert len(list((tmp_path / "reference").glob("*.safetensors"))) == is_scratch
    reference = load(tmp_path / "reference", dtype=torch.float32)
    assert reference.config.prompt == "Q: {question}"
    if not is_scratch:
        assert weights_folder(tmp_path / "reference") == tmp_path / "existing"
    assert (tmp_path / "training" / "curves.csv").read_text() == "step,loss,gradient_norm,learning_rate,epoch\n"
    assert (tmp_path / "training" / "steps.jsonl").read_text() == ""


def test_a_template_that_shows_no_answers_is_refused(tmp_path: Path) -> None:
    """Before anything is learned from them."""
    folder = chat_model.write(tmp_path / "model", chat_model.REASONING)
    with pytest.raises(PipelineError, match=r"shows no answer to learn from.*train_sft\.num_steps: 0"):
        _run(tmp_path, _config(model={"base": str(folder), "chat": {}}))


def test_examples_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    """The count is in the metrics; where nothing fits, the error says the limit and the shortest example."""
    lengths = sorted(len(example) for example in tiny.checkpoint().examples(tiny.PROBLEMS))
    limit = lengths[len(lengths) // 2]
    left_out = _run(tmp_path / "some", _config(max_tokens=limit))["left_out"]
    assert left_out == sum(length > limit for length in lengths)
    with pytest.raises(PipelineError, match=rf"max_tokens: no example .* the shortest has {lengths[0]}; raise it"):
        _run(tmp_path / "all", _config(max_tokens=4))
