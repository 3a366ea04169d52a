"""Gradients and steps of `Policy` in as many processes as were launched, each with its part of the groups.

Run by torchrun as `-m tests.policy.processes FOLDER`; each process leaves what it measured in FOLDER/RANK.pt.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import all_reduce, get_rank, get_world_size

from components.policy.engine import NonFiniteError, Policy
from components.policy.logprobs import LogprobModel, TokenLogprobs
from components.policy.packing import MicroBatch, pack
from tests import tiny
from tests.policy import plain

SEQUENCES = plain.sequences(((9, 3), (5, 1), (6, 2), (7, 4), (3, 1), (4, 2)))
PARTS = {1: [range(13)], 2: [range(6), range(6, 13)]}
"""The sequences of each process: all groups, or three each."""
MAX_TOKENS = {0: 25, 2: 30, 3: 30}
"""For each stage of ZeRO. Three micro-batches and two where nothing is sharded; else every backward pass waits for
that of the others, so there must be as many everywhere: two."""
LEARNING_RATE = 1e-3


def measure() -> dict[str, Any]:
    """Return what this process finds for each stage of ZeRO, and what becomes of a bad loss in the last process."""
    found: dict[str, Any] = {f"zero_{stage}": _one_step(stage) for stage in (0, 2, 3)}
    return {**found, "bad": {stage: _bad_loss(stage) for stage in (0, 2, 3)}}


def _model() -> LogprobModel:
    return LogprobModel(plain.gpt2(), temperature=0.7)


def _policy(model: LogprobModel, stage: int) -> Policy:
    from deepspeed.accelerator import get_accelerator

    # Where the processor computes in fp16, ZeRO 3 looks at the model's type, and refuses float64.
    accelerator = get_accelerator()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    config = tiny.engine_config(num_processes=processes, zero_stage=stage, max_gradient_norm=1e6)
    with patch.object(accelerator, "is_fp16_supported", return_value=False):
        return Policy(model, config)


def _batches(stage: int) -> list[MicroBatch]:
    """The micro-batches of this process."""
    part = PARTS[get_world_size()][get_rank()]
    return pack(SEQUENCES, max_tokens=MAX_TOKENS[stage], device=torch.device("cpu"), indices=part)


def _loss(scores: TokenLogprobs, batch: MicroBatch) -> Tensor:
    """A micro-batch's part of a sum over all completion tokens of the step."""
    weights_M2 = torch.cat([plain.weights(each) for each in SEQUENCES])
    return (weights_M2[batch.token_N] * torch.stack([scores.logprobs_N, scores.entropy_N], dim=1)).sum()


def _one_step(stage: int) -> dict[str, Any]:
    """Take a step; return its metrics, the gradient in float64, the one that DeepSpeed holds, and the new weights."""
    model = _model()
    gradients = _summed_gradients(model)  # hooked before weights are sharded
    with _reducing_in_float64(stage):
        policy = _policy(model, stage)
        held: dict[str, Tensor] = {}
        if stage == 0:
            policy._engine.communication_data_type = torch.float64
            policy._optimizer.register_step_pre_hook(lambda *_: held.update(_kept_gradients(model)))
        for batch in _batches(stage):
            policy.backward(_loss(policy(batch), batch))
        for gradient in gradients.values():
            # The engine asks each process for a loss that is larger by their number, and averages.
            all_reduce(gradient.div_(get_world_size()))
        if stage:
            held.update(_gradients_of_deepspeed(model))
        figures = policy.step(LEARNING_RATE)
        return {"gradients": gradients, "held": held, "figures": figures, "weights": _weights(policy, model)}


@contextmanager
def _reducing_in_float64(stage: int) -> Iterator[None]:
    """Let DeepSpeed reduce gradients as they are: it refuses float64, which it does not expect."""
    from deepspeed.accelerator import get_accelerator

    if stage:
        yield
        return
    with patch.object(get_accelerator(), "supported_dtypes", return_value=[torch.float64]):
        yield


def _summed_gradients(model: LogprobModel) -> dict[str, Tensor]:
    """Return where the gradients of this process will be summed, as they leave the backward pass."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(_add, sums[name]))
    return sums


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


def _kept_gradients(model: LogprobModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _gradients_of_deepspeed(model: LogprobModel) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}


def _weights(policy: Policy, model: LogprobModel) -> dict[str, Tensor]:
    with policy.gather_full_parameters():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _bad_loss(stage: int) -> dict[str, Any]:
    """Give the last process alone a loss that is not a number; return the error and whether weights have changed."""
    model = _model()
    policy = _policy(model, stage)
    before = _weights(policy, model)
    for batch in _batches(stage):
        bad = math.nan if get_rank() == get_world_size() - 1 else 1.0
        policy.backward(_loss(policy(batch), batch) * bad)
    error = ""
    try:
        policy.step(LEARNING_RATE)
    except NonFiniteError as raised:
        error = str(raised)
    after = _weights(policy, model)
    return {"error": error, "changed": any(not torch.equal(after[name], before[name]) for name in before)}


if __name__ == "__main__":
    results = measure()
    torch.save(results, Path(sys.argv[1]) / f"{get_rank()}.pt")
