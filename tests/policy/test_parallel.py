import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from components.cluster.launch import run_ranks
from components.policy.config import EngineConfig
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.policy.parallel import Ranks, init_ranks
from components.shared.environment import STORE_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from tests import tiny
from tests.cluster.processes import errors_of_nobody, listeners


def test_shards_are_even_and_in_order() -> None:
    """Together they are everything."""
    shards = [list(Ranks(rank, 3).shard(range(13))) for rank in range(3)]
    assert shards == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.mark.parametrize(("configured", "launched"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, configured: int, launched: int) -> None:
    """A process that finds itself alone would do all of the work, and each of too many as well."""
    monkeypatch.setenv("WORLD_SIZE", str(launched))
    with pytest.raises(PipelineError, match=f"num_processes is {configured}, but {launched} w"):
        init_ranks(tiny.engine_config(num_processes=configured))


def test_every_barrier_waits() -> None:
    """Not the first one alone: who has passed it has not reached the next."""
    store = HashStore()
    for rank in (0, 1):
        store.set(f"name/{rank}", f"host {rank}")
    here, other = (Ranks(rank, 2, deadline_s=60, store=store) for rank in (0, 1))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda ranks: ranks.barrier("the start"), (here, other)))
    here.deadline_s = 0.2
    with pytest.raises(RetryableError, match=r"rank 1 \(host 1\) of 2 did not reach the next within"):
        here.barrier("the next")


def _exchange(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Exchange values of different sizes often, and return the number of keys that are left in the store."""
    del folder
    ranks = init_ranks(config)
    assert init_ranks(config) is ranks
    for number in range(200):
        values = ranks.all_gather((ranks.rank, "x" * number * ranks.rank), f"exchange {number}")
        assert [rank for rank, _ in values] == list(range(ranks.world_size))
        assert [len(text) for _, text in values] == [number * rank for rank in range(ranks.world_size)]
    return {"left": sum(ranks.store.check([f"barrier/{number}/{ranks.rank}"]) for number in range(1, 203))}


def _hang_in_deepspeed(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Suspend the last rank, and let the others wait for it in a collective of the group that DeepSpeed has made."""
    policy = Policy(LogprobModel(tiny.checkpoint().model, temperature=1.0), config)
    ranks = policy.ranks
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    if ranks.rank == ranks.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with ranks.report_lost_ranks():
        distributed.all_reduce(torch.ones(1), group=policy._engine.data_parallel_group)
    return {}


CUT = "cut"
"""The file that says that the network is gone, and where that is to be noticed."""


def be_cut_off(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Exchange something once the network is gone, at a barrier or in a collective."""
    ranks = init_ranks(config)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    while not (folder / CUT).exists():
        time.sleep(0.01)
    with ranks.report_lost_ranks():
        if (folder / CUT).read_text() == "barrier":
            ranks.barrier("the end of a step")
        distributed.all_reduce(torch.ones(1))
    return {}


def _be_attacked(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Check, once all have met, who could reach this process, its launcher and the store."""
    ranks = init_ranks(config)
    ranks.all_gather(ranks.rank, "the attack")
    store = os.environ[STORE_VARIABLE].removeprefix("file://")
    attack = errors_of_nobody(f"echo >>{store}; cat {store}") if os.geteuid() == 0 else None
    found = {"store": attack, "launcher": listeners(os.getppid()), "rank": listeners(os.getpid())}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    ranks.barrier("the end")
    return {"left": 0}


class _Command(NamedTuple):
    """Creates a file where it is unpickled."""

    file: Path

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def _stand_in(config: EngineConfig, *, folder: Path) -> dict[str, float]:
    """Let the second rank be a process that gloo has connected, and that cannot read the store."""
    ranks = init_ranks(config)
    if ranks.rank == 1:
        ranks.key = b"another"
    ranks.all_gather(_Command(folder / "unpickled") if ranks.rank == 1 else None, "an attack")
    return {}


def _run(function: Callable[..., dict[str, float]], folder: Path, *, deadline_s: float = 60, size: int = 2) -> float:
    config = tiny.engine_config(num_processes=size, deadline_s=deadline_s)
    result = run_ranks(function, config, {"folder": folder}, num_processes=size, work=folder / "work", grace_s=1)
    return result["left"]


@pytest.mark.slow
def test_every_process_gets_the_values_of_all(tmp_path: Path) -> None:
    """In the order of the ranks, however large and however often; the store does not grow with it."""
    assert _run(_exchange, tmp_path, size=3) <= 3


@pytest.mark.slow
def test_only_what_a_rank_has_sent_is_unpickled(tmp_path: Path) -> None:
    """Unpickling runs code, and gloo takes whoever connects first for a rank."""
    with pytest.raises(PipelineError, match=r"^what came from rank [01] was sent by a process that is not part of"):
        _run(_stand_in, tmp_path)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.slow
def test_no_other_user_reaches_the_store(tmp_path: Path) -> None:
    """Neither at a port nor in its file: it says whose values are unpickled. Ranks listen to this machine alone."""
    _run(_be_attacked, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["launcher"] == {}
        assert found["rank"], "gloo listens"
        assert all(found["rank"].values())
        assert found["store"] is None or found["store"].count("Permission denied") == 2


@pytest.mark.slow
def test_a_rank_that_is_missing_in_a_collective_is_named(tmp_path: Path) -> None:
    """With rank, host and process, once the deadline is over; it can be retried."""
    with pytest.raises(RetryableError, match=r"^rank 1 \(.*, process \d+\) of 2 stopped responding$") as raised:
        _run(_hang_in_deepspeed, tmp_path, deadline_s=3)
    assert f", process {(tmp_path / '1.pid').read_text()})" in str(raised.value)
