"""Sampling from models that take padded rows (components/policy/padded.py), with their own cache.

transformers' `generate` decodes; this module chooses the next token of each row. A row either samples, with the same
random numbers as in decoding.py, or reads its environment's answer token by token, as a recurrence has to. So all rows
are always equally long, and all wait while an environment answers.

Shape suffixes:
    R  completions of a call, T  tokens that may be sampled, V  vocabulary
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from components.policy.checkpoint import Checkpoint
from components.rollout.decoding import inverse_cdf
from components.rollout.trajectory import Trajectory


class _NextToken(LogitsProcessor):  # type: ignore[misc]
    """Gives the next token of each row, sampled or read, a score of 0, and all others -inf."""

    def __init__(self, rows: Sequence[Trajectory], temperature: float, uniform_RT: Tensor, pad: int) -> None:
        self._rows, self._temperature, self._uniform_RT, self._pad = rows, temperature, uniform_RT, pad
        self._num_tokens = 0
        """Tokens after the prompt in every row so far."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample from the logits `scores`, hand the tokens over, and return scores that select the next tokens."""
        # Rows that are done, or that read an answer, get a sample too, which is not used.
        places = [min(row.num_sampled, self._uniform_RT.shape[1] - 1) for row in self._rows]
        uniform_R = self._uniform_RT[range(len(places)), places]
        logprobs_RV = (scores.float() / (self._temperature or 1.0)).log_softmax(-1)
        token_R = inverse_cdf(logprobs_RV.exp(), uniform_R) if self._temperature else logprobs_RV.argmax(-1)
        logprob_R = logprobs_RV.gather(1, token_R[:, None]).squeeze(1)
        for row, token, logprob in zip(self._rows, token_R.tolist(), logprob_R.tolist(), strict=True):
            if len(row.ids) == self._num_tokens:  # else it still reads an answer
                row.extend((token,), (logprob,))
        for row in self._rows:  # after the loop above, so that environments answer at the same time
            if row.pending_answer is not None:
                row.receive(row.pending_answer.result())
        next_ids = [row.ids[self._num_tokens] if self._num_tokens < len(row.ids) else self._pad for row in self._rows]
        self._num_tokens += 1
        next_R1 = torch.tensor(next_ids, device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, next_R1, 0.0)


class _Done(StoppingCriteria):  # type: ignore[misc]
    """Stops rows whose trajectories are done or have forked."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = [(row, row.prompt_ids) for row in rows]

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return torch.tensor([not row.goes_on(prompt) for row, prompt in self._rows], device=input_ids.device)


@torch.inference_mode()
def run_to_completion(
    checkpoint: Checkpoint, trajectories: Sequence[Trajectory], temperature: float, uniform_RT: Tensor
) -> None:
    """Extend the trajectories by sampled tokens until each is done or has forked.

    Only prompts of equal length are read together, so that none is padded: a recurrence would read the padding.
    `uniform_RT` has a number in [0, 1) for each token that may be sampled.
    """
    tools, pad = checkpoint.config.tools, checkpoint.end_ids[0]
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for number, trajectory in enumerate(trajectories):
        by_length[len(trajectory.prompt_ids)].append(number)
    for _, numbers in sorted(by_length.items()):
        rows = [trajectories[number] for number in numbers]
        ids_RS = torch.tensor([row.prompt_ids for row in rows], device=checkpoint.device)
        checkpoint.model.generate(
            ids_RS,
            attention_mask=torch.ones_like(ids_RS),
            max_new_tokens=uniform_RT.shape[1] + (tools.max_environment_tokens if tools else 0),
            do_sample=False,  # `_NextToken` samples, and appends to the trajectories
            eos_token_id=[],  # a turn that ends need not end its row
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([_NextToken(rows, temperature, uniform_RT[numbers], pad)]),
            stopping_criteria=StoppingCriteriaList([_Done(rows)]),
        )
