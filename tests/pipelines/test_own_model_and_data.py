"""The tutorial's "your own model and data": one params file with five keys, from a CSV and a chat model to the report.

The model is not fine-tuned: it is its own reference.
"""

import csv
import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from components.shared import jsonl
from components.shared.lineage import file_digest
from tests import chat_model
from tests.pipelines.project import Project, copy_project
from tests.presets import ROOT

pytestmark = pytest.mark.slow

_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"

_TUTORIAL = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8").partition("### Your own model and data")[2]
_REWARD, _PARAMS = (_TUTORIAL.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "yaml"))
_SIZES = (
    *("train_grpo.num_steps=2", "train_grpo.warmup_steps=0", "train_grpo.prompts_per_step=2"),
    *("train_grpo.group_size=4", "train_grpo.sampling.max_new_tokens=12", "train_grpo.sampler.vllm=null"),
    *("train_grpo.validation.every_steps=2", "train_grpo.validation.num_problems=4", "evaluate.vllm=null"),
    *("evaluate.max_new_tokens=12", "evaluate.limit=12", "report.gate.enforce=false"),
)
"""What a test has no time for, and a gate that an untrained model need not pass."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A copy of the project in which a user has put a model, a CSV, a reward and a params file."""
    made = copy_project(tmp_path)
    chat_model.write(made.folder / "my-model", chat_model.HEADERS, max_tokens=4096)
    (made.folder / "data/own").mkdir(exist_ok=True)
    with (made.folder / "data/own/problems.csv").open("w", newline="", encoding="utf-8") as file:
        numbers = itertools.product(range(10, 60), range(10, 100))
        rows = ([f"What is {first} + {second}?", first + second] for first, second in numbers)
        csv.writer(file).writerows([["prompt", "final"], *rows])
    (made.folder / "my_rewards.py").write_text(_REWARD)
    (made.folder / "mine.yaml").write_text(_PARAMS)
    return made


def test_five_keys_lead_from_a_csv_and_a_model_to_the_report(project: Project) -> None:
    """The file is accepted as it is; in a run of smaller size every stage puts the same conversation to the model."""
    preview = project.pipeline("run", "--params", "mine.yaml", "--dry-run")
    assert preview.exit_code == 0, preview.errors
    sizes = [option for size in _SIZES for option in ("--set", size)]
    run = project.pipeline("run", "--params", "mine.yaml", *sizes)
    assert run.exit_code == 0, run.printed + run.errors
    assert "my-model@v0.0.1 registered in registry" in run.printed
    page = (run.folder / "report.html").read_text()
    assert "my-problems" in page
    assert "No fine-tuning: the reference is the base model" in page
    assert "not fine-tuned" in (run.outputs["register"]["registration"] / "model_card.md").read_text()
    evaluation = run.outputs["evaluate"]["evaluation"]
    base, sft, grpo = ((evaluation / name / "records.jsonl").read_text() for name in ("base", "sft", "grpo"))
    assert base == sft
    probe = jsonl.read_json(evaluation / "grpo/probes.json")["probes"][0]
    question = next(each["question"] for each in map(json.loads, grpo.splitlines()) if each["id"] == probe["id"])
    prompt = AutoTokenizer.from_pretrained(project.folder / "my-model").decode(probe["prompt_ids"])
    assert prompt.endswith(f"user<|end_header_id|>\n\n{question}<|eot_id|>{_ASSISTANT}")
    assert not list(run.outputs["train_sft"]["reference"].glob("*.safetensors"))
    training = run.outputs["train_grpo"]["training"]
    header = (training / "curves.csv").read_text().splitlines()[0].split(",")
    assert {"validation_accuracy", "reward_my_rewards_brevity"} <= set(header)
    described = jsonl.read_json(run.outputs["train_grpo"]["policy"] / "pipeline.json")
    assert described["chat"]["system"].startswith("Please reason step by step")
    lineage = (training / "lineage.json").read_text()
    assert file_digest(project.folder / "my_rewards.py") in lineage
