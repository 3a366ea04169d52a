"""Sampling from models that take padded rows (components/policy/padded.py), with the cache that is their own.

transformers' `generate` decodes; which token comes next is decided here, by the same random numbers as elsewhere.

Shape suffixes:
    R  completions of a call, T  tokens that may be sampled, V  vocabulary
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from components.policy.checkpoint import Checkpoint
from components.rollout.decoding import inverse_cdf
from components.rollout.sampler import Completion, Sampling, StopTexts, completed


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws each next token, leaves `generate` no other choice, and remembers its log-probability."""

    def __init__(self, temperature: float, uniform_RT: Tensor) -> None:
        self.logprobs_T: list[Tensor] = []
        self._temperature, self._uniform_RT = temperature, uniform_RT

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform_R = self._uniform_RT[:, len(self.logprobs_T)]
        logprobs_RV = (scores.float() / (self._temperature or 1.0)).log_softmax(-1)
        token_R = inverse_cdf(logprobs_RV.exp(), uniform_R) if self._temperature else logprobs_RV.argmax(-1)
        self.logprobs_T.append(logprobs_RV.gather(1, token_R[:, None]).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, token_R[:, None], 0.0)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Stops completions whose text has a stop text."""

    def __init__(self, stop: StopTexts, prompt_length: int) -> None:
        self._stop, self._prompt_length = stop, prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        ended = [self._stop.ends(ids) for ids in input_ids[:, self._prompt_length :].tolist()]
        return torch.tensor(ended, device=input_ids.device)


@torch.inference_mode()
def sample(
    checkpoint: Checkpoint, prompts: Sequence[tuple[int, ...]], sampling: Sampling, uniform_RT: Tensor
) -> list[list[Completion]]:
    """Return the completions of prompts of one length: no prompt is padded, whose padding a recurrence would see.

    `uniform` has a number in [0, 1) for each token that may be sampled.
    """
    model, length = checkpoint.model, len(prompts[0])
    ids_RS = torch.tensor(prompts, device=checkpoint.device).repeat_interleave(sampling.num_samples, dim=0)
    draw, stop = _Draw(sampling.temperature, uniform_RT), StopTexts(sampling.stop, checkpoint.decode)
    generated_RS = model.generate(
        ids_RS,
        attention_mask=torch.ones_like(ids_RS),
        max_new_tokens=uniform_RT.shape[1],
        do_sample=False,
        eos_token_id=list(checkpoint.end_ids),
        pad_token_id=checkpoint.end_ids[0],
        logits_processor=LogitsProcessorList([draw]),
        stopping_criteria=StoppingCriteriaList([_Stop(stop, length)] if stop.texts else []),
    )
    rows = zip(generated_RS[:, length:].tolist(), torch.stack(draw.logprobs_T, dim=1).tolist(), strict=True)
    completions = [
        completed(checkpoint, prompts[number // sampling.num_samples], ids, logprobs, stop)
        for number, (ids, logprobs) in enumerate(rows)
    ]
    size = sampling.num_samples
    return [completions[start : start + size] for start in range(0, len(completions), size)]
