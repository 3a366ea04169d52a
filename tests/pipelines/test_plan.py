"""`grpo-pipeline plan`: shapes of models, the run that a params file describes, and what is printed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params, load_params
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.model_shape import shape_of
from pipelines.plan.counted import counted_shape
from pipelines.plan.hardware import GIB, GPUS, gpu
from pipelines.plan.memory import memory_of, peak
from pipelines.plan.run import run_of
from pipelines.plan.step_time import step_time
from tests.pipelines.conftest import Program
from tests.presets import FILES, ROOT, preset

DEEPSEEK = ROOT / "params/deepseekmath-7b.yaml"


def model(base: str | Path) -> ModelConfig:
    """The model of a params file."""
    return ModelConfig(base=str(base), prompt="{question}", answer=AnswerPolicy.DECLARED)


def test_known_models_have_their_published_size() -> None:
    """To the parameter, without a download."""
    sizes = {
        **{"Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648},
        **{"meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248, "Qwen/Qwen3-4B-Base": 4_022_468_096},
    }
    assert {base: shape_of(model(base)).num_parameters for base in sizes} == sizes


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    """Counted, they are those that are known for the same config.json."""
    counted = counted_shape(_config(tmp_path, family, num_key_value_heads=2, tie_word_embeddings=tied))
    assert shape_of(model(tmp_path)).num_parameters == counted.num_parameters


def test_a_dense_model_of_a_family_with_experts_can_be_planned(tmp_path: Path) -> None:
    """Its config says that it has no experts."""
    assert counted_shape(_config(tmp_path, "qwen2_moe", num_experts=0)).num_parameters > 0


def _config(folder: Path, family: str, **values: object) -> Path:
    from transformers import AutoConfig

    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    AutoConfig.for_model(family, **size, vocab_size=50, **values).save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "config.json: no such file"),
        ({"model_type": "gpt2"}, "model_type gpt2 cannot be planned; accepted: llama, mistral, qwen2, qwen3"),
        ({"model_type": "llama"}, "has no 'num_attention_heads'"),
    ],
)
def test_a_model_without_a_known_shape_is_refused(tmp_path: Path, config: dict[str, str] | None, problem: str) -> None:
    """With what is missing; a similar name is no help."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PipelineError, match=problem):
        shape_of(model(tmp_path))
    with pytest.raises(PipelineError, match=r"model Qwen/Qwen2\.5-8B: unknown architecture; give a folder"):
        shape_of(model("Qwen/Qwen2.5-8B"))


@pytest.mark.parametrize(
    ("family", "billions", "active"), [("mixtral", 46.7, 12.9), ("qwen3_next", 80, 3), ("gpt_oss", 117, 5.1)]
)
def test_any_model_is_counted_as_published(tmp_path: Path, family: str, billions: float, active: float) -> None:
    """From transformers' default config: all weights, and those that compute a token, within 3 % or 1 billion."""
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    shape = counted_shape(tmp_path / "config.json")
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (shape.active_weights + shape.head_weights) / 1e9 == pytest.approx(active, rel=0.03, abs=1)


def test_the_plan_of_a_counted_model_is_an_upper_bound(tmp_path: Path, plan: Program) -> None:
    """A Llama that is counted takes at least the time and memory of one that is known, and the plan says why."""
    from transformers import LlamaConfig

    LlamaConfig().save_pretrained(tmp_path)
    params = load_params(ROOT / "params/qwen-7b.yaml")
    known = replace(run_of(params, 8, None), shape=shape_of(model(tmp_path)))
    counted = replace(known, shape=counted_shape(tmp_path / "config.json"), padded=True, shared_prompts=False)
    assert counted.shape.active_weights == known.shape.layer_weights
    device = gpu("h100")
    assert peak(memory_of(counted)) >= peak(memory_of(known))
    assert step_time(counted, device).total > step_time(known, device).total
    (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {ROOT}/params/qwen-7b.yaml\ntrain_sft: {{model: {{base: {tmp_path}}}}}\n")
    assert "lfm2: planned in padded rows" in plan(path).out


@pytest.fixture
def plan(program: Program) -> Program:
    """`grpo-pipeline plan` of a params file for eight GPUs, unless options say otherwise."""
    return lambda path, *more, **code: program("plan", f"--params={path}", "--gpus=8", "--gpu=h100", *more, **code)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_can_be_planned(path: Path, plan: Program) -> None:
    """With a verdict."""
    assert re.search(r"^(Fits|Does not fit): ", plan(path).out, re.MULTILINE)


def test_the_text_of_a_plan(tmp_path: Path, plan: Program) -> None:
    """Heading, memory by stage, verdict, and the hours of all steps; the change that it names is enough."""
    lines = plan(DEEPSEEK, "--gpu=H100").lines
    assert lines[0] == f"{DEEPSEEK} on 8 x h100: 6.91B parameters in bf16, ZeRO 3"
    rows = {line[:22].strip(): line[22:].split() for line in lines[3:16]}
    assert rows["Memory of a GPU, GiB"] == ["ZeRO", "0", "ZeRO", "1", "ZeRO", "2", "ZeRO", "3*"]
    assert rows["weights"] == ["12.9", "12.9", "12.9", "1.6"]
    assert rows["gradients"] == ["25.7", "25.7", "3.2", "3.2"]
    assert rows["optimizer"] == ["77.2", "9.7", "9.7", "9.7"]
    assert rows["can train in bf16"] == ["no"] * 4  # in 72.7 GiB, 92 % of what the device reports
    text = "\n".join(lines)
    assert "72.7 are usable.\nThe cheapest change of train_grpo that makes it fit: sampling.max_batch_size: 64." in text
    assert "Time of a step, if it fitted" in text
    assert " completion tokens per second over a whole step; 900 steps take " in text
    assert re.search(r"\nupdate +\d+\.\d s\n(.*\n)*update +[\d.]+ ms\n", text + plan(ROOT / "params/smoke.yaml").out)
    overlay = tmp_path / "changed.yaml"
    overlay.write_text(f"extends: {DEEPSEEK}\ntrain_grpo: {{sampling: {{max_batch_size: 64}}}}\n")
    assert "\nFits: " in plan(overlay).out


@pytest.mark.parametrize(
    ("key", "values", "num_servers", "tensor_parallel"),
    [
        ("vllm", {"weights_by": "folder"}, 0, 1),
        ("servers", {"num_servers": 2, "devices": ["4,5", "6,7"]}, 4, 2),
        ("servers", {"num_servers": 3, "devices": None}, 3, 1),
    ],
)
def test_vllm_is_planned_as_configured(key: str, values: Any, num_servers: int, tensor_parallel: int) -> None:
    """Beside the trainer or on GPUs of its own, with its cache."""
    changed = preset("deepseekmath-7b")
    changed["train_grpo"]["sampler"] |= {key: {"max_tokens": 2048, "cache_gib": 20.0, **values}}
    params = Params.model_validate(changed)
    run = run_of(params, 8, None)
    assert run.sampler == ("vllm_server" if num_servers else "vllm")
    assert (run.num_server_gpus, run.tensor_parallel) == (num_servers, tensor_parallel)
    assert (run.cache_bytes, run.num_trainers) == (20 * GIB, 8 - num_servers)
    if num_servers:
        with pytest.raises(PipelineError, match=f"sampler.servers takes {num_servers} of them and leaves none"):
            run_of(params, num_servers, None)


def test_settings_are_those_of_the_file() -> None:
    """None is assumed but the mean lengths, of which that of completions may be given."""
    run = run_of(load_params(DEEPSEEK), 4, 300)
    assert (run.prompts, run.group_size, run.completion_tokens, run.micro_batch_tokens) == (16, 64, 1024, 16384)
    assert (run.prompt_tokens, run.mean_completion_tokens, run.reference) == (1024, 300, "replicated")
    dapo = run_of(load_params(ROOT / "params/dapo.yaml"), 4, None)
    assert (dapo.reference, dapo.minibatches) == ("none", 16)
    assert (dapo.mean_prompt_tokens, dapo.completion_tokens, dapo.mean_completion_tokens) == (256, 20480, 8192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h1000"], f"--gpu h1000: unknown GPU; accepted: {', '.join(GPUS)}"),
        (["--gpu="], f"--gpu: is missing; name a GPU, such as --gpu rtx-4090; accepted: {', '.join(GPUS)}"),
        (["--gpus", "0"], "--gpus 0: from 1 to 16,384 is accepted"),
        (["--completion-tokens=2e3"], "--completion-tokens 2000: from 1 to sampling.max_new_tokens, 1024, is accepted"),
        (["--gpu", "v100"], "--gpu v100: it has no bfloat16; set train_grpo.engine.precision: fp32"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, plan: Program) -> None:
    """With what is accepted, and exit code 2."""
    assert plan(DEEPSEEK, *options, code=2) == ([], f"error: {message}\n")


def test_every_gpu_is_listed() -> None:
    """On the page that people look it up in."""
    page = (ROOT / "docs/how-to/large-runs.md").read_text()
    assert [name for name in GPUS if f"`{name}`" not in page] == []
