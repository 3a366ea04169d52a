import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from pipelines.cli import main
from pipelines.plan import plan
from pipelines.plan.hardware import GIB, GPUS, gpu, usable_bytes
from pipelines.plan.models import KNOWN_MODELS, shape_of

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))]
DEEPSEEK = str(ROOT / "params" / "deepseekmath-7b.yaml")


def model(base: str) -> ModelConfig:
    """A params file's model."""
    return ModelConfig(base=base, prompt="{question}", answer=AnswerPolicy.DECLARED)


@pytest.mark.parametrize(
    ("base", "num_parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("deepseek-ai/deepseek-math-7b-base", 6_910_365_696),
        ("deepseek-ai/deepseek-llm-7b-chat", 6_910_365_696),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B-Base", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_well_known_models_have_their_published_size(base: str, num_parameters: int) -> None:
    """To the parameter, without anything being downloaded."""
    assert shape_of(model(base)).num_parameters == num_parameters


def test_a_folder_says_its_shape(tmp_path: Path) -> None:
    """By its config.json; what it leaves out is as transformers has it."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = 64 * (64 + 32 + 32) + 64 + 32 + 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert shape_of(model(str(tmp_path))).num_parameters == 2 * 100 * 64 + 2 * layer + 64
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "head_dim": 8}))
    tied = shape_of(model(str(tmp_path)))
    assert (tied.tied, tied.head_size) == (True, 8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_parameters_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    """As transformers makes it from the same config.json, tied and untied."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    for tied in (True, False):
        heads = {"num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": tied}
        config = AutoConfig.for_model(family, **size, **heads)
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).parameters()
        assert shape_of(model(str(tmp_path))).num_parameters == sum(each.numel() for each in parameters)


@pytest.mark.slow
def test_a_model_from_scratch_has_the_shape_that_is_planned() -> None:
    """But for its vocabulary, which is made from the data."""
    from dataclasses import replace

    from tests import tiny

    made = tiny.checkpoint().model
    found = replace(shape_of(tiny.MODEL), vocabulary_size=made.config.vocab_size)
    assert found.num_parameters == made.num_parameters()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "holds no config.json"),
        ({"model_type": "gpt2"}, "model_type gpt2 cannot be planned; accepted: llama, mistral, qwen2, qwen3"),
        ({"model_type": "llama"}, "has no 'num_attention_heads'"),
    ],
)
def test_a_folder_that_says_too_little_is_refused(tmp_path: Path, config: dict[str, str] | None, problem: str) -> None:
    """With what is missing."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PipelineError, match=problem):
        shape_of(model(str(tmp_path)))


@pytest.mark.parametrize("base", ["someone/else-7b", "no/such/folder", "Qwen/Qwen2.5-8B"])
def test_an_unknown_model_is_asked_for_its_shape(base: str) -> None:
    """A guess would be worse than a question."""
    with pytest.raises(PipelineError, match=f"model {base}: its shape is not known here; give a folder"):
        shape_of(model(base))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For machines and for people, with the same verdict."""
    arguments = ["plan", "--params", str(path), "--gpus", "16", "--gpu", "h200"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = found["memory_bytes"][f"zero_{found['zero_stage']}"]
    peak = max(parts["update_peak"], parts["sampling_peak"])
    assert found["fits"] == (peak <= found["usable_bytes"])
    assert (found["smallest_change"] is None) or not found["fits"]
    assert found["step_s"] == pytest.approx(sum(found["phases_s"].values()))
    assert [point["num_gpus"] for point in found["scaling"]["strong"]["points"]][-1] == 1024
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert ("\nFits: " in text) == found["fits"]
    assert any(line.split()[:2] == ["step", f"{found['step_s']:.1f}"] for line in text.splitlines())
    assert max(len(line) for line in text.splitlines()) < 200


def test_the_words_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """A heading, memory by part and stage, the verdict, time by phase, PPO, and where it stops scaling."""
    assert main(["plan", "--params", DEEPSEEK, "--gpus", "8", "--gpu", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{DEEPSEEK} on 8 x h100: 6.91B parameters in bf16, ZeRO 3"
    rows = {line[:22].strip(): line[22:].split() for line in lines[3:16]}
    assert rows["Memory of a GPU, GiB"] == ["ZeRO", "0", "ZeRO", "1", "ZeRO", "2", "ZeRO", "3*"]
    assert rows["weights"] == ["12.9", "12.9", "12.9", "1.6"]
    assert rows["gradients"] == ["25.7", "25.7", "3.2", "3.2"]
    assert rows["optimizer"] == ["77.2", "9.7", "9.7", "9.7"]
    assert rows["fits into 72.7"] == ["no", "no", "no", "no"]
    text = "\n".join(lines)
    remedy = "the smallest change that makes it fit: sampling.max_batch_size: 64."
    assert f" of 72.7 usable GiB; {remedy}" in text
    assert "Under PPO, a critic of the same shape adds 13.6 GiB per GPU" in text
    assert "Efficiency falls below 50 % at 32 GPUs" in text
    assert "A step has 16 prompts; more GPUs than that are refused." in text


def test_the_change_that_is_named_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written into the params file, it fits."""
    params = yaml.safe_load(Path(DEEPSEEK).read_text())
    params["train_grpo"]["sampling"]["max_batch_size"] = 64
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(params))
    assert main(["plan", "--params", str(path), "--gpus", "8", "--gpu", "h100"]) == 0
    assert "\nFits: " in capsys.readouterr().out


VLLM = {
    "max_tokens": 2048,
    "cache_gib": 20.0,
    "compile": True,
    "start_deadline_s": 600,
    "request_deadline_s": 600,
    "weights_by": "folder",
}


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("vllm", VLLM, ("vllm", 0, 1)),
        (
            "servers",
            {**VLLM, "num_servers": 2, "devices": ["4,5", "6,7"], "lost_deadline_s": 60},
            ("vllm_server", 4, 2),
        ),
        ("servers", {**VLLM, "num_servers": 3, "devices": None, "lost_deadline_s": 60}, ("vllm_server", 3, 1)),
    ],
)
def test_vllm_is_planned_as_it_is_set(
    tmp_path: Path, key: str, values: dict[str, object], expected: tuple[str, int, int]
) -> None:
    """Beside the trainer or on GPUs of its own, with its cache."""
    params = yaml.safe_load(Path(DEEPSEEK).read_text())
    params["train_grpo"]["sampler"][key] = values
    path = tmp_path / "vllm.yaml"
    path.write_text(yaml.safe_dump(params))
    found = plan.plan(path, num_gpus=8, gpu_name="h200", completion_tokens=None).run
    assert (found.sampler.engine, found.sampler.num_servers, found.sampler.tensor_parallel) == expected
    assert found.sampler.cache_bytes == 20 * GIB
    assert found.num_trainers == 8 - expected[1]
    if expected[1]:
        with pytest.raises(PipelineError, match=f"sampler.servers takes {expected[1]} of them and leaves none"):
            plan.plan(path, num_gpus=expected[1], gpu_name="h200", completion_tokens=None)


def test_longer_completions_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """Their mean length can be given where it is known."""
    seconds = []
    for tokens in ("100", "1024"):
        main(["plan", "--params", DEEPSEEK, "--gpus", "8", "--gpu", "h200", "--completion-tokens", tokens, "--json"])
        seconds.append(json.loads(capsys.readouterr().out)["phases_s"])
    assert seconds[1]["update"] > 5 * seconds[0]["update"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_scaling_can_be_drawn(tmp_path: Path, suffix: str) -> None:
    """Into a file of the kind that its name says."""
    path = tmp_path / f"scaling.{suffix}"
    assert main(["plan", "--params", DEEPSEEK, "--gpus", "8", "--gpu", "h200", "--plot", str(path)]) == 0
    assert path.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[suffix]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--gpu": "h1000"}, f"--gpu h1000: no such GPU is known; accepted: {', '.join(GPUS)}"),
        ({"--gpus": "0"}, "--gpus 0: from 1 to 16,384 is accepted"),
        ({"--params": "nope.yaml"}, "nope.yaml: no such params file"),
        (
            {"--completion-tokens": "2000"},
            "--completion-tokens 2000: from 1 to sampling.max_new_tokens, 1024, is accepted",
        ),
        ({"--plot": "scaling.doc"}, "--plot scaling.doc: the name of a file that ends in .pdf, .png, .svg is accepted"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is accepted, and exit code 2."""
    arguments = {"--params": DEEPSEEK, "--gpus": "8", "--gpu": "h200", **changes}
    assert main(["plan", *(word for pair in arguments.items() for word in pair)]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_an_unknown_model_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks for a folder."""
    path = tmp_path / "mine.yaml"
    path.write_text(Path(DEEPSEEK).read_text().replace("deepseek-ai/deepseek-math-7b-base", "someone/else-7b"))
    assert main(["plan", "--params", str(path), "--gpus", "8", "--gpu", "h200"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model someone/else-7b: its shape is not known here; give a folder")
    assert error.count("\n") == 1


def test_planning_needs_no_torch() -> None:
    """An answer at once, on any machine."""
    code = (
        "import sys; from pipelines.cli import main; "
        f"main(['plan', '--params', {DEEPSEEK!r}, '--gpus', '8', '--gpu', 'h200']); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_gpu_is_not_counted_on_to_the_last_byte() -> None:
    """8 % are left for what is not planned."""
    assert usable_bytes(gpu("h100")) == pytest.approx(79 * GIB * 0.92)


def test_every_known_model_can_be_named() -> None:
    """By its own name."""
    for name, shape in KNOWN_MODELS.items():
        assert shape_of(model(name)) == shape


def test_the_plan_is_of_the_file(tmp_path: Path) -> None:
    """Settings are read from it, not assumed."""
    found = plan.plan(Path(DEEPSEEK), num_gpus=4, gpu_name="h200", completion_tokens=300).run
    assert (found.num_gpus, found.engine.zero_stage, found.engine.element_bytes) == (4, 3, 2)
    assert (found.work.prompts, found.work.group_size, found.work.completion_tokens) == (16, 64, 1024)
    assert (found.work.prompt_tokens, found.work.mean_completion_tokens) == (1024, 300)
    assert (found.engine.micro_batch_tokens, found.engine.gradient_checkpointing) == (16384, True)
    assert found.reference == "replicated"
    dapo = plan.plan(ROOT / "params" / "dapo.yaml", num_gpus=4, gpu_name="h200", completion_tokens=None).run
    assert (dapo.reference, dapo.work.minibatches) == ("none", 16)
    assert (dapo.work.prompt_tokens, dapo.work.mean_prompt_tokens) == (1024, 256)
    assert (dapo.work.completion_tokens, dapo.work.mean_completion_tokens) == (20480, 8192)
