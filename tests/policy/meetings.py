"""What ranks do in tests of their meetings."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import distributed

from components.policy.config import EngineConfig
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.policy.parallel import init_ranks
from tests import tiny

CUT = "cut"
"""The file that says that the network is gone, and where that is to be noticed."""


def exchange(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Exchange values often, of different kinds, and tell whether all was in order."""
    del folder
    ranks = init_ranks(config)
    assert init_ranks(config) is ranks
    for number in range(200):
        found = ranks.all_gather((ranks.rank, "x" * number * ranks.rank), f"exchange {number}")
        assert [rank for rank, _ in found] == list(range(ranks.world_size))
        assert [len(text) for _, text in found] == [number * rank for rank in range(ranks.world_size)]
    shares = ranks.all_gather(list(ranks.shard(range(7))), "shares")
    assert [item for share in shares for item in share] == list(range(7))
    assert ranks.store is not None
    left = sum(ranks.store.check([f"barrier/{number}/{ranks.rank}"]) for number in range(1, 203))
    return {"left": left}


def come_late(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the last rank be late by more than the deadline."""
    ranks = init_ranks(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.world_size - 1:
        time.sleep(600)
    ranks.all_gather(0, "the end of sampling")
    return {}


def stall_in_deepspeed(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the last rank stand still in a group of processes that DeepSpeed has made."""
    engine = Policy(LogprobModel(tiny.checkpoint().model, temperature=1.0), config)
    ranks = engine.ranks
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with ranks.report_lost_ranks():
        distributed.all_reduce(torch.ones(1), group=engine._engine.data_parallel_group)
    return {}


def be_cut_off(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Exchange something once the network is gone, where the others would meet or where a collective waits for them."""
    ranks = init_ranks(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    while not (folder / CUT).exists():
        time.sleep(0.01)
    with ranks.report_lost_ranks():
        if (folder / CUT).read_text() == "meeting":
            ranks.barrier("the end of a step")
        distributed.all_reduce(torch.ones(1))
    return {}


def stall(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the last rank stand still where DeepSpeed alone would wait for it."""
    ranks = init_ranks(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with ranks.report_lost_ranks():
        distributed.all_reduce(torch.ones(1))
    return {}
