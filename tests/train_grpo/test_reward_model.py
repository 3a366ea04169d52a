import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    XGLMConfig,
    XGLMForCausalLM,
)

from components.policy.checkpoint import Checkpoint, load, save
from components.policy.engine import NonFiniteError
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.shared.errors import PipelineError
from components.train_grpo.config import RewardModelConfig
from components.train_grpo.reward_model import (
    LabeledExample,
    PaddedBatch,
    RewardModel,
    load_classifier,
    padded_batches,
    scorable,
)
from tests import tiny
from tests.train_grpo.settings import REWARD_MODEL

_SIZE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_labels": 1,
    "initializer_range": 0.3,
}
_FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForSequenceClassification),
    "llama": (LlamaConfig, LlamaForSequenceClassification),
}
_SEQUENCES = [
    TokenSequence((5, 6, 7), (8, 9, 10, 11)),
    TokenSequence((3,), (20, 21, 1)),
    TokenSequence((12, 13, 14, 15, 16, 17), (30, 31)),
    # The token that others are padded with ends this one.
    TokenSequence((5, 6, 7), (8, 0)),
    TokenSequence((40, 41), (42, 43, 44, 45, 46, 47, 48, 49, 50, 51)),
]
_STEPS = [(2, 4), (1, 2, 3), (2,), (1,), (3, 7, 9, 10)]


def _config(**changes: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate({**REWARD_MODEL, "learning_rate": 1e-2, **changes})


def _model(folder: Path, *, family: str = "qwen3", micro_batch_tokens: int = 16, **changes: Any) -> RewardModel:
    """Return a reward model with weights of its own, head included, written and loaded as any checkpoint is."""
    config, classifier = _FAMILIES[family]
    torch.manual_seed(1)
    classifier(config(**_SIZE)).save_pretrained(folder)
    reference = tiny.checkpoint()
    reference.tokenizer.save_pretrained(folder)
    return RewardModel.load(_config(base=str(folder), **changes), reference, micro_batch_tokens=micro_batch_tokens)


def _library_logit(model: Any, sequence: TokenSequence, end: int) -> torch.Tensor:
    """Return what transformers itself says of the prompt with the first `end` completion tokens."""
    model.config.pad_token_id = None  # with one, it looks for the last token that is another
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids[:end]]])
    logit: torch.Tensor = model(ids).logits[0, 0]
    return logit


def _toy(numbers: range) -> list[LabeledExample]:
    """Return completions that are right exactly if their second token is 100."""
    return [
        LabeledExample(TokenSequence((5, n % 50), (6, 100 if n % 3 else 101, 7 + n % 40)), (3,), (float(n % 3 > 0),))
        for n in numbers
    ]


def _flat(model: RewardModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.model.parameters()])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("ends", [[(len(s.completion_ids),) for s in _SEQUENCES], _STEPS], ids=["outcome", "process"])
def test_a_score_is_the_librarys_own_for_what_stands_before_it(
    tmp_path: Path, family: str, ends: list[tuple[int, ...]]
) -> None:
    """An outcome or a step is scored as the library scores the text up to there, alone and without padding."""
    model = _model(tmp_path, family=family)
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    expected = [
        [torch.sigmoid(_library_logit(library, sequence, end)).item() for end in stops]
        for sequence, stops in zip(_SEQUENCES, ends, strict=True)
    ]
    scores = model.score(_SEQUENCES, ends)
    assert [len(row) for row in scores] == [len(stops) for stops in ends]
    torch.testing.assert_close(sum(scores, []), sum(expected, []), rtol=0, atol=1e-6)  # noqa: RUF017
    assert max(sum(scores, [])) - min(sum(scores, [])) > 0.1  # noqa: RUF017


@pytest.mark.parametrize("micro_batch_tokens", [1, 16, 10_000])
def test_scores_do_not_depend_on_batching_and_order(tmp_path: Path, micro_batch_tokens: int) -> None:
    """Alone, with others and in reverse, every sequence has the same scores."""
    model = _model(tmp_path, micro_batch_tokens=micro_batch_tokens)
    alone = [model.score([s], [e])[0] for s, e in zip(_SEQUENCES, _STEPS, strict=True)]
    together = model.score(_SEQUENCES, _STEPS)
    reverse = model.score(_SEQUENCES[::-1], _STEPS[::-1])[::-1]
    for scores in (together, reverse):
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-6)


def test_a_reward_model_learns_what_makes_a_completion_right() -> None:
    """After a few passes a copy of the reference tells right from wrong in completions it has not seen."""
    model = RewardModel.load(_config(epochs=10), tiny.checkpoint(), micro_batch_tokens=500)
    first = model.fit(_toy(range(120)), num_new=120, seed=1)
    unseen = _toy(range(1000, 1060))
    scores = model.score([example.tokens for example in unseen], [example.step_ends for example in unseen])
    assert all(
        (score > 0.9) if example.labels == (1.0,) else (score < 0.1)
        for (score,), example in zip(scores, unseen, strict=True)
    )
    second = model.fit(unseen, num_new=60, seed=2)
    assert (first["reward_model_accuracy"], second["reward_model_accuracy"]) == (0.0, 1.0)
    assert second["reward_model_loss"] < 0.1
    assert (first["reward_model_examples"], second["reward_model_examples"]) == (120, 60)


@pytest.mark.parametrize("micro_batch_tokens", [1, 16, 10_000])
def test_the_gradient_is_that_of_the_mean_loss_over_labels(tmp_path: Path, micro_batch_tokens: int) -> None:
    """However a step is split, it is -log p(label) averaged over all labels, by the library's logits alone."""
    model = _model(tmp_path, micro_batch_tokens=micro_batch_tokens)
    labels = [tuple(float((row + end) % 2) for end in stops) for row, stops in enumerate(_STEPS)]
    examples = [LabeledExample(*fields) for fields in zip(_SEQUENCES, _STEPS, labels, strict=True)]
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    losses_E = torch.stack(
        [
            -functional.logsigmoid(_library_logit(library, example.tokens, end) * (1 if label else -1))
            for example in examples
            for end, label in zip(example.step_ends, example.labels, strict=True)
        ]
    )
    assert len(losses_E) == 11
    torch.autograd.backward(losses_E.mean())
    figures = model.fit(examples, num_new=0, seed=1)
    assert figures["reward_model_loss"] == pytest.approx(losses_E.mean().item(), rel=1e-5)
    for name, parameter in model.model.named_parameters():
        # The first step's running mean is (1 - beta_1) = 0.1 of the gradient.
        gradient = model.optimizer.state[parameter]["exp_avg"] / 0.1
        torch.testing.assert_close(gradient, library.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("num_examples", "epochs", "sizes"), [(64, 1, [64]), (65, 1, [33, 32]), (130, 2, [44, 43, 43] * 2)]
)
def test_a_step_takes_at_most_64_examples(tmp_path: Path, num_examples: int, epochs: int, sizes: list[int]) -> None:
    """Every pass takes all examples, in as few steps as can be, of equal size."""
    model = _model(tmp_path, micro_batch_tokens=10_000, epochs=epochs)
    read: list[list[int]] = []
    model.model.base_model.register_forward_pre_hook(
        lambda _module, _arguments, named: read.append(named["input_ids"][:, 1].tolist()), with_kwargs=True
    )
    examples = [LabeledExample(TokenSequence((5, number), (6,)), (1,), (1.0,)) for number in range(num_examples)]
    model.fit(examples, num_new=0, seed=1)
    assert [len(numbers) for numbers in read] == sizes
    assert sorted(sum(read, [])) == sorted([*range(num_examples)] * epochs)  # noqa: RUF017
    assert {int(state["step"]) for state in model.optimizer.state.values()} == {len(sizes)}


def test_the_optimizer_goes_on_from_one_fit_to_the_next(tmp_path: Path) -> None:
    """Two calls of one step each make two steps, at the configured rate and without weight decay."""
    model = _model(tmp_path, learning_rate=3e-4)
    for seed in range(2):
        model.fit(_toy(range(10)), num_new=0, seed=seed)
    assert {int(state["step"]) for state in model.optimizer.state.values()} == {2}
    (group,) = model.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (3e-4, 0.0)


def test_the_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """The same seed gives the same weights to the bit, another one others."""
    weights = []
    for seed in (1, 1, 2):
        model = _model(tmp_path, micro_batch_tokens=500)
        model.fit(_toy(range(70)), num_new=70, seed=seed)
        weights.append(_flat(model))
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_accuracy_counts_new_labels_before_they_are_learned(tmp_path: Path) -> None:
    """Replayed examples are left out of it; the score of every new label was on one side of one half."""
    model = _model(tmp_path)
    tokens, ends = _SEQUENCES[:3], _STEPS[:3]
    above = [tuple(float(score > 0.5) for score in row) for row in model.score(tokens, ends)]
    new = [LabeledExample(*fields) for fields in zip(tokens, ends, above, strict=True)]
    new[1] = LabeledExample(tokens[1], ends[1], tuple(1 - label for label in above[1]))
    replayed = [LabeledExample(tokens[1], ends[1], tuple(1 - label for label in above[1]))] * 7
    # Of 2 + 3 + 1 new labels, three are on the wrong side.
    assert model.fit([*new, *replayed], num_new=3, seed=1)["reward_model_accuracy"] == pytest.approx(3 / 6)


def test_what_cannot_be_scored_is_left_out(tmp_path: Path) -> None:
    """Unscorable ends and examples train nothing and count nowhere."""
    nothing = math.nan
    example = LabeledExample(_SEQUENCES[4], (3, 7, 10), (nothing, 1.0, nothing))
    unscorable = LabeledExample(_SEQUENCES[0], (2, 4), (nothing, nothing))
    assert scorable([example, unscorable]) == [LabeledExample(_SEQUENCES[4], (7,), (1.0,))]
    mixed, clean = _model(tmp_path), _model(tmp_path)
    figures = mixed.fit([unscorable, example, *_toy(range(5))], num_new=2, seed=1)
    expected = clean.fit([*scorable([example]), *_toy(range(5))], num_new=1, seed=1)
    assert figures == expected
    assert figures["reward_model_examples"] == 6
    assert torch.equal(_flat(mixed), _flat(clean))


def test_nothing_to_learn_from_changes_nothing(tmp_path: Path) -> None:
    """Where every label is unscorable there is no step, and neither loss nor accuracy is a number."""
    model = _model(tmp_path)
    before = _flat(model)
    figures = model.fit([LabeledExample(_SEQUENCES[0], (4,), (math.nan,))], num_new=1, seed=1)
    assert torch.equal(_flat(model), before)
    assert figures["reward_model_examples"] == 0
    assert math.isnan(figures["reward_model_loss"])
    assert math.isnan(figures["reward_model_accuracy"])


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path: Path) -> None:
    """No weight but the broken one has changed when the error is raised."""
    model = _model(tmp_path)
    before = _flat(model)
    with torch.no_grad():
        model.model.score.weight.fill_(math.inf)
    with pytest.raises(NonFiniteError, match="stopped before its optimizer step"):
        model.fit(_toy(range(5)), num_new=0, seed=1)
    assert torch.equal(_flat(model)[:-32], before[:-32])
    assert not model.optimizer.state


def test_a_score_that_is_not_a_number_is_an_error(tmp_path: Path) -> None:
    """As a reward it would pass for a completion of which nothing can be said."""
    model = _model(tmp_path)
    with torch.no_grad():
        model.model.score.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="score of the reward model is not a number"):
        model.score(_SEQUENCES, _STEPS)


def test_dropout_is_off_in_scoring_and_training(tmp_path: Path) -> None:
    """A checkpoint that asks for dropout is scored and trained as one that does not."""
    weights, scores = [], []
    for dropout in (0.0, 0.5):
        torch.manual_seed(1)
        classifier = Qwen3ForSequenceClassification(Qwen3Config(**_SIZE, attention_dropout=dropout)).train()
        model = RewardModel(classifier, tiny.checkpoint().tokenizer, _config(), micro_batch_tokens=16)
        scores.append(model.score(_SEQUENCES, _STEPS))
        model.fit(_toy(range(5)), num_new=5, seed=1)
        weights.append(_flat(model))
    assert scores[0] == scores[1]
    assert torch.equal(weights[0], weights[1])


def test_a_copy_of_a_frozen_reference_is_trained_whole() -> None:
    """The reference is often frozen; after two steps from a head of zeros, its copied layers have moved too."""
    reference = tiny.checkpoint()
    reference.model.requires_grad_(False)
    model = RewardModel.load(_config(epochs=2), reference, micro_batch_tokens=500)
    before = {name: weight.detach().clone() for name, weight in model.model.named_parameters()}
    model.fit(_toy(range(10)), num_new=0, seed=1)
    assert all(not torch.equal(weight, before[name]) for name, weight in model.model.named_parameters())


def test_a_saved_reward_model_is_the_same_for_hugging_face_and_for_us(tmp_path: Path) -> None:
    """The folder loads as a sequence classifier with its tokenizer, and as the base of another run."""
    reference = tiny.checkpoint()
    model = RewardModel.load(_config(), reference, micro_batch_tokens=500)
    model.fit(_toy(range(10)), num_new=0, seed=1)
    model.save(tmp_path)
    scores = model.score(_SEQUENCES, _STEPS)
    assert scores[0][0] != 0.5
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.sigmoid(_library_logit(library, _SEQUENCES[2], 2)).item() == pytest.approx(scores[2][0], abs=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == reference.tokenizer.get_vocab()
    again = RewardModel.load(_config(base=str(tmp_path)), reference, micro_batch_tokens=500)
    assert again.score(_SEQUENCES, _STEPS) == scores


def test_training_goes_on_from_a_saved_state_to_the_bit(tmp_path: Path) -> None:
    """Stopped after one fit and restored into a fresh model, the second gives the weights of an unbroken run."""
    straight = _model(tmp_path)
    straight.fit(_toy(range(70)), num_new=70, seed=1)
    torch.save(straight.state_dict(), tmp_path / "state.pt")
    straight.fit(_toy(range(70, 140)), num_new=70, seed=2)
    resumed = _model(tmp_path)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    resumed.fit(_toy(range(70, 140)), num_new=70, seed=2)
    assert torch.equal(_flat(resumed), _flat(straight))


# Micro-batches --------------------------------------------------------------------------------------------------------


def _padded(max_tokens: int) -> list[PaddedBatch]:
    tokens = [TokenSequence((5, 6), (7, 8, 9)), TokenSequence((5,), (6,)), TokenSequence((1, 2, 3), (4,))]
    return padded_batches(tokens, [(1, 3), (), (1,)], max_tokens=max_tokens, device=torch.device("cpu"))


def test_a_head_is_read_at_the_last_token_that_an_end_counts() -> None:
    """Rows go by length, padded on the right; ends 1 and 3 after a prompt of 2 are positions 2 and 4."""
    (batch,) = _padded(15)
    assert batch.sequences == (1, 2, 0)
    assert batch.input_ids_RT.tolist() == [[5, 6, 0, 0, 0], [1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]
    assert batch.attention_mask_RT.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert (batch.row_E.tolist(), batch.position_E.tolist()) == ([1, 2, 2], [3, 2, 4])


def test_micro_batches_hold_no_more_tokens_than_allowed() -> None:
    """Padding counts, and a sequence that alone is longer stands alone."""
    assert [batch.sequences for batch in _padded(14)] == [(1, 2), (0,)]
    assert [batch.sequences for batch in _padded(7)] == [(1,), (2,), (0,)]
    assert [batch.sequences for batch in _padded(1)] == [(1,), (2,), (0,)]


def test_sequences_that_are_read_nowhere_are_no_error() -> None:
    """A micro-batch without ends has empty places of an integer type, as indexing needs."""
    (batch,) = padded_batches([TokenSequence((1,), (2,))], [()], max_tokens=9, device=torch.device("cpu"))
    assert (batch.row_E.shape, batch.position_E.dtype) == ((0,), torch.long)


# The base model -------------------------------------------------------------------------------------------------------

_LAYERS = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


def _save_classifier(folder: Path, *, tokenizer: Any, **changes: Any) -> None:
    """Write a tiny Qwen3 classifier with the tokenizer of `tiny`, or another."""
    fields = {"vocab_size": 300, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, **_LAYERS, **changes}
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


def test_a_classifier_that_reads_whole_sequences_is_refused(tmp_path: Path) -> None:
    """An encoder has another head, which cannot be read at a step's end."""
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **_LAYERS)).save_pretrained(tmp_path)
    tiny.checkpoint().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match="BertForSequenceClassification has no linear head `score`"):
        load_classifier(str(tmp_path), tiny.checkpoint())
