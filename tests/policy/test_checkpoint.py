import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.policy.checkpoint import Checkpoint, create, load, load_without_weights, save, save_base
from components.policy.config import LoraConfig
from components.policy.lora import add_adapters, merged_state_dict
from components.shared import durable
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.lineage import Material, digest, file_digests
from components.shared.model import ModelConfig, base_materials
from tests import tiny


def _create(base: str, *, prompt: str = "{question}") -> Checkpoint:
    config = ModelConfig(base=base, prompt=prompt, answer=AnswerPolicy.DECLARED)
    return create(config, tiny.PROBLEMS, seed=1, dtype=torch.float32)


@pytest.mark.parametrize("base", ["scratch:tiny", "scratch:math"])
def test_a_saved_checkpoint_is_the_same_model_for_hugging_face(tmp_path: Path, base: str) -> None:
    """AutoModelForCausalLM and AutoTokenizer load a folder that gives the same tokens, text and logits."""
    saved = _create(base, prompt="Q: {question}\nA: ")
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
    loaded = load(tmp_path, dtype=torch.float32)
    assert loaded.config.ask("1?") == "Q: 1?\nA: "
    assert loaded.examples([tiny.PROBLEMS[4]])[0] == saved.examples([tiny.PROBLEMS[4]])[0]


def test_an_existing_base_model_is_saved_as_a_reference(tmp_path: Path) -> None:
    """Its weights are not copied, and loading the reference gives the same model with the new prompt."""
    save(tiny.checkpoint(), tmp_path / "existing")
    base = _create(str(tmp_path / "existing"), prompt="{question}!")
    (tmp_path / "base").mkdir()
    save_base(base, tmp_path / "base")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["pipeline.json"]
    existing = str(tmp_path / "existing")
    assert base_materials(existing, tmp_path / "base") == {existing: Material(sha256=digest(tmp_path / "existing"))}
    loaded = load(tmp_path / "base", dtype=torch.float32)
    assert loaded.config.prompt == "{question}!"
    for name, weight in tiny.checkpoint().model.named_parameters():
        assert torch.equal(weight, loaded.model.get_parameter(name))


def test_generation_settings_of_a_base_model_are_ignored_but_for_the_end_tokens(tmp_path: Path) -> None:
    """A checkpoint that asks for top-p, top-k or a repetition penalty is sampled as it is; all end tokens end."""
    save(tiny.checkpoint(), tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    changes = {"do_sample": True, "top_p": 0.1, "top_k": 1, "repetition_penalty": 5.0, "eos_token_id": [5, 3]}
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, **changes}))
    loaded = load(tmp_path, dtype=torch.float32)
    generation = loaded.model.generation_config
    assert (generation.top_p, generation.top_k, generation.repetition_penalty) == (None, None, None)
    assert loaded.end_ids == (5, 3)


def test_what_is_saved_depends_on_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the name it was loaded by, a folder or an id of the hub, nor on the umask, which its files have."""
    model, commit, repository = tmp_path / "model", "1" * 40, tmp_path / "hub/models--someone--model"
    save(tiny.checkpoint(), model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    code = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, **code}))
    (tmp_path / "link").symlink_to(model)
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    saved = []
    for base, mask in ((str(model), 0o022), (str(tmp_path / "link"), 0o002), ("someone/model", 0o077)):
        folder = tmp_path / f"saved-{mask}"
        before = os.umask(mask)
        folder.mkdir()
        save(_create(base), folder)
        durable.sync_tree(folder)
        os.umask(before)
        saved.append(digest(folder))
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}
    assert len(set(saved)) == 1


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_folder_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Nobody is asked whether it may; a folder whose model is code of its own is refused."""
    save(tiny.checkpoint(), tmp_path)
    content = json.loads((tmp_path / file).read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
    own = {"model_type": "evil", "tokenizer_class": "T", "auto_map": names}
    (tmp_path / file).write_text(json.dumps({**content, **own}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    refused = pytest.raises(PipelineError, match="cannot be loaded") if file == "config.json" else nullcontext()
    with refused:
        _create(str(tmp_path))
    with refused:
        load_without_weights(tmp_path)
    assert not (tmp_path / "ran").exists()


def _drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def _pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Evil()}, folder / "pytorch_model.bin")


def _name_files_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pickle_weights, "no code of a model is run"),
        (_name_files_elsewhere, "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "cannot be loaded"),
        (_drop_a_tensor, r"lacks 1 of its weights, such as model\.layers\.0\.mlp\.up_proj"),
    ],
)
def test_a_damaged_base_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], message: str
) -> None:
    """In one line that names it and what is wrong: a file, half of it, or a tensor is missing, or it holds code."""
    monkeypatch.chdir(tmp_path)
    save(tiny.checkpoint(), tmp_path)
    damage(tmp_path)
    with pytest.raises(PipelineError, match=f"{tmp_path}.*{message}") as raised:
        _create(str(tmp_path))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    """Where tokens were added and the embedding was not resized, before anything is computed; or it is nowhere."""
    with pytest.raises(PipelineError, match=r"nobody/nothing.*cannot be loaded"):
        _create("nobody/nothing")
    made = tiny.checkpoint()
    made.tokenizer.add_tokens([f"<new {number}>" for number in range(5)])
    save(made, tmp_path)
    refused = r"has 200 tokens and its embedding 195 rows; resize"
    with pytest.raises(PipelineError, match=refused):
        _create(str(tmp_path))
    with pytest.raises(PipelineError, match=refused):
        load_without_weights(tmp_path)


def test_a_prompt_starts_with_the_begin_token_of_the_tokenizer() -> None:
    """Where the tokenizer puts a begin token before a text, it stands before the prompt, once, and nowhere else."""
    checkpoint = tiny.checkpoint()
    plain = checkpoint.prompt_ids("Tom has 3?")
    checkpoint.tokenizer.bos_token = "<unk>"
    checkpoint.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=[("<unk>", 2), ("<eos>", 1)]
    )
    assert checkpoint.prompt_ids("Tom has 3?") == (2, *plain)
    written = replace(checkpoint, config=checkpoint.config.model_copy(update={"prompt": "<unk>{question}\n"}))
    assert written.prompt_ids("Tom has 3?") == (2, *plain)
    assert (
        checkpoint.examples([tiny.PROBLEMS[0]])[0].completion_ids
        == tiny.checkpoint().examples([tiny.PROBLEMS[0]])[0].completion_ids
    )


def test_weights_without_adapters_are_saved_in_files_of_their_own(tmp_path: Path) -> None:
    """Such files are equal however the adapters have been trained, and the whole is one model all the same."""
    saved = tiny.checkpoint()
    add_adapters(saved.model, LoraConfig(rank=2, alpha=4.0, targets=["q_proj"]), seed=1)
    files: list[dict[str, str]] = []
    for step in (1, 2):
        for name, parameter in saved.model.named_parameters():
            if "lora_" in name:
                parameter.data += step
        save(saved, tmp_path / str(step), max_shard_size="100KB")
        files.append(file_digests(tmp_path / str(step), suffixes=(".safetensors",)))
    unchanged = {name for name in files[0] if files[0][name] == files[1][name]}
    assert files[0].keys() == files[1].keys()
    sizes = {name: (tmp_path / "1" / name).stat().st_size for name in files[0]}
    assert sum(sizes[name] for name in unchanged) > sum(sizes.values()) / 2
    assert unchanged < files[0].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "2").state_dict()
    for name, weight in merged_state_dict(saved.model).items():
        assert torch.equal(loaded[name], weight)
