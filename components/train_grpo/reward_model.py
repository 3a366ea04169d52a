"""The learned reward model: how likely a completion is right, learned from the verifier's verdicts.

One head serves both kinds of supervision. Read at the last token of a completion it is the outcome reward model, read
at the last token of each step the process reward model (DeepSeekMath, arXiv 2402.03300, sections 4.1.2 and 4.1.3).

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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from components.policy.checkpoint import Checkpoint
from components.policy.engine import NonFiniteError
from components.policy.packing import TokenSequence
from components.policy.training import memory_for_passes
from components.shared.errors import PipelineError, out_of_memory
from components.shared.progress import say
from components.train_grpo.config import RewardModelConfig, TrainGRPOConfig
from components.train_grpo.rewards import Group, is_masked

Row = npt.NDArray[np.int32]
"""A labeled example in 4 bytes per token: every process holds those of a whole iteration."""
_CAPACITY = 10_000
"""Examples in the replay: a tenth of the training of iterations of 90,000 completions, 22 MB at 500 tokens each."""
_EXAMPLES_PER_STEP = 64
"""At most so many examples share an optimizer step: enough for a steady gradient, few enough for several steps."""
_EXAMPLES_READ = 1024
"""Examples that are unpacked and scored at once."""
_EXPECTED_BASE = "expected the folder or hub id of a sequence classifier, or `reference` to make one"


class RewardModel:
    """A sequence classifier with one label, retrained on each iteration with a share of earlier ones (line 12).

    Weights and scores are float32 whatever the policy's are: at the rates of fine-tuning, most updates of bfloat16
    weights round to nothing. The optimizer goes on from one training to the next.
    """

    def __init__(self, config: TrainGRPOConfig, settings: RewardModelConfig, reference: Checkpoint) -> None:
        """Load the model that `settings.base` names, reading the tokens of `reference`; PipelineError if it cannot."""
        self.config = config
        self.settings = settings
        # Never in training mode: that would only switch dropout on.
        self.model = load_classifier(settings.base, reference).eval()
        self.tokenizer = reference.tokenizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.collected: list[Row] = []
        self._replay = Replay()

    def collect(self, groups: Sequence[Group]) -> None:
        """Add the completions of a rollout that are not masked, with the verifier's label for each scorable step."""
        for scored in (scored for group in groups for scored in group.scored_G):
            steps = [step for step in scored.steps if not math.isnan(step.reward)]
            if steps and not is_masked(self.config, scored.completion):
                ends, labels = tuple(step.end for step in steps), tuple(step.reward for step in steps)
                self.collected.append(LabeledExample(scored.completion.tokens, ends, labels).packed())

    def retrain(self, iteration: int) -> dict[str, float]:
        """Train on what was collected since the last time; return the metrics."""
        new, self.collected = self.collected, []
        seed = self.config.seed + iteration
        examples = self._replay.mix(new, fraction=self.settings.replay_fraction, seed=seed)
        with memory_for_passes("train_grpo", self.config.engine, "the training of the reward model"):
            figures = self.fit(examples, num_new=len(new), seed=seed)
        self._replay.add(new)
        say("train_grpo", "reward model trained: " + ", ".join(f"{name} {x:.4g}" for name, x in figures.items()))
        return {"iteration": iteration, **figures}

    @torch.no_grad()
    def score(self, tokens: Sequence[TokenSequence], step_ends: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return for each sequence the probabilities in [0, 1] that it is right, as read at each of its step ends.

        Raises NonFiniteError where one is not a number, which as a reward would mean an unscorable completion.
        """
        scores: list[list[float]] = [[] for _ in tokens]
        for batch in padded_batches(tokens, step_ends, self.config.engine.micro_batch_tokens, self.model.device):
            scores_E = torch.sigmoid(self._logits(batch))
            if scores_E.isnan().any():
                raise NonFiniteError("a score of the reward model is not a number")
            scores_of_batch = iter(scores_E.tolist())
            for index in batch.sequences:
                scores[index] = list(islice(scores_of_batch, len(step_ends[index])))
        return scores

    def fit(self, rows: Sequence[Row], *, num_new: int, seed: int) -> dict[str, float]:
        """Train for `epochs` passes in an order given by `seed`; return the metrics.

        The first `num_new` examples are new, the rest replayed. `reward_model_accuracy` is the share of new labels on
        whose side of one half the score was before any of this training (exactly one half is on neither side), and
        `reward_model_loss` the cross-entropy per label in the last pass, each label before its step. Both are NaN where
        there are no examples. Raises NonFiniteError before a step whose loss is not finite.
        """
        accuracy = self._accuracy(rows[:num_new])
        num_labels = sum(len(LabeledExample.unpacked(row).labels) for row in rows)
        num_steps = math.ceil(len(rows) / _EXAMPLES_PER_STEP)
        order, loss = random.Random(seed), math.nan
        for _ in range(self.settings.epochs if rows else 0):
            shuffled = order.sample(rows, len(rows))
            # Every num_steps-th example: steps of equal size, not a last one of whatever is left.
            loss = sum(self._step(shuffled[step::num_steps]) for step in range(num_steps)) / num_labels
        return {
            "reward_model_loss": loss,
            "reward_model_accuracy": accuracy,
            "reward_model_examples": float(len(rows)),
        }

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that `AutoModelForSequenceClassification.from_pretrained` loads."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def state(self, *, main: bool) -> dict[str, Any]:
        """Return everything as plain values, for a checkpoint; the examples only in the `main` process."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "replay": self._replay.state(),
            "collected": joined(self.collected) if main else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned in the main process."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._replay.restore(state["replay"])
        self.collected = separated(state["collected"])

    def _logits(self, batch: "PaddedBatch") -> Tensor:
        """Return the output of the head at the E step ends, and nowhere else."""
        hidden_RTD = self.model.base_model(
            input_ids=batch.input_ids_RT, attention_mask=batch.attention_mask_RT, use_cache=False
        ).last_hidden_state
        logits_E: Tensor = self.model.score(hidden_RTD[batch.row_E, batch.position_E]).squeeze(1)
        return logits_E

    def _accuracy(self, rows: Sequence[Row]) -> float:
        agree: list[bool] = []
        for start in range(0, len(rows), _EXAMPLES_READ):
            examples = [LabeledExample.unpacked(row) for row in rows[start : start + _EXAMPLES_READ]]
            scores = self.score([each.tokens for each in examples], [each.step_ends for each in examples])
            for example, scores_of_steps in zip(examples, scores, strict=True):
                pairs = zip(scores_of_steps, example.labels, strict=True)
                agree += [(score - 0.5) * (label - 0.5) > 0 for score, label in pairs]
        return sum(agree) / len(agree) if agree else math.nan

    def _step(self, rows: Sequence[Row]) -> float:
        """Take an optimizer step on the mean loss per label; return the sum over labels from before it."""
        examples = [LabeledExample.unpacked(row) for row in rows]
        tokens, step_ends = [each.tokens for each in examples], [each.step_ends for each in examples]
        num_labels = sum(map(len, step_ends))
        total = 0.0
        for batch in padded_batches(tokens, step_ends, self.config.engine.micro_batch_tokens, self.model.device):
            labels = [label for index in batch.sequences for label in examples[index].labels]
            logits_E = self._logits(batch)
            labels_E = torch.tensor(labels, device=logits_E.device)
            loss = functional.binary_cross_entropy_with_logits(logits_E, labels_E, reduction="sum")
            # Divided by the labels of the whole step: the gradient is the same however it is split.
            torch.autograd.backward(loss / num_labels)
            total += loss.item()
        if not math.isfinite(total):
            raise NonFiniteError(f"the loss of the reward model is {total}; stopped before its optimizer step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


# Examples -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabeledExample:
    """A completion with a label for each of its steps."""

    tokens: TokenSequence
    step_ends: tuple[int, ...]
    """Completion tokens up to and including the last of each step; for an outcome the completion is one step."""
    labels: tuple[float, ...]
    """For each step 1 for right, 0 for wrong."""

    def packed(self) -> Row:
        """Return one array: the numbers of tokens of prompt and completion, the tokens, step ends, and labels."""
        prompt, completion = self.tokens.prompt_ids, self.tokens.completion_ids
        labels = map(int, self.labels)
        return np.array([len(prompt), len(completion), *prompt, *completion, *self.step_ends, *labels], np.int32)

    @classmethod
    def unpacked(cls, row: Row) -> "LabeledExample":
        """Return the example of an array that `packed` returned."""
        num_prompt, num_completion, *values = row.tolist()
        end = num_prompt + num_completion
        num_steps = (len(values) - end) // 2
        tokens = TokenSequence(tuple(values[:num_prompt]), tuple(values[num_prompt:end]))
        return cls(tokens, tuple(values[end : end + num_steps]), tuple(map(float, values[end + num_steps :])))


def joined(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return examples in two tensors, for a checkpoint."""
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {"rows": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *rows])), "sizes": sizes}


def separated(state: dict[str, Tensor]) -> list[Row]:
    """Return the examples that were `joined`."""
    return [rows.numpy() for rows in state["rows"].split(state["sizes"].tolist())]


class Replay:
    """A uniform sample of all examples of earlier iterations: a reservoir, with all of them until it is full.

    It keeps the model from forgetting: Algorithm 1 (section 4.1.4) retrains it with 10 % historical data.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._sample: list[Row] = []

    def mix(self, new: list[Row], *, fraction: float, seed: int) -> list[Row]:
        """Return the new examples, then earlier ones: `fraction` of the result, or all there are."""
        num_old = round(len(new) * fraction / (1 - fraction))
        return new + random.Random(seed).sample(self._sample, min(num_old, len(self._sample)))

    def add(self, new: Sequence[Row]) -> None:
        """Add the examples of a finished iteration."""
        # Algorithm R (Vitter, 1985), seeded by how many were seen: the count is all there is to restore.
        generator = random.Random(self._num_seen)
        for example in new:
            self._num_seen += 1
            if len(self._sample) < _CAPACITY:
                self._sample.append(example)
            elif (index := generator.randrange(self._num_seen)) < _CAPACITY:
                self._sample[index] = example

    def state(self) -> dict[str, Any]:
        """Return everything as plain values, for a checkpoint."""
        return {"num_seen": self._num_seen, "examples": joined(self._sample)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._num_seen, self._sample = state["num_seen"], separated(state["examples"])


# Micro-batches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences padded on the right, and where the head is read."""

    sequences: list[int]
    """The index of each row among all sequences."""
    input_ids_RT: Tensor
    attention_mask_RT: Tensor
    row_E: Tensor
    position_E: Tensor


def padded_batches(
    tokens: Sequence[TokenSequence], step_ends: Sequence[tuple[int, ...]], max_tokens: int, device: torch.device
) -> list[PaddedBatch]:
    """Split sequences into micro-batches of at most `max_tokens` tokens with padding, like lengths together.

    `step_ends` count completion tokens: the head is read at the last token counted. A sequence that alone is longer
    gets a micro-batch of its own.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(tokens)), key=lambda index: len(tokens[index])):
        if groups and len(tokens[index]) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    batches = []
    for group in groups:
        rows = [torch.tensor([*tokens[index].prompt_ids, *tokens[index].completion_ids]) for index in group]
        # Token 0 pads, whatever it is: places are counted, never found by comparing with it.
        ids_RT = pad_sequence(rows, batch_first=True)
        mask_RT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ends = [(row, index, end) for row, index in enumerate(group) for end in step_ends[index]]
        row_E = torch.tensor([row for row, _, _ in ends], dtype=torch.long)
        position_E = torch.tensor([len(tokens[index].prompt_ids) + end - 1 for _, index, end in ends], dtype=torch.long)
        batches.append(PaddedBatch(group, *(each.to(device) for each in (ids_RT, mask_RT, row_E, position_E))))
    return batches


# The base model -------------------------------------------------------------------------------------------------------


def load_classifier(base: str, reference: Checkpoint) -> PreTrainedModel:
    """Return the float32 classifier that `base` names, on the device of `reference`.

    The base `reference` makes one of the reference's layers and a head of zeros: every score is one half at first. Any
    other base is a checkpoint; PipelineError where it cannot be loaded, has more than one score or other tokens.
    """
    classifier = _copy(reference) if base == "reference" else _load(base, reference)
    placed: PreTrainedModel = classifier.to(reference.device)
    return placed


def _copy(reference: Checkpoint) -> PreTrainedModel:
    model = reference.model
    # Through a dictionary, which leaves behind how the reference computes its attention.
    config = type(model.config).from_dict({**model.config.to_diff_dict(), "num_labels": 1})
    try:
        # All the random weights are replaced: what is drawn after this must not depend on them.
        with torch.random.fork_rng(devices=[]):
            copy = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError:
        problem = f"transformers has no sequence classifier like {type(model).__name__}"
        raise _error("reference", f"{problem}; name a checkpoint of another family with the same tokenizer") from None
    copy.base_model.load_state_dict(model.base_model.state_dict())
    nn.init.zeros_(copy.score.weight)
    return copy


def _load(base: str, reference: Checkpoint) -> PreTrainedModel:
    try:
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            base, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(base)
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
