"""The learned reward model: what a completion is worth, learned from the verifier's verdicts.

One head serves both kinds of supervision. Read at the last token of a completion it is the outcome reward model, read
at the last token of each step the process reward model (DeepSeekMath, arXiv 2402.03300, sections 4.1.2 and 4.1.3).

It is trained by the engine of the policy, with the same keys: sharding, offloading, precision, adapters, micro-batches,
clipping and weight decay. Every process calls each public method here together with the others, and holds all examples.

Shape suffixes, beside those of objective.py:
    R  sequences of a micro-batch, one in each row     T  tokens of the longest of them, padded on the right
    E  step ends of a micro-batch, where the head is read, row after row     D  hidden size
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from components.policy.checkpoint import Checkpoint, save_tokenizer
from components.policy.engine import Engine, NonFiniteError, torch_dtype
from components.policy.lora import add_adapters, merged_state_dict
from components.policy.packing import TokenSequence
from components.policy.training import TrainingCheckpoint, memory_for_update
from components.shared.errors import PipelineError, out_of_memory
from components.shared.progress import say
from components.train_grpo.config import RewardModelConfig, TrainGRPOConfig
from components.train_grpo.reward_examples import (
    LabeledExample,
    Replay,
    Row,
    examples_of,
    joined,
    separated,
    unpacked,
)
from components.train_grpo.scoring import Group

_STAGE = "train_grpo"
_EXAMPLES_PER_STEP = 64
"""At most so many examples share an optimizer step: enough for a steady gradient, few enough for several steps."""
_EXAMPLES_READ = 1024
"""Examples that are unpacked and scored at once."""
_EXPECTED_BASE = "expected the folder or hub id of a sequence classifier, or `reference` to make one"
_WEIGHTS, _EXAMPLES = "reward_model", "reward_examples"
"""Names of the tensors in a checkpoint."""


class RewardModel:
    """A sequence classifier with one label, retrained on each iteration with a share of earlier ones (line 12)."""

    def __init__(
        self,
        config: TrainGRPOConfig,
        settings: RewardModelConfig,
        reference: Checkpoint,
        saved: TrainingCheckpoint | None = None,
    ) -> None:
        """Load the model that `settings.base` names, reading the tokens of `reference`, or the one that was `saved`.

        PipelineError where it cannot be loaded.
        """
        self.config = config
        self.settings = settings
        self.reference = reference
        self.model = load_classifier(settings.base, reference, dtype=torch_dtype(config.engine)).eval()
        self._device = self.model.device
        add_adapters(self.model, config.engine.lora, seed=config.seed)
        self.model.score.requires_grad_(True)  # trained whole beside adapters, too: a new head is zero
        weights = saved.tensors(_WEIGHTS) if saved else None
        self.engine: Engine[PaddedBatch, Tensor] = Engine(ScoreModel(self.model), config.engine, weights)
        self._ranks = self.engine.ranks
        self.collected: list[Row] = []
        self._replay = Replay()
        if saved:
            examples = load_file(saved.tensors(_EXAMPLES))
            self.collected = separated(examples, "collected")
            self._replay.restore(examples)

    def collect(self, groups: Sequence[Group]) -> None:
        """Add what a rollout teaches by the verifier's verdicts."""
        self.collected += [each.packed() for group in groups for each in examples_of(self.config, group)]

    def retrain(self, iteration: int) -> dict[str, float]:
        """Train on what was collected since the last time; return the metrics."""
        new, self.collected = self.collected, []
        seed = self.config.seed + iteration
        examples = self._replay.mix(new, seed=seed)
        figures = self.fit(examples, num_new=len(new), seed=seed)
        self._replay.add(new)
        self._say("reward model trained" if new else "reward model not trained: no verdict to learn from", figures)
        return {"iteration": iteration, **figures}

    @torch.no_grad()
    def score(self, tokens: Sequence[TokenSequence], step_ends: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return for each sequence of this process the probability that it is right, as read at each of its step ends.

        Raises NonFiniteError where one is not a number, which as a reward would mean an unscorable completion.
        """
        examples = [LabeledExample(*fields, labels=()) for fields in zip(tokens, step_ends, strict=True)]
        scores: list[list[float]] = [[] for _ in tokens]
        for batch in self._batches(examples):
            scores_E = torch.sigmoid(self.engine(batch))
            if scores_E.isnan().any():
                raise NonFiniteError("a score of the reward model is not a number")
            scores_of_batch = iter(scores_E.tolist())
            for index in batch.examples:
                scores[index] = list(islice(scores_of_batch, len(step_ends[index])))
        return scores

    def fit(self, rows: Sequence[Row], *, num_new: int, seed: int) -> dict[str, float]:
        """Train on rows, equal in all processes, in an order given by `seed`; return the metrics.

        The first `num_new` examples are new, the rest replayed. `reward_model_accuracy` is the share of new labels on
        whose side the score was before any of this training (exactly between is on neither side), and
        `reward_model_loss` the loss per label in the last pass, each label before its step. Both are NaN where there
        are no examples. Raises NonFiniteError before a step whose loss is not finite.
        """
        accuracy = self._accuracy(rows[:num_new])
        num_steps = math.ceil(len(rows) / _EXAMPLES_PER_STEP)
        order, loss = random.Random(seed), math.nan
        for _ in range(self.settings.epochs if rows else 0):
            shuffled = order.sample(rows, len(rows))
            with memory_for_update(_STAGE, self.config.engine):
                # Every num_steps-th example: steps of equal size, not a last one of whatever is left.
                losses = [self._step(shuffled[step::num_steps]) for step in range(num_steps)]
            loss = sum(total for total, _ in losses) / sum(num_labels for _, num_labels in losses)
        return {
            "reward_model_loss": loss,
            "reward_model_accuracy": accuracy,
            "reward_model_examples": float(len(rows)),
        }

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that `AutoModelForSequenceClassification` loads, adapters merged."""
        with self.engine.gather_full_parameters():
            if self._ranks.is_main:
                self.model.save_pretrained(folder, state_dict=merged_state_dict(self.model))
                save_tokenizer(self.reference.tokenizer, folder)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return all that further training and scoring depend on, by name, for a checkpoint of the main process."""
        return {
            _WEIGHTS: self.engine.state(),
            _EXAMPLES: {**joined(self.collected, "collected"), **self._replay.state()},
        }

    @torch.no_grad()
    def _accuracy(self, rows: Sequence[Row]) -> float:
        """Return the share of the labels of rows on whose side the score is; NaN without any."""
        right = total = 0
        for start in range(0, len(rows), _EXAMPLES_READ):
            examples = self._own(rows[start : start + _EXAMPLES_READ])
            for batch in self._batches(examples):
                labels_E = _labels(batch, examples)
                right += int((self.engine(batch) * (2 * labels_E - 1) > 0).sum())
                total += len(labels_E)
        sums = [sum(each) for each in zip(*self._ranks.all_gather((right, total), "an accuracy"), strict=True)]
        return sums[0] / sums[1] if sums[1] else math.nan

    def _step(self, rows: Sequence[Row]) -> tuple[float, int]:
        """Take an optimizer step on the mean loss per label; return the sum from before it, and the number of labels.

        A label has the loss -log p(label) with p(right) = sigmoid(score).
        """
        num_labels = sum(len(unpacked(row).labels) for row in rows)
        examples = self._own(rows)
        for batch in self._batches(examples):
            labels_E = _labels(batch, examples)
            loss = functional.binary_cross_entropy_with_logits(self.engine(batch), labels_E, reduction="sum")
            # Divided by the labels of the whole step: the gradient is the same however it is split.
            self.engine.backward(loss / num_labels)
        try:
            return self.engine.step(self.settings.learning_rate)["loss"] * num_labels, num_labels
        except NonFiniteError as error:
            raise NonFiniteError(f"the reward model: {error}") from None

    def _batches(self, examples: Sequence[LabeledExample]) -> list["PaddedBatch"]:
        """Return micro-batches of this process's examples, then empty ones: as many as any other process has.

        Under ZeRO 2 and 3 each pass waits for a pass of every other process.
        """
        batches = padded_batches(examples, self.config.engine.micro_batch_tokens, self._device)
        most = max(self._ranks.all_gather(len(batches), "the micro-batches of the reward model"))
        return batches + [_empty_batch(self._device)] * (most - len(batches))

    def _own(self, rows: Sequence[Row]) -> list[LabeledExample]:
        """Return this process's part, of about as many tokens as any other's."""
        by_length = sorted(map(unpacked, rows), key=lambda example: -len(example.tokens))
        return by_length[self._ranks.rank :: self._ranks.world_size]

    def _say(self, what: str, figures: dict[str, float]) -> None:
        if self._ranks.is_main:
            known = [f"{name} {value:.4g}" for name, value in figures.items() if not math.isnan(value)]
            say(_STAGE, f"{what}: {', '.join(known)}")


class ScoreModel(nn.Module):
    """A classifier with its `ScoreHead`: the module that is trained, so that sharding sees one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = ScoreHead(model.score)

    def forward(self, batch: "PaddedBatch") -> Tensor:
        """Return the output of the head at the E step ends, and nowhere else."""
        hidden_RTD = self.model.base_model(
            input_ids=batch.input_ids_RT, attention_mask=batch.attention_mask_RT, use_cache=False
        ).last_hidden_state
        scores_E: Tensor = self.head(hidden_RTD[batch.row_E, batch.position_E])
        return scores_E


class ScoreHead(nn.Module):
    """The head of a classifier, computed in float32 at least: in bfloat16 close scores would be equal.

    The layer's weight is a parameter of this module too, so that ZeRO 3 gathers it when this module runs.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden_ED: Tensor) -> Tensor:
        """Return a score for each hidden state, (E,)."""
        dtype = torch.promote_types(hidden_ED.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(hidden_ED.to(dtype), self.weight.to(dtype), bias).squeeze(1)


# Micro-batches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences padded on the right, and where the head is read."""

    examples: list[int]
    """The index of the example in each row."""
    input_ids_RT: Tensor
    attention_mask_RT: Tensor
    row_E: Tensor
    position_E: Tensor


def padded_batches(examples: Sequence[LabeledExample], max_tokens: int, device: torch.device) -> list[PaddedBatch]:
    """Split examples into micro-batches of at most `max_tokens` tokens with padding, like lengths together.

    Step ends count completion tokens: the head is read at the last token counted. An example that alone is longer gets
    a micro-batch of its own.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(examples)), key=lambda index: len(examples[index].tokens)):
        if groups and len(examples[index].tokens) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_padded_batch(examples, group, device) for group in groups]


def _padded_batch(examples: Sequence[LabeledExample], group: list[int], device: torch.device) -> PaddedBatch:
    sequences, ends_R = zip(*((examples[index].tokens, examples[index].step_ends) for index in group), strict=True)
    rows = [torch.tensor([*sequence.prompt_ids, *sequence.completion_ids]) for sequence in sequences]
    # Token 0 pads, whatever it is: places are counted, never found by comparing with it.
    ids_RT = pad_sequence(rows, batch_first=True)
    mask_RT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    places = [
        (row, len(sequence.prompt_ids) + end - 1)
        for row, (sequence, ends) in enumerate(zip(sequences, ends_R, strict=True))
        for end in ends
    ]
    row_E, position_E = torch.tensor(places, dtype=torch.long).reshape(-1, 2).T
    return PaddedBatch(group, *(each.to(device) for each in (ids_RT, mask_RT, row_E, position_E)))


def _empty_batch(device: torch.device) -> PaddedBatch:
    """Return a micro-batch of one token, which is read nowhere."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return PaddedBatch([], zero[None], torch.ones_like(zero)[None], zero[:0], zero[:0])


def _labels(batch: PaddedBatch, examples: Sequence[LabeledExample]) -> Tensor:
    """Return the label of each place at which the head is read."""
    labels = [label for index in batch.examples for label in examples[index].labels]
    return torch.tensor(labels, dtype=torch.float32, device=batch.row_E.device)


# The base model -------------------------------------------------------------------------------------------------------


def load_classifier(base: str, reference: Checkpoint, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the classifier that `base` names, in a type and on the device of `reference`.

    The base `reference` makes one of the reference's layers and a head of zeros: every score is one half at first. Any
    other base is a checkpoint; PipelineError where it cannot be loaded, has more than one score or other tokens.
    """
    classifier = _copy(reference, dtype) if base == "reference" else _load(base, reference, dtype)
    placed: PreTrainedModel = classifier.to(reference.device)
    return placed


def _copy(reference: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    model = reference.model
    # Through a dictionary, which leaves behind how the reference computes its attention.
    config = type(model.config).from_dict({**model.config.to_diff_dict(), "num_labels": 1})
    try:
        # All the random weights are replaced: what is drawn after this must not depend on them.
        with torch.random.fork_rng(devices=[]):
            copy = AutoModelForSequenceClassification.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError:
        problem = f"transformers has no sequence classifier like {type(model).__name__}"
        raise _error("reference", f"{problem}; name a checkpoint of another family with the same tokenizer") from None
    copy.base_model.load_state_dict(model.base_model.state_dict())
    nn.init.zeros_(copy.score.weight)
    return copy


def _load(base: str, reference: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    try:
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            base, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if out_of_memory(error) is not None:
            raise
        reason = str(error).strip().split("\n", 1)[0]
        raise _error(base, f"cannot be loaded ({reason}); {_EXPECTED_BASE}") from None
    if missing := sorted(loading["missing_keys"], reverse=True):
        raise _error(base, f"lacks {len(missing)} of its weights, such as {missing[0]}; {_EXPECTED_BASE}")
    if classifier.config.num_labels != 1:
        raise _error(base, f"has {classifier.config.num_labels} labels, 1 is expected")
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise _error(base, f"{type(classifier).__name__} has no linear head `score`, as decoders have")
    if tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise _error(base, "its vocabulary is not the policy's, whose tokens it has to read")
    return classifier


def _error(base: str, problem: str) -> PipelineError:
    return PipelineError(f"train_grpo.reward.model.base: {base}: {problem}")
