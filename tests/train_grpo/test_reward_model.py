import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    XGLMConfig,
    XGLMForCausalLM,
)

from components.cluster.launch import run_ranks
from components.policy.checkpoint import Checkpoint, save
from components.policy.engine import NonFiniteError
from components.policy.packing import TokenSequence
from components.policy.parallel import Ranks, init_ranks
from components.policy.training import TrainingCheckpoint, prepare_process
from components.shared.errors import PipelineError
from components.train_grpo import reward_examples as module
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.process_supervision import Step
from components.train_grpo.reward_examples import LabeledExample, PackedExample, Replay, unpack
from components.train_grpo.reward_model import RewardModel, load_classifier, padded_batches
from tests import tiny
from tests.train_grpo.groups import group, scored
from tests.train_grpo.settings import reward_model_config

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_labels": 1, "num_hidden_layers": 2}
_SIZE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.3, **_HEADS}
_SEQUENCES = [
    TokenSequence((5, 6, 7), (8, 9, 10, 11)),
    TokenSequence((3,), (20, 21, 1)),
    TokenSequence((12, 13, 14, 15, 16, 17), (30, 31)),
    # The token that others are padded with ends this one.
    TokenSequence((5, 6, 7), (8, 0)),
    TokenSequence((40, 41), (42, 43, 44, 45, 46, 47, 48, 49, 50, 51)),
]
_STEPS = [(2, 4), (1, 2, 3), (2,), (1,), (3, 7, 9, 10)]


def _save_classifier(folder: Path, **changes: Any) -> None:
    """Write a tiny classifier with weights of its own, head included, and the tokenizer of `tiny`."""
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(Qwen3Config(**{**_SIZE, **changes})).save_pretrained(folder)
    tiny.checkpoint().tokenizer.save_pretrained(folder)


def _made(reference: Checkpoint, saved: TrainingCheckpoint | None = None, **changes: Any) -> RewardModel:
    config = reward_model_config(**{"learning_rate": 1e-2, "engine__micro_batch_tokens": 500, **changes})
    assert config.reward.model is not None
    return RewardModel(config, config.reward.model, reference, saved)


def _model(folder: Path, **changes: Any) -> RewardModel:
    _save_classifier(folder)
    return _made(tiny.checkpoint(), base=str(folder), **{"engine__micro_batch_tokens": 16, **changes})


def _library_logit(model: Any, sequence: TokenSequence, end: int) -> torch.Tensor:
    """Return what transformers itself says of the prompt with the first `end` completion tokens."""
    model.config.pad_token_id = None  # with one, it looks for the last token that is another
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids[:end]]])
    logit: torch.Tensor = model(ids).logits[0, 0]
    return logit


def _example(*fields: Any) -> PackedExample:
    return LabeledExample(*fields).pack()


def _toy(numbers: range) -> list[PackedExample]:
    """Return completions that are right exactly if their second token is 100."""
    return [
        _example(TokenSequence((5, n % 50), (6, 100 if n % 3 else 101, 7 + n % 40)), (3,), (float(n % 3 > 0),))
        for n in numbers
    ]


def _flat(model: RewardModel) -> torch.Tensor:
    with model.engine.gather_full_parameters():
        return torch.cat([parameter.detach().flatten() for parameter in model.model.parameters()])


@pytest.mark.parametrize("micro_batch_tokens", [1, 16])
def test_a_score_is_that_of_transformers_for_the_text_up_to_there(tmp_path: Path, micro_batch_tokens: int) -> None:
    """A step is scored as the library scores the text up to there, alone and without padding."""
    model = _model(tmp_path, engine__micro_batch_tokens=micro_batch_tokens)
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    scores = model.score(_SEQUENCES, _STEPS)
    for sequence, stops, row in zip(_SEQUENCES, _STEPS, scores, strict=True):
        expected = [torch.sigmoid(_library_logit(library, sequence, end)).item() for end in stops]
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
    assert max(map(max, scores)) - min(map(min, scores)) > 0.1


def test_micro_batches_hold_no_more_tokens_than_allowed() -> None:
    """Padding counts, and a sequence that alone is longer stands alone; one that is read nowhere is no error."""
    examples = [LabeledExample(tokens, (), ()) for tokens in _SEQUENCES]  # of 7, 4, 8, 5 and 12 tokens
    for max_tokens, parts in ((16, [[1, 3], [0, 2], [4]]), (7, [[1], [3], [0], [2], [4]])):
        batches = padded_batches(examples, max_tokens, torch.device("cpu"))
        assert [batch.examples for batch in batches] == parts


@pytest.mark.parametrize("micro_batch_tokens", [16, 10_000])
def test_the_gradient_is_that_of_the_mean_loss_over_labels(tmp_path: Path, micro_batch_tokens: int) -> None:
    """However a step is split, it averages -log p(label) of float64 logits."""
    model = _model(tmp_path, engine__micro_batch_tokens=micro_batch_tokens, engine__max_gradient_norm=1e6)
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    labels = [tuple(float((row + end) % 2) for end in stops) for row, stops in enumerate(_STEPS)]
    losses = [
        -functional.logsigmoid(_library_logit(library, tokens, end) * (1 if label else -1))
        for tokens, ends, of_ends in zip(_SEQUENCES, _STEPS, labels, strict=True)
        for end, label in zip(ends, of_ends, strict=True)
    ]
    losses_L = torch.stack(losses)
    assert len(losses_L) == 11
    torch.autograd.backward(losses_L.mean())
    examples = [_example(*fields) for fields in zip(_SEQUENCES, _STEPS, labels, strict=True)]
    figures = model.fit(examples, num_new=0, seed=1)
    assert figures["reward_model_loss"] == pytest.approx(losses_L.mean().item(), rel=1e-5)
    state = model.engine.state()
    for name, parameter in library.named_parameters():
        # The first step's running mean is (1 - beta_1) = 0.1 of the gradient.
        gradient = 10 * state[f"model.{name}/exp_avg"].double()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_accuracy_counts_new_labels_before_they_are_learned(tmp_path: Path) -> None:
    """Replayed examples are left out of it; the score of every new label was on one side of one half."""
    model = _model(tmp_path)
    tokens, ends = _SEQUENCES[:3], _STEPS[:3]
    labels = [tuple(float(score > 0.5) for score in row) for row in model.score(tokens, ends)]
    labels[1] = tuple(1 - label for label in labels[1])
    new = [_example(*fields) for fields in zip(tokens, ends, labels, strict=True)]
    # Of 2 + 3 + 1 new labels, three are on the wrong side.
    assert model.fit([*new, *[new[1]] * 7], num_new=3, seed=1)["reward_model_accuracy"] == pytest.approx(3 / 6)


def test_a_loss_or_score_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    """A loss before any other weight has changed; a score, as a reward it would pass for an unscorable completion."""
    model = _model(tmp_path)
    before = _flat(model)
    with torch.no_grad():
        model.model.score.weight.fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"the reward model: the loss is .*stopped before the optimizer step"):
        model.fit(_toy(range(5)), num_new=0, seed=1)
    assert torch.equal(_flat(model)[:-32], before[:-32])
    with torch.no_grad():
        model.model.score.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="score of the reward model is not a number"):
        model.score(_SEQUENCES, _STEPS)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_copy_of_a_frozen_reference_is_trained_and_saved_as_a_classifier(tmp_path: Path, has_adapters: bool) -> None:
    """From a head of zeros its layers move too, or adapters of them; Hugging Face and another run score as it does."""
    reference = tiny.checkpoint()
    reference.model.requires_grad_(False)
    lora = {"rank": 2, "alpha": 4.0, "targets": ["all-linear"]} if has_adapters else None
    model = _made(reference, epochs=3, engine__lora=lora)
    before = {name: weight.detach().clone() for name, weight in model.model.named_parameters()}
    model.fit(_toy(range(10)), num_new=0, seed=1)
    moved = {name for name, weight in model.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if not has_adapters or "lora_" in name or name == "score.weight"}
    model.save(tmp_path)
    scores = model.score(_SEQUENCES, _STEPS)
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.sigmoid(_library_logit(library, _SEQUENCES[2], 2)).item() == pytest.approx(scores[2][0], abs=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == reference.tokenizer.get_vocab()
    again = _made(reference, base=str(tmp_path)).score(_SEQUENCES, _STEPS)
    torch.testing.assert_close(again, scores, rtol=0, atol=1e-6 if has_adapters else 0)


def test_the_head_of_a_bfloat16_model_is_computed_in_float32(tmp_path: Path) -> None:
    """Its scores are finer than bfloat16, in which those of close completions would be equal."""
    model = _model(tmp_path, engine__precision="bf16", engine__zero_stage=2)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    scores = torch.tensor([*chain(*model.score(_SEQUENCES, _STEPS))])
    assert not torch.equal(scores, scores.bfloat16().float())


def test_a_completion_is_labeled_where_it_has_a_verdict() -> None:
    """Steps without one are left out, completions without any or that are masked too."""
    model = _made(tiny.checkpoint(), sampling__truncated="mask", group_size=2)
    partly, nothing, masked = (scored({}, ends=[1, 3], finished=finished) for finished in (True, True, False))
    for each, rewards in ((partly, (math.nan, 1.0)), (nothing, (math.nan, math.nan)), (masked, (0.0, 0.0))):
        each.steps = tuple(Step(step.end, reward) for step, reward in zip(each.steps, rewards, strict=True))
    model.collect([group(partly, nothing), group(masked, partly)])
    expected = LabeledExample(partly.completion.tokens, (3,), (1.0,))
    assert [unpack(row) for row in model.collected] == [expected] * 2


def _numbered(start: int, count: int) -> list[PackedExample]:
    """Return examples that differ in their only completion token."""
    return [_example(TokenSequence((1, 2), (number,)), (1,), (1.0,)) for number in range(start, start + count)]


def _numbers(rows: Iterable[PackedExample]) -> list[int]:
    return [unpack(row).tokens.completion_ids[0] for row in rows]


def _after(*iterations: Sequence[PackedExample]) -> Replay:
    replay = Replay()
    for rows in iterations:
        replay.add(rows)
    return replay


@pytest.mark.parametrize(("num_new", "num_old"), [(90, 10), (4, 0), (1800, 100)])
def test_old_examples_make_up_a_tenth_of_the_total(num_new: int, num_old: int) -> None:
    """Of 100 that is 10 old to 90 new: the new come first, the old from all there are, none twice, by the seed."""
    replay = _after(_numbered(0, 100))
    mixes = [_numbers(replay.mix(_numbered(1000, num_new), seed=seed)) for seed in (1, 1, 2)]
    assert mixes[0][:num_new] == [*range(1000, 1000 + num_new)]
    assert len(mixes[0][num_new:]) == len({*mixes[0][num_new:]} & {*range(100)}) == num_old
    assert mixes[0] == mixes[1]
    assert num_old != 10 or mixes[0] != mixes[2]


def test_a_full_reservoir_is_a_uniform_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for 100, each quarter of 2,000 examples is kept alike, in whatever parts they came."""
    monkeypatch.setattr(module, "_CAPACITY", 100)
    rows, new = _numbered(0, 2000), _numbered(5000, 900)
    quarters: Counter[int] = Counter()
    for size in range(30, 70):
        replay = _after(*(rows[start : start + size] for start in range(0, 2000, size)))
        numbers = _numbers(replay.mix(new, seed=1)[900:])
        assert len(set(numbers)) == len(numbers) == 100
        quarters.update(number // 500 for number in numbers)
    assert all(abs(quarters[quarter] / 4000 - 0.25) < 0.03 for quarter in range(4))


def test_a_restored_replay_goes_on_as_the_saved_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is tensors, and after it both take in and keep the same."""
    monkeypatch.setattr(module, "_CAPACITY", 10)
    steps = _example(TokenSequence((1, 2), (3, 4, 5)), (1, 3), (0.0, 1.0))
    saved, restored = _after(_numbered(0, 15), [steps] * 5), Replay()
    restored.restore({name: tensor.clone() for name, tensor in saved.state().items()})
    for replay in (saved, restored):
        replay.add(_numbered(100, 30))
    torch.testing.assert_close(restored.state(), saved.state(), rtol=0, atol=0)


def train_in_ranks(config: TrainGRPOConfig, *, base: Path, folder: Path) -> dict[str, float]:
    """Train and score in this process's part; write what became of it to folder/PROCESSES-STAGE-RANK.pt."""
    assert config.reward.model is not None
    prepare_process(1)
    ranks = init_ranks(config.engine)
    rows = _toy(range(70))
    for stage in (0, 2, 3):
        changed = config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": stage})})
        model = RewardModel(changed, config.reward.model.model_copy(update={"base": str(base)}), tiny.checkpoint())
        figures = model.fit(rows, num_new=10, seed=1)
        checkpoint, tensors = folder / f"{ranks.world_size}-{stage}", model.tensors()
        checkpoint.mkdir(exist_ok=True)
        if ranks.is_main:
            for name, of_name in tensors.items():
                save_file(of_name, checkpoint / f"{name}.safetensors")
            torch.save({}, checkpoint / "values.pt")
        # The last process has nothing to score where there are two.
        shard = slice(0, 0 if ranks.rank else len(_SEQUENCES))
        scores, weights = model.score(_SEQUENCES[shard], _STEPS[shard]), _flat(model)
        model.save(checkpoint / "classifier")
        result = {"figures": figures, "scores": scores, "weights": weights}
        torch.save(result, folder / f"{ranks.world_size}-{stage}-{ranks.rank}.pt")
    return {}


@pytest.mark.long(minutes=2)
def test_training_depends_on_neither_processes_nor_sharding(tmp_path: Path) -> None:
    """Two processes that share steps end with the weights of one."""
    _save_classifier(tmp_path / "base")
    folders = {"base": tmp_path / "base", "folder": tmp_path}
    for processes in (1, 2):
        config = reward_model_config(epochs=2, learning_rate=1e-3, engine__num_processes=processes)
        run_ranks(train_in_ranks, config, folders, num_processes=processes, work=tmp_path / "work", grace_s=30)
    expected = torch.load(tmp_path / "1-0-0.pt")
    assert expected["figures"]["reward_model_examples"] == 70
    for name in ("1-2-0", "1-3-0", "2-0-0", "2-0-1", "2-2-0", "2-2-1", "2-3-0", "2-3-1"):
        actual = torch.load(tmp_path / f"{name}.pt")
        assert actual["figures"] == pytest.approx(expected["figures"], rel=1e-4), name
        torch.testing.assert_close(actual["weights"], expected["weights"], rtol=0, atol=2e-4)
        if not name.endswith("1"):
            torch.testing.assert_close(actual["scores"], expected["scores"], rtol=0, atol=1e-3)
    # What two processes have sharded, one goes on from, and Hugging Face loads.
    saved = TrainingCheckpoint(tmp_path / "2-3")
    resumed = _made(tiny.checkpoint(), saved, base=str(tmp_path / "base"), engine__zero_stage=0)
    torch.testing.assert_close(_flat(resumed), torch.load(tmp_path / "2-3-0.pt")["weights"], rtol=0, atol=0)
    again = _made(tiny.checkpoint(), base=str(tmp_path / "2-3" / "classifier"))
    torch.testing.assert_close(_flat(again), _flat(resumed), rtol=0, atol=0)


class _Second(Ranks):
    """The second of two processes, which has fewer micro-batches than the first."""

    def all_gather(self, value: Any, what: str) -> list[Any]:
        del what
        return [value + 1 if isinstance(value, int) else value, value]


def test_a_process_without_examples_takes_part() -> None:
    """As the second one has none of a single example: it has no loss and no score."""
    model = _made(tiny.checkpoint(), engine__zero_stage=0)
    model._ranks = _Second(1, 2)
    before = _flat(model)
    figures = model.fit(_toy(range(1)), num_new=1, seed=1)
    assert (figures["reward_model_loss"], figures["reward_model_examples"]) == (0.0, 1.0)
    assert torch.equal(_flat(model), before)
    assert model.score([], []) == []


def test_a_copy_of_the_reference_has_its_layers_and_a_head_of_zeros() -> None:
    """Its weights are copies: training the one must not move the other. Making them draws no random number."""
    reference, random_state = tiny.checkpoint(), torch.get_rng_state()
    copy = load_classifier("reference", reference, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), random_state)
    state, copied = reference.model.base_model.state_dict(), copy.base_model.state_dict()
    torch.testing.assert_close(copied, state, rtol=0, atol=0)
    assert torch.equal(copy.score.weight, torch.zeros(1, 64))
    pointers = {each.data_ptr() for each in reference.model.parameters()}
    assert pointers.isdisjoint(each.data_ptr() for each in copy.parameters())


def test_a_model_family_without_classifier_is_named() -> None:
    """Where transformers has no sequence classifier of the reference's kind, the error says so."""
    model = XGLMForCausalLM(XGLMConfig(vocab_size=300, d_model=16, num_layers=1, attention_heads=2, ffn_dim=16))
    reference = Checkpoint(model, tiny.checkpoint().tokenizer, tiny.MODEL)
    with pytest.raises(PipelineError, match=r"reward\.model\.base: reference: .* like XGLMForCausalLM"):
        load_classifier("reference", reference, dtype=torch.float32)


def _with_other_tokens(folder: Path) -> None:
    """Write a classifier with the same words under other ids."""
    _save_classifier(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"A":', '"?":').replace('"B":', '"A":').replace('"?":', '"B":'))


def _encoder(folder: Path) -> None:
    size = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **size)).save_pretrained(folder)
    tiny.checkpoint().tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: save(tiny.checkpoint(), folder), r"lacks 1 of its weights, such as score\.weight"),
        (lambda folder: _save_classifier(folder, num_labels=2), "has 2 labels, 1 is expected"),
        (_with_other_tokens, "its vocabulary is not the policy's"),
        (_encoder, "BertForSequenceClassification has no linear head `score`"),
        (lambda folder: None, "cannot be loaded .*folder or hub id"),
    ],
)
def test_a_checkpoint_that_cannot_score_steps_is_refused(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    """A head is never made up, has one score, and reads the policy's tokens at any place."""
    write(tmp_path)
    with pytest.raises(PipelineError, match=message):
        load_classifier(str(tmp_path), tiny.checkpoint(), dtype=torch.float32)
