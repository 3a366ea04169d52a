"""Gradients and steps of `Policy` in as many processes as were launched, each with its part of the groups.

Run by torchrun as `-m tests.policy.processes FOLDER`; each process leaves what it measured in FOLDER/RANK.pt.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import get_rank, get_world_size

from components.policy.engine import Policy
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


def _one_step(stage: int) -> dict[str, Any]:
    """Take a step; return its metrics, the new weights and, in the main process, the gradient it was taken with."""
    model = LogprobModel(plain.gpt2().float(), temperature=0.7)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    policy = Policy(model, tiny.engine_config(num_processes=processes, zero_stage=stage, max_gradient_norm=1e6))
    weights_M2 = plain.weights_M2(sum(len(each.completion_ids) for each in SEQUENCES))
    part = PARTS[get_world_size()][get_rank()]
    for batch in pack(SEQUENCES, max_tokens=MAX_TOKENS[stage], device=torch.device("cpu"), indices=part):
        scores = policy(batch)
        scores_N2 = torch.stack([scores.logprobs_N, scores.entropy_N], dim=1)
        policy.backward((weights_M2[batch.token_N] * scores_N2).sum())
    figures = policy.step(LEARNING_RATE)
    # The optimizer's first moment is a tenth of its first gradient.
    moments = {name.removesuffix("/exp_avg"): each for name, each in policy.state().items() if "/exp_avg" in name}
    gradients = {name: 10 * each for name, each in moments.items() if "/" not in name}
    with policy.gather_full_parameters():
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"gradients": gradients, "figures": figures, "weights": weights}


def measure() -> dict[int, dict[str, Any]]:
    """Return what a step does for each stage of ZeRO."""
    return {stage: _one_step(stage) for stage in MAX_TOKENS}


if __name__ == "__main__":
    torch.save(measure(), Path(sys.argv[1]) / f"{get_rank()}.pt")
