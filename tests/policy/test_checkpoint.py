import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from components.policy.checkpoint import create, load, save, save_base
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from tests import tiny


@pytest.mark.parametrize("base", ["scratch:tiny", "scratch:math"])
def test_a_saved_checkpoint_is_the_same_model_for_hugging_face(tmp_path: Path, base: str) -> None:
    """AutoModelForCausalLM and AutoTokenizer load a folder that gives the same tokens, text and logits."""
    saved = create(
        ModelConfig(base=base, prompt="{question}\n", answer=AnswerPolicy.DECLARED),
        tiny.PROBLEMS,
        seed=1,
        dtype=torch.float32,
    )
    save(saved, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for problem in tiny.PROBLEMS:
        text = saved.config.ask(problem.question) + problem.solution
        ids = list(saved.encode(text))
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    logits = model(torch.tensor([ids])).logits
    assert torch.equal(logits, saved.model(torch.tensor([ids])).logits)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == saved.end_ids[0]


def test_a_loaded_checkpoint_asks_as_the_saved_one_did(tmp_path: Path) -> None:
    """The prompt, the end token and the example tokens come back."""
    saved = create(
        ModelConfig(base="scratch:tiny", prompt="Q: {question}\nA: ", answer=AnswerPolicy.DECLARED),
        tiny.PROBLEMS,
        seed=1,
        dtype=torch.float32,
    )
    save(saved, tmp_path)
    loaded = load(tmp_path, dtype=torch.float32)
    assert loaded.config.ask("1?") == "Q: 1?\nA: "
    assert loaded.example(tiny.PROBLEMS[4]) == saved.example(tiny.PROBLEMS[4])
    assert (loaded.end_ids, loaded.pad_id) == (saved.end_ids, saved.pad_id)


def test_examples_end_with_the_end_token_and_split_after_the_prompt() -> None:
    """An example is the prompt's own tokens, then the solution's, then one end token."""
    checkpoint = tiny.checkpoint()
    example = checkpoint.example(tiny.PROBLEMS[4])
    assert example.prompt_ids == checkpoint.prompt_ids(tiny.PROBLEMS[4].question)
    assert example.completion_ids[-1:] == checkpoint.end_ids
    assert checkpoint.decode(example.completion_ids) == tiny.PROBLEMS[4].solution


def test_a_base_model_that_exists_is_passed_on_by_reference(tmp_path: Path) -> None:
    """Its weights are not copied, and loading the reference gives the same model with the new prompt."""
    save(tiny.checkpoint(), tmp_path / "existing")
    config = ModelConfig(base=str(tmp_path / "existing"), prompt="{question}!", answer=AnswerPolicy.DECLARED)
    base = create(config, tiny.PROBLEMS, seed=5, dtype=torch.float32)
    (tmp_path / "base").mkdir()
    save_base(base, tmp_path / "base")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["pipeline.json"]
    loaded = load(tmp_path / "base", dtype=torch.float32)
    assert loaded.config.prompt == "{question}!"
    for name, weight in tiny.checkpoint().model.named_parameters():
        assert torch.equal(weight, loaded.model.get_parameter(name))


def test_sampling_defaults_of_a_base_model_do_not_leak(tmp_path: Path) -> None:
    """A checkpoint that asks for top-p, top-k or a repetition penalty is sampled as it is all the same."""
    save(tiny.checkpoint(), tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**settings, "do_sample": True, "top_p": 0.1, "top_k": 1, "repetition_penalty": 5.0})
    )
    generation = load(tmp_path, dtype=torch.float32).model.generation_config
    assert (generation.top_p, generation.top_k, generation.repetition_penalty) == (None, None, None)


def test_all_end_tokens_of_a_model_are_kept(tmp_path: Path) -> None:
    """A model that ends by one of several tokens does so after it is loaded, whatever its tokenizer's end token is."""
    save(tiny.checkpoint(), tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [5, 3]}))
    assert load(tmp_path, dtype=torch.float32).end_ids == (5, 3)


@pytest.mark.parametrize(
    ("removed", "message"), [("model.safetensors", "holds no weights"), ("config.json", "holds no config.json")]
)
def test_an_incomplete_base_model_is_named(tmp_path: Path, removed: str, message: str) -> None:
    """A folder without weights or configuration is an error that names it and what is expected."""
    save(tiny.checkpoint(), tmp_path)
    (tmp_path / removed).unlink()
    with pytest.raises(PipelineError, match=message):
        create(
            ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED),
            tiny.PROBLEMS,
            seed=1,
            dtype=torch.float32,
        )


def test_a_base_model_that_cannot_be_fetched_is_named() -> None:
    """An id that no hub answers for is an error that names it, not a traceback."""
    with pytest.raises(PipelineError, match=r"nobody/nothing.*cannot be loaded"):
        create(
            ModelConfig(base="nobody/nothing", prompt="{question}", answer=AnswerPolicy.DECLARED),
            tiny.PROBLEMS,
            seed=1,
            dtype=torch.float32,
        )


def test_models_from_scratch_depend_on_the_seed_alone() -> None:
    """The same seed gives the same weights, another seed others."""
    first, again, other = (tiny.checkpoint(seed=seed).model.get_output_embeddings().weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_weights_that_were_cut_off_are_named(tmp_path: Path) -> None:
    """An interrupted download is one line, not a traceback."""
    save(tiny.checkpoint(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(PipelineError, match="cannot be loaded"):
        create(
            ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED),
            tiny.PROBLEMS,
            seed=1,
            dtype=torch.float32,
        )


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    """A checkpoint that lacks one tensor is refused by its name instead of starting that layer at random."""
    save(tiny.checkpoint(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    removed = next(name for name in tensors if "mlp" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != removed}, tmp_path / "model.safetensors")
    with pytest.raises(PipelineError, match=f"lacks 1 of its weights, such as {removed}"):
        create(
            ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED),
            tiny.PROBLEMS,
            seed=1,
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ({"final_logit_softcapping": 0.01, "attn_logit_softcapping": None}, "Gemma2ForCausalLM does not have"),
        ({"final_logit_softcapping": None, "attn_logit_softcapping": 50.0}, "Gemma2Attention attends with a soft cap"),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path, caps: dict[str, Any], message: str) -> None:
    """Gemma 2 caps scores and logits: what it samples is not what would be scored."""
    save(tiny.checkpoint(), tmp_path)
    size = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma2Config(vocab_size=300, head_dim=8, intermediate_size=16, eos_token_id=1, **caps, **size)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match=message):
        create(
            ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED),
            tiny.PROBLEMS,
            seed=1,
            dtype=torch.float32,
        )


def test_a_prompt_begins_as_the_models_texts_do() -> None:
    """Where the tokenizer puts a begin token before a text, it stands before the prompt, once, and nowhere else."""
    checkpoint = tiny.checkpoint()
    plain = checkpoint.prompt_ids("Tom has 3?")
    checkpoint.tokenizer.bos_token = "<unk>"
    checkpoint.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=[("<unk>", 2), ("<eos>", 1)]
    )
    assert checkpoint.prompt_ids("Tom has 3?") == (2, *plain)
    assert (
        checkpoint.example(tiny.PROBLEMS[0]).completion_ids
        == tiny.checkpoint().example(tiny.PROBLEMS[0]).completion_ids
    )
