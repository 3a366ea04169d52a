"""The learned reward model: how likely a completion is right, learned from the verifier's verdicts.

One head serves both kinds of supervision. Read at the last token of a completion it is the outcome reward model, read
at the last token of each step the process reward model (DeepSeekMath, arXiv 2402.03300, sections 4.1.2 and 4.1.3).

Shape suffixes as in reward_batches.py, and D for the hidden size.
"""

import math
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.policy.checkpoint import Checkpoint
from components.policy.engine import NonFiniteError
from components.policy.packing import TokenSequence
from components.train_grpo.config import RewardModelConfig
from components.train_grpo.judged import Judged, scorable
from components.train_grpo.reward_batches import ReadBatch, read_batches
from components.train_grpo.reward_checkpoint import load_classifier

_EXAMPLES_PER_STEP = 64
"""At most so many examples share an optimizer step: enough for a steady gradient, few enough for several steps."""
_EXAMPLES_READ = 1024
"""Examples that are unpacked at once to be scored."""


class RewardModel:
    """A Hugging Face sequence classifier with one label, and its optimizer, which goes on from one fit to the next.

    Weights and scores are float32 whatever the policy's are: at the rates of fine-tuning, most updates of bfloat16
    weights round to nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RewardModelConfig,
        *,
        micro_batch_tokens: int,
    ) -> None:
        # Never in training mode: that would only switch dropout on.
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = config
        self.micro_batch_tokens = micro_batch_tokens
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)

    @classmethod
    def load(cls, config: RewardModelConfig, reference: Checkpoint, *, micro_batch_tokens: int) -> "RewardModel":
        """Return the model that `config.base` names, reading the tokens of `reference`; PipelineError if it cannot."""
        model = load_classifier(config.base, reference)
        return cls(model, reference.tokenizer, config, micro_batch_tokens=micro_batch_tokens)

    @torch.no_grad()
    def score(self, tokens: Sequence[TokenSequence], ends: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return for each sequence the probabilities in [0, 1] that it is right, as read at its ends.

        Raises NonFiniteError where one is not a number, which as a reward would mean that nothing can be said.
        """
        scores: list[list[float]] = [[] for _ in tokens]
        for batch in self._batches(tokens, ends):
            scores_E = torch.sigmoid(self._logits(batch))
            if scores_E.isnan().any():
                raise NonFiniteError("a score of the reward model is not a number")
            read = iter(scores_E.tolist())
            for index in batch.sequences:
                scores[index] = list(islice(read, len(ends[index])))
        return scores

    def fit(self, examples: Sequence[Judged], *, num_new: int, seed: int) -> dict[str, float]:
        """Train for `config.epochs` passes in an order given by `seed`; return the metrics.

        The first `num_new` examples are new, the rest replayed. `reward_model_accuracy` is the share of new labels on
        whose side of one half the score was before any of this training (exactly one half is on neither side), and
        `reward_model_loss` the cross-entropy per label in the last pass, each label before its step. Both are NaN where
        nothing is scorable. Raises NonFiniteError before a step whose loss is not finite.
        """
        accuracy = self._accuracy(examples, num_new)
        num_labels = [sum(not math.isnan(label) for label in example.labels) for example in examples]
        learned = [place for place, number in enumerate(num_labels) if number]
        num_steps = math.ceil(len(learned) / _EXAMPLES_PER_STEP)
        order = random.Random(seed)
        loss = math.nan
        for _ in range(self.config.epochs if learned else 0):
            shuffled = order.sample(learned, len(learned))
            # Every num_steps-th example: steps of equal size, not a last one of whatever is left.
            parts = (shuffled[step::num_steps] for step in range(num_steps))
            total = sum(self._step(scorable(examples[place] for place in part)) for part in parts)
            loss = total / sum(num_labels)
        return {
            "reward_model_loss": loss,
            "reward_model_accuracy": accuracy,
            "reward_model_examples": float(len(learned)),
        }

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that `AutoModelForSequenceClassification.from_pretrained` loads."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer state, all that training goes on from."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _batches(self, tokens: Sequence[TokenSequence], ends: Sequence[tuple[int, ...]]) -> list[ReadBatch]:
        return read_batches(tokens, ends, max_tokens=self.micro_batch_tokens, device=self.model.device)

    def _logits(self, batch: ReadBatch) -> Tensor:
        """The output of the head at the E ends, and nowhere else."""
        hidden_BSD = self.model.base_model(
            input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, use_cache=False
        ).last_hidden_state
        logits_E: Tensor = self.model.score(hidden_BSD[batch.row_E, batch.position_E]).squeeze(1)
        return logits_E

    def _accuracy(self, examples: Sequence[Judged], num_new: int) -> float:
        agree: list[bool] = []
        for start in range(0, num_new, _EXAMPLES_READ):
            part = scorable(examples[start : min(num_new, start + _EXAMPLES_READ)])
            scores = self.score([example.tokens for example in part], [example.ends for example in part])
            agree += [
                (score - 0.5) * (label - 0.5) > 0
                for example, read in zip(part, scores, strict=True)
                for score, label in zip(read, example.labels, strict=True)
            ]
        return sum(agree) / len(agree) if agree else math.nan

    def _step(self, examples: Sequence[Judged]) -> float:
        """Take an optimizer step on the mean loss per label; return the sum over labels from before it."""
        tokens, ends = [example.tokens for example in examples], [example.ends for example in examples]
        num_labels = sum(map(len, ends))
        total = 0.0
        for batch in self._batches(tokens, ends):
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
