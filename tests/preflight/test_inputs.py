import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.preflight.config import Params, contradictions, load_params
from components.preflight.inputs import missing_here
from components.shared.errors import PipelineError
from components.shared.model import context_tokens
from pipelines.cli import main
from tests.presets import FILES, preset

SMOKE = preset()
GSM8K = {"kind": "gsm8k", "train": "train.jsonl", "test": "test.jsonl"}


@pytest.fixture
def values() -> dict[str, Any]:
    """The smoke preset, to be changed."""
    return copy.deepcopy(SMOKE)


def _params(values: dict[str, Any]) -> Params:
    return Params.model_validate(values)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        values = values[part]
    values[last] = value


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_shipped_preset_contradicts_itself(path: Path) -> None:
    """What is shipped can start, given its data and model."""
    assert contradictions(load_params(path)) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"report.gate.target": ["gsm8k"]},
            'report.gate.target: no test problem comes from "gsm8k"; sources with test problems: word_problems',
        ),
        (
            {"prepare_data.sources": [{"kind": "gsm8k", "train": "train.jsonl"}], "report.gate.target": ["gsm8k"]},
            "prepare_data.sources: no source has test problems; set `test` or `num_test` of one",
        ),
        (
            {"validate_data.min_train_rows": 401},
            "validate_data.min_train_rows: is 401, and prepare_data.sources has at most 400 train problems",
        ),
        (
            {"validate_data.min_test_rows": 61},
            "validate_data.min_test_rows: is 61, and prepare_data.sources has at most 60 test problems",
        ),
        (
            {"train_grpo.prompts_per_step": 500},
            "train_grpo.prompts_per_step: is 500, and prepare_data.sources has at most 400 train problems",
        ),
        (
            {"train_grpo.prompts.source_weights": {"word_problems": 1.0, "math": 1.0}},
            'train_grpo.prompts.source_weights: no train problem comes from "math"; '
            "sources with train problems: word_problems",
        ),
        (
            {"train_grpo.reward.weights": {"code_tests": 1.0}},
            "train_grpo.reward.weights.code_tests: problems from word_problems have no unit tests; "
            "leave it out, `accuracy` judges both kinds",
        ),
    ],
)
def test_keys_of_two_sections_that_cannot_both_hold_are_named(
    values: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    """Each by the key to change, with what would be accepted."""
    for key, value in changes.items():
        _put(values, key, value)
    assert line in contradictions(_params(values))


def test_a_source_without_a_weight_is_named(values: dict[str, Any]) -> None:
    """Where shares of sources are set, each source with train problems has one."""
    values["prepare_data"]["sources"].append(GSM8K)
    _put(values, "train_grpo.prompts.source_weights", {"word_problems": 1.0})
    (line,) = contradictions(_params(values))
    assert (
        line
        == 'train_grpo.prompts.source_weights: "gsm8k" has train problems and no weight; give it one (0 leaves it out)'
    )


def test_the_size_of_a_file_is_not_guessed(values: dict[str, Any]) -> None:
    """A source whose file alone decides how many problems it has contradicts no number."""
    values["prepare_data"]["sources"].append(GSM8K)
    _put(values, "validate_data.min_train_rows", 100_000)
    assert contradictions(_params(values)) == []
    values["prepare_data"]["sources"][1]["train_limit"] = 1_000
    (line,) = contradictions(_params(values))
    assert line.endswith("is 100,000, and prepare_data.sources has at most 1,400 train problems")


def test_an_engine_that_holds_no_whole_sequence_is_refused(values: dict[str, Any]) -> None:
    """The server would refuse the first long prompt, after minutes of fine-tuning."""
    engine = {
        "max_tokens": 71,
        "cache_gib": 1.0,
        "compile": False,
        "start_deadline_s": 60.0,
        "request_deadline_s": 60.0,
        "weights_by": "folder",
    }
    _put(values, "train_grpo.sampler.vllm", engine)
    (line,) = contradictions(_params(values))
    assert line.startswith("train_grpo.sampler.vllm.max_tokens: is 71; a prompt (validate_data.max_prompt_tokens) with")
    assert line.endswith("takes up to 72")
    engine["max_tokens"] = 72
    assert contradictions(_params(values)) == []


def test_everything_that_a_run_lacks_is_named_at_once(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate, data, the model, rewards and the registry, a line each with its key; and no trace of a run is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "judge").mkdir()
    (tmp_path / "my_rewards.py").write_text("def brevity(problem, completion, grade):\n    return 0.0\n")
    (tmp_path / "broken_rewards.py").write_text("raise SystemExit(0)\n")
    values["prepare_data"]["sources"] = [GSM8K]
    (tmp_path / "test.jsonl").write_text("{}\n")
    for stage in ("validate_data", "train_sft"):
        _put(values, f"{stage}.model.base", "nobody/no-such-model")
    weights = {"my_rewards:brevity": 1.0, "my_rewards:bervity": 1.0, "reward_model": 1.0}
    _put(values, "train_grpo.reward.weights", weights)
    judge = {"base": "judge", "initial_rollouts": 0, "learning_rate": 1e-5, "epochs": 1, "replay_fraction": 0.1}
    _put(values, "train_grpo.reward.model", judge)
    _put(values, "register.registry", f"file://{tmp_path}/no-registry")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    assert main(["run", "--params", "mine.yaml"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "error: 8 to correct before this run can start"
    assert sorted(line.split(": ")[1] for line in lines) == [
        "prepare_data.sources.0.test",
        "prepare_data.sources.0.train",
        "register.registry",
        "register.storage",
        "report.gate.target",
        "train_grpo.reward.model.base",
        "train_grpo.reward.weights.my_rewards:bervity",
        "train_sft.model.base",
    ]
    assert not (tmp_path / "outputs").exists()
    values["train_grpo"]["reward"]["weights"] = {"broken_rewards:any": 1.0, "reward_model": 1.0}
    assert any("broken_rewards" in line for line in missing_here(_params(values)))


def test_a_file_of_another_format_is_refused_by_its_first_rows(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One good row among the first is enough: how many may be malformed is decided when all are read."""
    monkeypatch.chdir(tmp_path)
    values["prepare_data"]["sources"] = [GSM8K]
    rows = ["question,answer", *(f"What is {number}?,{number}" for number in range(30))]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "test.jsonl").write_text("{}\n" * 5 + json.dumps({"question": "1?", "answer": "#### 1"}) + "\n")
    (line,) = missing_here(_params(values))
    assert line.startswith(
        "prepare_data.sources.0.train: train.jsonl: none of its first 20 rows can be used; train.jsonl:1"
    )


def _without_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "holds no config.json"


def _without_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "holds no weights"


def _without_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "holds no tokenizer.json"


@pytest.mark.parametrize("spoil", [_without_config, _without_weights, _without_tokenizer])
def test_a_folder_that_holds_half_a_model_is_refused(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    """The file that is missing is named."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    assert context_tokens(str(tmp_path)) == 128
    with pytest.raises(PipelineError, match=spoil(tmp_path)):
        context_tokens(str(tmp_path))


def test_layers_that_cannot_be_trained_are_refused_by_the_config_alone(tmp_path: Path) -> None:
    """In one line that names them, before anything is loaded."""
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    (tmp_path / "config.json").write_text('{"text_config": {"layer_types": ["full_attention", "linear_attention"]}}')
    with pytest.raises(PipelineError, match="has layers of type linear_attention; models whose"):
        context_tokens(str(tmp_path))


def test_limits_beyond_what_the_base_model_reads_are_named(values: dict[str, Any]) -> None:
    """A model made from scratch has its limit in its preset; others have it in their config."""
    _put(values, "evaluate.max_new_tokens", 465)
    _put(values, "train_sft.max_tokens", 513)
    assert missing_here(_params(values)) == [
        "evaluate.max_new_tokens: 465 tokens after a prompt of up to 48 (validate_data.max_prompt_tokens) are more "
        "than the 512 that scratch:tiny reads",
        "train_sft.max_tokens: is 513, and scratch:tiny reads 512 tokens",
    ]
    _put(values, "evaluate.max_new_tokens", 464)
    _put(values, "train_sft.max_tokens", 512)
    assert missing_here(_params(values)) == []


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 2048}}, 2048),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 8.0}}, None),
        ({}, None),
    ],
)
def test_the_context_of_a_model_is_read_from_its_config(
    tmp_path: Path, config: dict[str, Any], tokens: int | None
) -> None:
    """Under the names of several families; a stretched or unstated context is not guessed."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    assert context_tokens(str(tmp_path)) == tokens
