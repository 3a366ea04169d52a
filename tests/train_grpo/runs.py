"""Runs of the stage on a tiny model, and work that several processes do together."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from components.policy.parallel import Ranks
from components.shared import jsonl
from components.shared.problem import Problem, Split, write_problems
from components.train_grpo.train import train
from tests.train_grpo.settings import grpo_config

_T = TypeVar("_T")


def run(
    folder: Path, problems: Sequence[Problem], reference: Path, held_out: Sequence[Problem] = (), /, **changes: Any
) -> dict[str, float]:
    """Run the stage with its problems and outputs in a folder; return its metrics."""
    outputs = {name: folder / name for name in ("policy", "training", "timings")}
    for path in (folder / "problems", *outputs.values()):
        path.mkdir(parents=True, exist_ok=True)
    write_problems(folder / "problems", Split.TRAIN, problems)
    write_problems(folder / "problems", Split.DEV, held_out)
    config = grpo_config(**changes)
    return train(config, problems=folder / "problems", reference=reference, **outputs, work=folder / "work")


def rows(folder: Path, name: str = "steps") -> list[dict[str, Any]]:
    """Return the rows of a file of records, the curves by default."""
    return [row for _, row in jsonl.read_rows(folder / "training" / f"{name}.jsonl")]


class OneOf(Ranks):
    """One of several processes, by itself: the others have the same."""

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """See `Ranks`."""
        del what
        return [value] * self.world_size


def in_processes(count: int, work: Callable[[Ranks], _T]) -> list[_T]:
    """Return what some processes return, each of which is a thread here."""
    slots: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    class Thread(Ranks):
        def all_gather(self, value: Any, what: str) -> list[Any]:
            del what
            slots[self.rank] = value
            barrier.wait(10)
            gathered = list(slots)
            barrier.wait(10)
            return gathered

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(Thread(rank, count)), range(count)))
