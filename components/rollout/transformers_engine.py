"""Sampling with transformers in this process: no second copy of the weights, so nothing to keep in sync."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

from components.policy.checkpoint import Checkpoint
from components.policy.sequences import TokenSequence
from components.rollout.completion import Completion


@dataclass(frozen=True)
class TransformersEngine:
    """Generates from the weights that `checkpoint` holds at the moment of the call."""

    checkpoint: Checkpoint
    max_batch_size: int
    """Sequences generated at once; bounds memory."""

    @torch.no_grad()
    def __call__(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """See `Generate`."""
        torch.manual_seed(seed)
        # Generation advances in step over a batch: prompts of like length waste the least padding.
        prompts = [self.checkpoint.prompt_ids(question) for question in questions]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        size = max(1, self.max_batch_size // num_samples)
        groups: dict[int, list[Completion]] = {}
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch = [prompts[index] for index in chosen]
            found = self._generate(batch, num_samples, temperature=temperature, max_new_tokens=max_new_tokens)
            groups.update(zip(chosen, found, strict=True))
        return [groups[index] for index in range(len(prompts))]

    def _generate(
        self, prompts: list[tuple[int, ...]], num_samples: int, *, temperature: float, max_new_tokens: int
    ) -> list[list[Completion]]:
        checkpoint = self.checkpoint
        longest = max(len(prompt) for prompt in prompts)
        ids = [[checkpoint.pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output: Tensor = checkpoint.model.generate(
            input_ids=torch.tensor(ids, device=checkpoint.device),
            attention_mask=torch.tensor(mask, device=checkpoint.device),
            generation_config=self._settings(num_samples, temperature, max_new_tokens),
        )
        rows = output[:, longest:].tolist()
        return [
            [self._completion(prompt, row) for row in rows[number * num_samples : (number + 1) * num_samples]]
            for number, prompt in enumerate(prompts)
        ]

    def _settings(self, num_samples: int, temperature: float, max_new_tokens: int) -> GenerationConfig:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_samples,
            eos_token_id=list(self.checkpoint.end_ids),
            pad_token_id=self.checkpoint.pad_id,
            **sampling,
        )

    def _completion(self, prompt: tuple[int, ...], row: list[int]) -> Completion:
        end = next((index for index, token in enumerate(row) if token in self.checkpoint.end_ids), None)
        kept = row if end is None else row[: end + 1]
        text = self.checkpoint.decode(kept if end is None else kept[:-1])
        return Completion(TokenSequence(prompt, tuple(kept)), text, finished=end is not None)
