"""All stages with a chat model, from raw data to a registered version, in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from components.evaluate.evaluate import STAGE as EVALUATE
from components.preflight.config import Params
from components.prepare_data.prepare import STAGE as PREPARE_DATA
from components.register.register import STAGE as REGISTER
from components.report.report import STAGE as REPORT
from components.shared import jsonl
from components.shared.stage import run
from components.train_grpo.train import STAGE as TRAIN_GRPO
from components.train_sft.train import STAGE as TRAIN_SFT
from components.validate_data.validate import STAGE as VALIDATE_DATA
from tests import chat_model
from tests.presets import preset

_STAGES = (PREPARE_DATA, VALIDATE_DATA, TRAIN_SFT, TRAIN_GRPO, EVALUATE, REPORT, REGISTER)
_PROMPT = "<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def _params(folder: Path, model: Path, *, num_steps: int) -> Params:
    values = preset()
    del values["validate_data"]["model"]
    sources = [{"kind": "word_problems", "num_train": 60, "num_test": 12, "worked_fraction": 0.5}]
    chat = {"base": str(model), "chat": {"system": "Be exact."}, "prompt": "{question}"}
    limits = {"max_prompt_tokens": 200, "max_solution_tokens": 200, "min_train_rows": 1, "min_test_rows": 1}
    for section, changes in {
        "prepare_data": {"sources": sources},
        "validate_data": limits,
        "train_sft": {"model": chat, "num_steps": num_steps, "warmup_steps": 0, "max_tokens": 400},
        "train_grpo": {"num_steps": 2, "warmup_steps": 0},
        "evaluate": {"max_new_tokens": 16},
        "register": {"registry": str(folder / "registry")},
    }.items():
        values[section] |= changes
    return Params.model_validate(values)


def _run_all(folder: Path, params: Params) -> dict[str, Path]:
    """Run every stage, and return the outputs by name."""
    outputs: dict[str, Path] = {}
    for stage in _STAGES:
        own = {name: _name(stage.name, name) for name in stage.outputs}
        folders = {name: outputs[name] for name in stage.inputs}
        folders |= {name: folder / stage.name / name for name in stage.outputs}
        run(stage, getattr(params, stage.name), folders, work_root=folder / "work")
        outputs |= {own[name]: folders[name] for name in stage.outputs}
    return outputs


def _name(stage: str, output: str) -> str:
    return f"{stage.removeprefix('train_')}_training" if output == "training" else output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model as the hub has them."""
    return chat_model.write(tmp_path_factory.mktemp("chat") / "model")


def _records(outputs: Mapping[str, Path], name: str) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_rows(outputs["evaluation"] / name / "records.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [2, 0])
def test_a_chat_model_goes_through_all_stages(tmp_path: Path, model: Path, num_steps: int) -> None:
    """Every stage puts the same conversation to it; without fine-tuning it is its own reference, answered for once."""
    outputs = _run_all(tmp_path, _params(tmp_path, model, num_steps=num_steps))
    tokenizer = AutoTokenizer.from_pretrained(model)
    probe = jsonl.read_json(outputs["evaluation"] / "grpo" / "probes.json")["probes"][0]
    question = next(each["question"] for each in _records(outputs, "grpo") if each["id"] == probe["id"])
    assert tokenizer.decode(probe["prompt_ids"]) == _PROMPT.format(question)
    described = jsonl.read_json(outputs["policy"] / "pipeline.json")
    assert described == {"prompt": "{question}", "answer": "last_sentence", "chat": {"system": "Be exact."}}
    unchanged = _records(outputs, "base") == _records(outputs, "sft")
    assert unchanged == (num_steps == 0)
    weights = sorted(path.name for path in outputs["reference"].glob("*.safetensors"))
    assert weights == (["model.safetensors"] if num_steps else [])
    assert len((outputs["sft_training"] / "curves.csv").read_text().splitlines()) == 1 + num_steps
    told = "No fine-tuning: the reference is the base model" in (outputs["report"] / "report.html").read_text()
    assert told == (num_steps == 0)
    card = (outputs["registration"] / "model_card.md").read_text()
    assert "Be exact." in card
    assert ("not fine-tuned" in card) == (num_steps == 0)
