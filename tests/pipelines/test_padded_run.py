"""Models that take padded rows alone, from a folder through the whole pipeline."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, NemotronHConfig, PreTrainedConfig, Qwen3NextConfig

from components.preflight.config import load_params
from components.prepare_data.prepare import prepare
from components.shared.jsonl import read_rows
from components.shared.problem import Split, read_problems
from tests import chat_model
from tests.pipelines.project import Project, copy_project, unmoved
from tests.presets import ROOT

_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_QWEN = {
    **{"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_NEMOTRON = {
    **{"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    **{"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "num_hidden_layers": 4},
}


def _project(folder: Path, family: str) -> Project:
    """A copy of the project with an untrained model of the family, for the problems of the smoke preset."""
    project = copy_project(folder)
    (folder / "words").mkdir()
    prepare(load_params(ROOT / "params/smoke.yaml").prepare_data, problems=folder / "words")
    tokenizer = chat_model.tokenizer(None, problems=read_problems(folder / "words", Split.TRAIN))
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    common = {**_SIZE, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    config: PreTrainedConfig
    config = Qwen3NextConfig(**common, **_QWEN) if family == "qwen3_next" else NemotronHConfig(**common, **_NEMOTRON)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return project


@pytest.mark.parametrize(
    "family",
    [pytest.param("qwen3_next", marks=pytest.mark.slow), pytest.param("nemotron_h", marks=pytest.mark.long(minutes=1))],
)
def test_it_goes_through_the_whole_pipeline(family: str, tmp_path: Path) -> None:
    """It is trained, measured and registered; what it samples has the log-probabilities that are trained on."""
    changes = ("train_sft.model.base=model", "train_sft.model.answer=declared", "register.licence=mit")
    settings = [f"--set={change}" for change in changes]
    run = _project(tmp_path, family).pipeline("run", "--params", "params/smoke.yaml", *settings)
    assert run.exit_code == 0, run.printed + run.errors
    assert "padded rows, each prompt once per completion: " in run.printed
    outputs = run.outputs
    steps = [row for _, row in read_rows(outputs["train_grpo"]["training"] / "steps.jsonl")]
    assert max(row["sampler_mismatch_max"] for row in steps) < 1e-4
    assert unmoved(outputs["train_grpo"]["policy"], outputs["train_sft"]["reference"]) == []
    assert "registered in registry" in run.printed
