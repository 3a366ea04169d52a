"""The learned reward model: the probability that a completion is right, learned from the verifier's verdicts.

One head serves both kinds of supervision. Its output at the last token of a completion is the outcome reward, that at
the last token of each step the process reward (DeepSeekMath, arXiv 2402.03300, sections 4.1.2 and 4.1.3).

It is trained by the same engine as the policy, with the same config keys: sharding, offloading, precision, adapters,
micro-batches, clipping and weight decay. All processes call each public method together, and each holds all examples.

Shape suffixes, beside those of objective.py:
    R  sequences of a micro-batch, one in each row     T  tokens of the longest of them, padded on the right
    E  step ends of a micro-batch, at which the head is applied, row after row     D  hidden size
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
from components.policy.training import TrainingCheckpoint, explain_memory_for_update
from components.shared.errors import PipelineError, is_failed_allocation
from components.shared.progress import say
from components.train_grpo.config import EXPECTED_CLASSIFIER, RewardModelConfig, TrainGRPOConfig
from components.train_grpo.reward_examples import (
    LabeledExample,
    PackedExample,
    Replay,
    examples_of,
    from_tensors,
    to_tensors,
    unpack,
)
from components.train_grpo.scoring import Group

_STAGE = "train_grpo"
_EXAMPLES_PER_STEP = 64
"""Largest number of examples in an optimizer step: enough for a steady gradient, few enough for several steps."""
_EXAMPLES_READ = 1024
"""Number of examples that are unpacked and scored at once."""
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
        """Load the model that `settings.base` names, with the weights that were `saved`, if any.

        PipelineError if it cannot be loaded, or does not have the tokenizer of `reference`.
        """
        self.config = config
        self.settings = settings
        self.reference = reference
        self.model = load_classifier(settings.base, reference, dtype=torch_dtype(config.engine)).eval()
        self._device = self.model.device
        add_adapters(self.model, config.engine.lora, seed=config.seed)
        self.model.score.requires_grad_(True)  # add_adapters freezes the head, but a new one is zero and has to learn
        weights = saved.tensors(_WEIGHTS) if saved else None
        self.engine: Engine[PaddedBatch, Tensor] = Engine(ScoreModel(self.model), config.engine, weights)
        self._ranks = self.engine.ranks
        self.collected: list[PackedExample] = []
        self._replay = Replay()
        if saved:
            examples = load_file(saved.tensors(_EXAMPLES))
            self.collected = from_tensors(examples, "collected")
            self._replay.restore(examples)

    def collect(self, groups: Sequence[Group]) -> None:
        """Add the examples of a rollout, labeled by the verifier."""
        self.collected += [each.pack() for group in groups for each in examples_of(self.config, group)]

    def retrain(self, iteration: int) -> dict[str, float]:
        """Train on the examples collected since the last call, and on replayed ones; return the metrics."""
        new, self.collected = self.collected, []
        seed = self.config.seed + iteration
        examples = self._replay.mix(new, seed=seed)
        figures = self.fit(examples, num_new=len(new), seed=seed)
        self._replay.add(new)
        if self._ranks.is_main:
            outcome = "reward model trained" if new else "reward model not trained: no verdict to learn from"
            known = [f"{name} {value:.4g}" for name, value in figures.items() if not math.isnan(value)]
            say(_STAGE, f"{outcome}: {', '.join(known)}")
        return {"iteration": iteration, **figures}

    @torch.no_grad()
    def score(self, tokens: Sequence[TokenSequence], step_ends: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return the probabilities that each sequence of this process is right, one at each of its step ends.

        Raises NonFiniteError if one is NaN, which as a reward would make the completion unscorable.
        """
        examples = [LabeledExample(each, ends, labels=()) for each, ends in zip(tokens, step_ends, strict=True)]
        scores: list[list[float]] = [[] for _ in tokens]
        for batch in self._batches(examples):
            scores_E = torch.sigmoid(self.engine(batch))
            if scores_E.isnan().any():
                raise NonFiniteError("a score of the reward model is not a number")
            scores_of_batch = iter(scores_E.tolist())
            for index in batch.examples:
                scores[index] = list(islice(scores_of_batch, len(step_ends[index])))
        return scores

    def fit(self, examples: Sequence[PackedExample], *, num_new: int, seed: int) -> dict[str, float]:
        """Train on examples, equal in all processes, in an order given by `seed`; return the metrics.

        The first `num_new` examples are new, the rest replayed. `reward_model_accuracy` is the accuracy for the new
        labels before this training, `reward_model_loss` the loss per label in the last pass, for each label before its
        optimizer step. Both are NaN without examples. Raises NonFiniteError before a step whose loss is not finite.
        """
        accuracy = self._accuracy(examples[:num_new])
        num_steps = math.ceil(len(examples) / _EXAMPLES_PER_STEP)
        generator, loss = random.Random(seed), math.nan
        for _ in range(self.settings.epochs if examples else 0):
            shuffled = generator.sample(examples, len(examples))
            with explain_memory_for_update(_STAGE, self.config.engine):
                # Every num_steps-th example: the steps have equal sizes, up to one example.
                losses = [self._step(shuffled[step::num_steps]) for step in range(num_steps)]
            loss = sum(total for total, _ in losses) / sum(num_labels for _, num_labels in losses)
        return {
            "reward_model_loss": loss,
            "reward_model_accuracy": accuracy,
            "reward_model_examples": float(len(examples)),
        }

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that `AutoModelForSequenceClassification` loads, adapters merged."""
        with self.engine.gather_full_parameters():
            if self._ranks.is_main:
                self.model.save_pretrained(folder, state_dict=merged_state_dict(self.model))
                save_tokenizer(self.reference.tokenizer, folder)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that further training and scoring depend on, for a checkpoint of the main process."""
        return {
            _WEIGHTS: self.engine.state(),
            _EXAMPLES: {**to_tensors(self.collected, "collected"), **self._replay.state()},
        }

    @torch.no_grad()
    def _accuracy(self, packed: Sequence[PackedExample]) -> float:
        """Return the share of labels that the sign of the score predicts (0 predicts none); NaN without labels."""
        num_right = num_labels = 0
        for start in range(0, len(packed), _EXAMPLES_READ):
            examples = self._shard(packed[start : start + _EXAMPLES_READ])
            for batch in self._batches(examples):
                labels_E = _labels(batch, examples)
                signs_E = 2 * labels_E - 1  # 1 for right, -1 for wrong
                num_right += int((self.engine(batch) * signs_E > 0).sum())
                num_labels += len(labels_E)
        counts = self._ranks.all_gather((num_right, num_labels), "an accuracy")
        num_right, num_labels = (sum(each) for each in zip(*counts, strict=True))
        return num_right / num_labels if num_labels else math.nan

    def _step(self, packed: Sequence[PackedExample]) -> tuple[float, int]:
        """Take an optimizer step on the mean loss per label; return the summed loss before it and the number of labels.

        The loss of a label is its binary cross-entropy, with p(right) = sigmoid(score).
        """
        num_labels = sum(len(unpack(each).labels) for each in packed)
        examples = self._shard(packed)
        for batch in self._batches(examples):
            labels_E = _labels(batch, examples)
            loss = functional.binary_cross_entropy_with_logits(self.engine(batch), labels_E, reduction="sum")
            # Divided by the labels of all processes: the gradient is the same however the step is split.
            self.engine.backward(loss / num_labels)
        try:
            return self.engine.step(self.settings.learning_rate)["loss"] * num_labels, num_labels
        except NonFiniteError as error:
            raise NonFiniteError(f"the reward model: {error}") from None

    def _batches(self, examples: Sequence[LabeledExample]) -> list["PaddedBatch"]:
        """Return micro-batches of this process's examples, and empty ones up to the largest number in any process.

        Under ZeRO 2 and 3 each pass waits for a pass of every other process.
        """
        batches = padded_batches(examples, self.config.engine.micro_batch_tokens, self._device)
        most = max(self._ranks.all_gather(len(batches), "the micro-batches of the reward model"))
        return batches + [_empty_batch(self._device)] * (most - len(batches))

    def _shard(self, packed: Sequence[PackedExample]) -> list[LabeledExample]:
        """Return this process's shard; all shards have about as many tokens."""
        by_length = sorted(map(unpack, packed), key=lambda example: -len(example.tokens))
        return by_length[self._ranks.rank :: self._ranks.world_size]


class ScoreModel(nn.Module):
    """A classifier with its `ScoreHead`, in one module for the engine: sharding needs a single forward method."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = ScoreHead(model.score)

    def forward(self, batch: "PaddedBatch") -> Tensor:
        """Return the scores at the E step ends."""
        hidden_RTD = self.model.base_model(
            input_ids=batch.input_ids_RT, attention_mask=batch.attention_mask_RT, use_cache=False
        ).last_hidden_state
        scores_E: Tensor = self.head(hidden_RTD[batch.row_E, batch.position_E])
        return scores_E


class ScoreHead(nn.Module):
    """The head of a classifier, computed in float32 or more: in bfloat16, scores that are close would be equal.

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
    """Sequences padded on the right, and row and position of the last token of each step."""

    examples: list[int]
    """The index of the example in each row."""
    input_ids_RT: Tensor
    attention_mask_RT: Tensor
    row_E: Tensor
    position_E: Tensor


def padded_batches(examples: Sequence[LabeledExample], max_tokens: int, device: torch.device) -> list[PaddedBatch]:
    """Split examples into micro-batches of at most `max_tokens` tokens with padding, similar lengths together.

    An example that is longer gets a separate micro-batch.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(examples)), key=lambda index: len(examples[index].tokens)):
        if groups and len(examples[index].tokens) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_padded_batch(examples, group, device) for group in groups]


def _padded_batch(examples: Sequence[LabeledExample], group: list[int], device: torch.device) -> PaddedBatch:
    """Return the micro-batch of the examples at the indices `group`."""
    rows, row_indices, positions = [], [], []
    for row_index, index in enumerate(group):
        tokens, step_ends = examples[index].tokens, examples[index].step_ends
        rows.append(torch.tensor([*tokens.prompt_ids, *tokens.completion_ids]))
        row_indices += [row_index] * len(step_ends)
        positions += [len(tokens.prompt_ids) + end - 1 for end in step_ends]
    # The padding token 0 may also be a real token: only the mask tells them apart.
    ids_RT = pad_sequence(rows, batch_first=True)
    mask_RT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    row_E, position_E = torch.tensor(row_indices, dtype=torch.long), torch.tensor(positions, dtype=torch.long)
    return PaddedBatch(group, ids_RT.to(device), mask_RT.to(device), row_E.to(device), position_E.to(device))


def _empty_batch(device: torch.device) -> PaddedBatch:
    """Return a micro-batch of one token, without tokens to score."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return PaddedBatch([], zero[None], torch.ones_like(zero)[None], zero[:0], zero[:0])


def _labels(batch: PaddedBatch, examples: Sequence[LabeledExample]) -> Tensor:
    """Return the label of each step end of a micro-batch, (E,)."""
    labels = [label for index in batch.examples for label in examples[index].labels]
    return torch.tensor(labels, dtype=torch.float32, device=batch.row_E.device)


# The base model -------------------------------------------------------------------------------------------------------


def load_classifier(base: str, reference: Checkpoint, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the classifier that `base` names, with weights of type `dtype` on the device of `reference`.

    The base `reference` is a copy of the reference with a head of zeros: at first, every probability is one half. Any
    other base is a checkpoint; PipelineError if it cannot be loaded, has more than one label or another vocabulary.
    """
    classifier = _copy(reference, dtype) if base == "reference" else _load(base, reference, dtype)
    placed: PreTrainedModel = classifier.to(reference.device)
    return placed


def _copy(reference: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return a classifier with the layers of the reference and a head of zeros."""
    model = reference.model
    # The dictionary lacks the attention implementation of the reference, which takes packed rows.
    config = type(model.config).from_dict({**model.config.to_diff_dict(), "num_labels": 1})
    try:
        # from_config draws random weights, which are replaced below: they must not change later random numbers.
        with torch.random.fork_rng(devices=[]):
            copy = AutoModelForSequenceClassification.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError:
        problem = f"transformers has no sequence classifier like {type(model).__name__}"
        raise _error("reference", f"{problem}; name a checkpoint of another family with the same tokenizer") from None
    copy.base_model.load_state_dict(model.base_model.state_dict())
    nn.init.zeros_(copy.score.weight)
    return copy


def _load(base: str, reference: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return the classifier of a checkpoint, see `load_classifier`."""
    try:
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            base, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if is_failed_allocation(error):
            raise
        reason = str(error).strip().split("\n", 1)[0]
        raise _error(base, f"cannot be loaded ({reason}); {EXPECTED_CLASSIFIER}") from None
    if missing := sorted(loading["missing_keys"], reverse=True):
        raise _error(base, f"lacks {len(missing)} of its weights, such as {missing[0]}; {EXPECTED_CLASSIFIER}")
    if classifier.config.num_labels != 1:
        raise _error(base, f"has {classifier.config.num_labels} labels, 1 is expected")
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise _error(base, f"{type(classifier).__name__} has no linear head `score`, as decoders have")
    if tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise _error(base, "its vocabulary is not the policy's, whose tokens it has to read")
    return classifier


def _error(base: str, problem: str) -> PipelineError:
    return PipelineError(f"train_grpo.reward.model.base: {base}: {problem}")
