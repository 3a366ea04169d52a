"""Sampling from models that take padded rows (components/policy/padded.py), with the cache that is their own.

transformers' `generate` decodes. Which token comes next is decided here: by the same random numbers as elsewhere, or by
what the environment of a row has written, which the row reads token by token, as a recurrence has to. So all rows are
always equally long, and a row whose turn has ended is answered before any goes on.

Shape suffixes:
    R  completions of a call, T  tokens that may be sampled, V  vocabulary
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from components.policy.checkpoint import Checkpoint
from components.rollout.decoding import inverse_cdf
from components.rollout.trajectory import Status, Trajectory


class _Next(LogitsProcessor):  # type: ignore[misc]
    """Gives each row its next token, sampled or read, and leaves `generate` no other choice."""

    def __init__(self, rows: Sequence[Trajectory], temperature: float, uniform_RT: Tensor, pad: int) -> None:
        self._rows, self._temperature, self._uniform_RT, self._pad = rows, temperature, uniform_RT, pad
        self._num_given = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = [min(row.num_sampled, self._uniform_RT.shape[1] - 1) for row in self._rows]
        uniform_R = self._uniform_RT[range(len(places)), places]
        logprobs_RV = (scores.float() / (self._temperature or 1.0)).log_softmax(-1)
        token_R = inverse_cdf(logprobs_RV.exp(), uniform_R) if self._temperature else logprobs_RV.argmax(-1)
        logprob_R = logprobs_RV.gather(1, token_R[:, None]).squeeze(1)
        for row, token, logprob in zip(self._rows, token_R.tolist(), logprob_R.tolist(), strict=True):
            if len(row.ids) == self._num_given:
                row.extend((token,), (logprob,))
        for row in self._rows:  # once all that are to be answered are
            if row.asked is not None and row.status is Status.WAITING:
                row.receive(row.asked.result())
        given = [row.ids[self._num_given] if self._num_given < len(row.ids) else self._pad for row in self._rows]
        self._num_given += 1
        given_R1 = torch.tensor(given, device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, given_R1, 0.0)


class _Done(StoppingCriteria):  # type: ignore[misc]
    """Stops rows whose trajectories have ended or forked."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = [(row, row.prompt_ids) for row in rows]

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return torch.tensor([not row.goes_on(prompt) for row, prompt in self._rows], device=input_ids.device)


@torch.inference_mode()
def run_to_completion(
    checkpoint: Checkpoint, trajectories: Sequence[Trajectory | None], temperature: float, uniform_RT: Tensor
) -> None:
    """Sample until every trajectory is done or has forked; None is not sampled.

    Prompts of one length are read together: none is padded, whose padding a recurrence would see. `uniform` has a
    number in [0, 1) for each token that may be sampled.
    """
    numbered = [(number, each) for number, each in enumerate(trajectories) if each and each.status is Status.SAMPLING]
    numbered.sort(key=lambda pair: len(pair[1].prompt_ids))
    for _, same in groupby(numbered, key=lambda pair: len(pair[1].prompt_ids)):
        numbers, rows = zip(*same, strict=True)
        _run(checkpoint, rows, temperature, uniform_RT[list(numbers)])


def _run(checkpoint: Checkpoint, rows: Sequence[Trajectory], temperature: float, uniform_RT: Tensor) -> None:
    ids_RS = torch.tensor([row.prompt_ids for row in rows], device=checkpoint.device)
    tools, pad = checkpoint.config.tools, checkpoint.end_ids[0]
    checkpoint.model.generate(
        ids_RS,
        attention_mask=torch.ones_like(ids_RS),
        max_new_tokens=uniform_RT.shape[1] + (tools.max_environment_tokens if tools else 0),
        do_sample=False,
        eos_token_id=[],  # a turn that ends need not end its row
        pad_token_id=pad,
        logits_processor=LogitsProcessorList([_Next(rows, temperature, uniform_RT, pad)]),
        stopping_criteria=StoppingCriteriaList([_Done(rows)]),
    )
