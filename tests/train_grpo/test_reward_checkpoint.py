import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    XGLMConfig,
    XGLMForCausalLM,
)

from components.policy.checkpoint import Checkpoint, load, save
from components.policy.logprobs import LogprobModel
from components.shared.errors import PipelineError
from components.train_grpo.reward_checkpoint import load_classifier
from tests import tiny

_SIZE = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


def _save_classifier(folder: Path, *, tokenizer: Any, **changes: Any) -> None:
    """Write a tiny Qwen3 classifier with the tokenizer of `tiny`, or another."""
    fields = {"vocab_size": 300, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, **_SIZE, **changes}
    Qwen3ForSequenceClassification(Qwen3Config(**fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_copy_of_the_reference_has_its_layers_and_a_head_of_zeros() -> None:
    """Every weight of the backbone is the reference's; the head is one row of zeros."""
    reference = tiny.checkpoint()
    made = load_classifier("reference", reference)
    state, copied = reference.model.base_model.state_dict(), made.base_model.state_dict()
    assert state.keys() == copied.keys()
    assert all(torch.equal(state[name], copied[name]) for name in state)
    assert torch.equal(made.score.weight, torch.zeros(1, 64))


def test_a_copy_shares_no_weight_with_the_reference() -> None:
    """Training the one must not move the other."""
    reference = tiny.checkpoint()
    made = load_classifier("reference", reference)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1.0)
    for weight, original in zip(reference.model.parameters(), tiny.checkpoint().model.parameters(), strict=True):
        assert torch.equal(weight, original)


def test_making_a_copy_draws_no_random_number() -> None:
    """What is sampled afterwards is what would have been sampled without it."""
    reference = tiny.checkpoint()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_classifier("reference", reference)
    assert torch.equal(torch.rand(4), expected)


def test_a_copy_attends_as_the_model_does_by_itself() -> None:
    """However a training engine has set up the reference's attention, the copy takes plain padded batches."""
    reference = tiny.checkpoint()
    ids = torch.tensor([reference.encode("Tom has 3 apples")])
    expected = reference.model.base_model(ids).last_hidden_state
    LogprobModel(reference.model, temperature=1.0)
    actual = load_classifier("reference", reference).base_model(ids, torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(actual, expected)


def test_a_copy_is_float32(tmp_path: Path) -> None:
    """A bfloat16 reference gives the same numbers in the wider type."""
    save(tiny.checkpoint(), tmp_path)
    reference = load(tmp_path, dtype=torch.bfloat16)
    made = load_classifier("reference", reference)
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}
    weight = reference.model.get_input_embeddings().weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(made.get_input_embeddings().weight, weight.float())


def test_a_model_family_without_classifier_is_named() -> None:
    """Where transformers has no sequence classifier of the reference's kind, the error says so."""
    model = XGLMForCausalLM(XGLMConfig(vocab_size=300, d_model=16, num_layers=1, attention_heads=2, ffn_dim=16))
    reference = Checkpoint(model, tiny.checkpoint().tokenizer, tiny.MODEL)
    with pytest.raises(PipelineError, match=r"reward\.model\.base reference: .* like XGLMForCausalLM"):
        load_classifier("reference", reference)


def test_a_checkpoint_is_loaded_as_it_is(tmp_path: Path) -> None:
    """Weights, the head's included, are those of the folder, in float32."""
    reference = tiny.checkpoint()
    _save_classifier(tmp_path, tokenizer=reference.tokenizer)
    made = load_classifier(str(tmp_path), reference)
    saved = Qwen3ForSequenceClassification.from_pretrained(tmp_path)
    for name, weight in saved.named_parameters():
        assert torch.equal(made.get_parameter(name), weight)


@pytest.mark.parametrize("base", ["/no/such/folder", "nobody/nothing"])
def test_a_base_that_is_nowhere_is_named(base: str) -> None:
    """A folder that is not there and an id that no hub answers for are one line each."""
    with pytest.raises(PipelineError, match=rf"reward\.model\.base {base}: cannot be loaded .*folder or hub id"):
        load_classifier(base, tiny.checkpoint())


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    """A checkpoint without a head is refused rather than given a random one."""
    save(tiny.checkpoint(), tmp_path)
    with pytest.raises(PipelineError, match=r"lacks 1 of its weights, such as score\.weight"):
        load_classifier(str(tmp_path), tiny.checkpoint())


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    """Two labels are no score."""
    _save_classifier(tmp_path, tokenizer=tiny.checkpoint().tokenizer, num_labels=2)
    with pytest.raises(PipelineError, match="has 2 labels, 1 is expected"):
        load_classifier(str(tmp_path), tiny.checkpoint())


def test_a_classifier_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """The same words under other ids, of which two are exchanged, are not the policy's tokens."""
    _save_classifier(tmp_path, tokenizer=tiny.checkpoint().tokenizer)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    ids = described["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(PipelineError, match="its vocabulary is not the policy's"):
        load_classifier(str(tmp_path), tiny.checkpoint())


def test_a_classifier_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """Without its tokenizer nobody can say that the ids mean the same."""
    _save_classifier(tmp_path, tokenizer=tiny.checkpoint().tokenizer)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(PipelineError, match="its vocabulary is not the policy's"):
        load_classifier(str(tmp_path), tiny.checkpoint())


def test_a_classifier_that_reads_whole_sequences_is_refused(tmp_path: Path) -> None:
    """An encoder has another head, which cannot be read at a step's end."""
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **_SIZE)).save_pretrained(tmp_path)
    tiny.checkpoint().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match="BertForSequenceClassification has no linear head `score`"):
        load_classifier(str(tmp_path), tiny.checkpoint())
