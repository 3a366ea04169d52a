"""Random histories of a job and random faults on the way to the cluster: what must hold in all of them."""

import random
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest

from components.cluster.kube import connect
from components.cluster.reaper import reap
from components.shared.errors import PipelineError
from tests.cluster.launched import RESULT, Launched, launched
from tests.fake_cluster import ApiServer, Fault, kinds, script

NUM_SCHEDULES = 320
PARTS = 16
_PATHS = ("", "/trainjobs", "/trainjobs/", "/pods", "/log", "/events")
_METHODS = ("", "", "GET", "POST", "DELETE", "PATCH")


@dataclass
class History:
    """A random history: what the cluster does, and whether the ranks end well in the end."""

    draw: random.Random
    job: Launched
    has_worked: list[bool] = field(default_factory=list)

    def steps(self) -> tuple[script.Step, ...]:
        """What becomes of one TrainJob."""
        queued = [script.Queued(self.draw.choice([20, 200, None]))] if self.job.changes["queue"] else []
        return (*queued, *(self._episode() for _ in range(self.draw.randrange(4))), *self._end())

    def _episode(self) -> script.Step:
        lines = tuple(f"line {number}" for number in range(self.draw.randrange(6)))
        episodes: list[script.Step] = [
            script.Unschedulable(self.draw.choice([15, 120])),
            script.PullBackOff(self.draw.choice([15, 120])),
            script.Running(self.draw.choice([1, 30, 90]), lines),
            script.Preempted(self.draw.choice([5, 100])),
            script.NodeLost(self.draw.randrange(2)),
        ]
        return self.draw.choice(episodes)

    def _end(self) -> tuple[script.Step, ...]:
        worked = script.Do(self._work)
        ends: list[tuple[script.Step, ...]] = [
            (script.Running(5), worked, script.Complete()),
            (script.Running(5), worked, script.Complete()),
            (script.Running(5), worked, script.NodeLost(1)),
            (script.Running(5), script.Complete()),
            (script.Running(5), script.Do(lambda: self.job.fail(rank=1, error="lost rank 0")), script.Failed(75)),
            (script.Running(5), script.Do(lambda: self.job.fail(error="bad data", exit_code=2)), script.Failed(2)),
            (script.Running(5), script.OUT_OF_MEMORY),
            (script.Running(5), script.NCCL_HANGS),
            (script.Unschedulable(None),),
            (script.Running(None, ("line",)),),
        ]
        return self.draw.choice(ends)

    def _work(self) -> None:
        self.job.work()
        self.has_worked.append(True)

    def faults(self) -> list[Fault]:
        """What goes wrong on the way."""
        return [self._fault() for _ in range(self.draw.randrange(12))]

    def _fault(self) -> Fault:
        fault = Fault(
            self.draw.choice(_METHODS),
            self.draw.choice(_PATHS),
            skip=self.draw.randrange(12),
            times=self.draw.choice([1, 2, 5]),
        )
        kind = self.draw.choice(["status", "status", "drop", "cut", "lost answer"])
        if kind == "status":
            return replace(fault, status=self.draw.choice([429, 500, 503, 504, 410, 409]), retry_after_s=1)
        if kind == "drop":
            return replace(fault, drop=self.draw.choice(["before", "after"]))
        if kind == "cut":
            return replace(fault, method="GET", path="/log", cut_after=self.draw.randrange(1, 200))
        return replace(fault, status=500, effect=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is left behind, no failure is reported as a success, and no success as a failure."""
    for seed in range(part, NUM_SCHEDULES, PARTS):
        with ApiServer(seed=seed) as server:
            _run(seed, launched(server, tmp_path / str(seed), monkeypatch), random.Random(seed))


def _run(seed: int, job: Launched, draw: random.Random) -> None:
    server = job.server
    job.changes.update(
        max_restarts=draw.randrange(3),
        queue=draw.choice([None, None, "research"]),
        queue_timeout_s=300,
        start_timeout_s=200,
        stall_timeout_s=200,
        training_timeout_s=draw.choice([150, 3600]),
    )
    history = History(draw, job)
    server.cluster.play(*history.steps())
    server.faults.add(*history.faults())
    result, refused = _outcome(job)
    assert "refuses to" not in refused, f"{seed}: what passes is taken for good"
    assert (result is not None) == bool(history.has_worked), f"{seed}: {refused}"
    if result is not None:
        assert result == RESULT, seed
        assert (job.root / "policy" / "weights").read_text() == "learned", seed
    server.faults.clear()
    later = server.clock.now() + timedelta(seconds=601)
    reaped = reap(connect(), server.namespace, later)
    assert server.cluster.all(kinds.TRAIN_JOBS) == [], seed
    assert len(reaped) <= len([fault for fault, _ in server.faults.injected]), seed


def _outcome(job: Launched) -> tuple[dict[str, float] | None, str]:
    """What the step returns, or why it fails."""
    try:
        return job.run(), ""
    except PipelineError as error:
        return None, str(error)
