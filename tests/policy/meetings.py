"""What ranks do in tests of their meetings."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import distributed

from components.policy.config import EngineConfig
from components.policy.engine import PolicyEngine
from components.policy.logprobs import CompletionScorer
from components.policy.ranks import join
from tests import tiny

CUT = "cut"
"""The file that says that the network is gone, and where that is to be noticed."""


def exchange(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Exchange values often, of different kinds, and tell whether all was in order."""
    del folder
    ranks = join(config)
    assert join(config) is ranks
    for number in range(200):
        found = ranks.gather((ranks.rank, "x" * number * ranks.rank), f"exchange {number}")
        assert [rank for rank, _ in found] == list(range(ranks.size))
        assert [len(text) for _, text in found] == [number * rank for rank in range(ranks.size)]
    shares = ranks.gather(list(ranks.share(range(7))), "shares")
    assert [item for share in shares for item in share] == list(range(7))
    assert ranks.store is not None
    left = sum(ranks.store.check([f"meeting/{number}/{ranks.rank}"]) for number in range(1, 203))
    return {"left": left}


def come_late(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the last rank be late by more than the deadline."""
    ranks = join(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.size - 1:
        time.sleep(600)
    ranks.gather(0, "the end of sampling")
    return {}


def stall_in_deepspeed(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the last rank stand still in a group of processes that DeepSpeed has made."""
    engine = PolicyEngine(CompletionScorer(tiny.checkpoint().model, temperature=1.0), config)
    ranks = engine.ranks
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with ranks.naming_the_lost():
        distributed.all_reduce(torch.ones(1), group=engine._engine.data_parallel_group)
    return {}


def be_cut_off(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Exchange something once the network is gone, where the others would meet or where a collective waits for them."""
    ranks = join(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    while not (folder / CUT).exists():
        time.sleep(0.01)
    with ranks.naming_the_lost():
        if (folder / CUT).read_text() == "meeting":
            ranks.meet("the end of a step")
        distributed.all_reduce(torch.ones(1))
    return {}


def stall(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the last rank stand still where DeepSpeed alone would wait for it."""
    ranks = join(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with ranks.naming_the_lost():
        distributed.all_reduce(torch.ones(1))
    return {}
