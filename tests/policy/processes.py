"""Gradients and steps of `Policy` in as many processes as were launched, each with its part of the groups.

Run by torchrun as `-m tests.policy.processes FOLDER`; each process leaves what it measured in FOLDER/RANK.pt.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_rank, get_world_size

from components.policy.engine import NonFiniteError, Policy
from components.policy.logprobs import LogprobModel
from components.policy.packing import pack
from tests import tiny
from tests.policy import plain

SEQUENCES = plain.sequences(((9, 3), (5, 1), (6, 2), (7, 4), (3, 1), (4, 2)))
PARTS = {1: [range(13)], 2: [range(6), range(6, 13)]}
"""The sequences of each process: all groups, or three each."""
MAX_TOKENS = {0: 25, 2: 30, 3: 30}
"""For each stage of ZeRO. Three micro-batches and two where nothing is sharded; else every backward pass waits for
that of the others, so there must be as many everywhere: two."""
LEARNING_RATE = 1e-3


def measure() -> dict[int, dict[str, Any]]:
    """Return for each stage of ZeRO what a step does, and what becomes of a bad loss in the last process."""
    return {stage: {**_one_step(stage), "bad": _bad_loss(stage)} for stage in MAX_TOKENS}


def _policy(stage: int) -> tuple[Policy, LogprobModel]:
    model = LogprobModel(plain.gpt2().float(), temperature=0.7)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    config = tiny.engine_config(num_processes=processes, zero_stage=stage, max_gradient_norm=1e6)
    return Policy(model, config), model


def _backward(policy: Policy, stage: int, factor: float = 1.0) -> None:
    """Add up the gradients of this process's micro-batches, whose losses are parts of one sum over all tokens."""
    weights_M2 = plain.weights_M2(sum(len(each.completion_ids) for each in SEQUENCES))
    part = PARTS[get_world_size()][get_rank()]
    for batch in pack(SEQUENCES, max_tokens=MAX_TOKENS[stage], device=torch.device("cpu"), indices=part):
        scores = policy(batch)
        scores_N2 = torch.stack([scores.logprobs_N, scores.entropy_N], dim=1)
        policy.backward((weights_M2[batch.token_N] * scores_N2).sum() * factor)


def _one_step(stage: int) -> dict[str, Any]:
    """Take a step; return its metrics, the new weights and, in the main process, the gradient it was taken with."""
    policy, model = _policy(stage)
    _backward(policy, stage)
    figures = policy.step(LEARNING_RATE)
    # The optimizer's first moment is a tenth of its first gradient.
    moments = {name.removesuffix("/exp_avg"): each for name, each in policy.state().items() if "/exp_avg" in name}
    gradients = {name: 10 * each for name, each in moments.items() if "/" not in name}
    return {"gradients": gradients, "figures": figures, "weights": _weights(policy, model)}


def _weights(policy: Policy, model: LogprobModel) -> dict[str, Tensor]:
    with policy.gather_full_parameters():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _bad_loss(stage: int) -> dict[str, Any]:
    """Give the last process alone a loss that is not a number; return the error and whether weights have changed."""
    policy, model = _policy(stage)
    before = _weights(policy, model)
    _backward(policy, stage, factor=math.nan if get_rank() == get_world_size() - 1 else 1.0)
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
