"""Random histories of runs on a cluster: nothing is lost, nothing is left, and nothing is reported falsely.

About 90 a minute on two busy cores. A failure prints its seed, what happened, and the logs of all launchers.
"""

import random
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.cluster import kube
from tests.cluster.histories import ERROR, SUCCEEDED, History, Launchers, Run
from tests.fake_cluster import BEFORE, kinds

SAMPLE, HISTORIES, PARTS = 8, 1000, 4
_HOUR_S = 3600.0
_SETTLED_S = 2000.0
"""Time after the last run has ended in which the reaper removes what is left."""
_LONGEST_S = 6 * _HOUR_S


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launchers]:
    """What starts launchers."""
    with closing(Launchers(tmp_path_factory.mktemp("launchers"))) as started:
        yield started


class Plan:
    """What happens in the history of a seed."""

    def __init__(self, history: History, seed: int) -> None:
        self.draw, self.history = random.Random(seed), history
        self.may_fail: set[str] = set()
        """Runs for which something happens that ends a run."""
        draw = self.draw
        history.configure(
            num_steps=draw.choice([8, 30, 80, 200]),
            save_every=draw.choice([3, 10]),
            queue=draw.choice([None, None, "research"]),
            start_timeout_s=1800,
            stall_timeout_s=_HOUR_S * 24,
            max_restarts=10,
        )
        self._submit()
        if draw.random() < 0.4:
            history.at(draw.uniform(0, 300), self._submit)
        # How often each of these happens, in proportion.
        happenings: dict[Callable[[], None], int] = {
            lambda: history.drain_launcher(self._run()): 4,
            lambda: history.lose_launcher(self._run()): 2,
            self._disturb_training: 4,
            self._preempt: 2,
            self._outage: 3,
            lambda: history.pause_controllers(draw.choice([10, 60, 300])): 2,
            lambda: history.terminate(self._run(ends=True)): 1,
            self._strike: 2,
        }
        for _ in range(draw.randrange(1, 6)):
            (happening,) = draw.choices(list(happenings), list(happenings.values()))
            history.at(draw.uniform(1, 500), partial(self._happen, happening))

    def _submit(self) -> None:
        self.history.submit(str(uuid.UUID(int=self.draw.getrandbits(128), version=4)))

    def _run(self, *, ends: bool = False) -> Run:
        run = self.draw.choice(self.history.runs)
        self.may_fail |= {run.id} if ends else set()
        return run

    def _happen(self, happening: Callable[[], None]) -> None:
        if self.history.is_away():
            self.history.after(30, partial(self._happen, happening))  # it takes an API server
        else:
            happening()

    def _disturb_training(self) -> None:
        pods, how = self.history.training_pods(), self.draw.choice(["drain", "evict", "lose"])
        if pods:
            pod = self.draw.choice(pods)
            self.history.note(f"{pod}: {how}")
            getattr(self.history.cluster, how)(pod)

    def _preempt(self) -> None:
        jobs = self.history.cluster.all(kinds.TRAIN_JOBS)
        if jobs and "kueue.x-k8s.io/queue-name" in jobs[0]["metadata"]["labels"]:
            self.history.note("the job is preempted")
            self.history.cluster.preempt(jobs[0]["metadata"]["name"], self.draw.choice([20, 300]))

    def _outage(self) -> None:
        faults: list[dict[str, Any]] = [{"status": 503}, {"drop": BEFORE}, {"status": 429, "retry_after_s": 5}]
        fault = self.draw.choice(faults)
        self.history.outage(self.draw.choice([20, 76, 300, 580, 800]), **fault)

    def _strike(self) -> None:
        number = self.draw.choice([signal.SIGTERM, signal.SIGKILL])
        self.history.strike(self.draw.choice(["POST", "PATCH", "DELETE"]), number)


def check(history: History, plan: Plan) -> None:
    """Check what must hold at the end of every history."""
    assert history.cluster.all(kinds.TRAIN_JOBS) == [], "a job is left"
    pods = [pod for pod in history.cluster.all(kinds.PODS) if kube.JOB_SET in pod["metadata"].get("labels", {})]
    assert pods == [], "pods are left"
    assert history.violations == [], history.violations
    for run in history.runs:
        assert run.end is not None
        output = history.root / f"{run.workflow}-{len(run.attempts) - 1}" / "policy"
        if run.end == SUCCEEDED:
            assert history.is_complete(output), f"{run.workflow} has succeeded without a policy: {output}"
        else:
            num_lost = run.attempts.count(ERROR)
            assert run.id in plan.may_fail | set(history.struck) or num_lost > 3, f"{run.workflow} has failed"


def play(seed: int, launchers: Launchers, root: Path) -> None:
    """Play the history of a seed."""
    with History(launchers, root) as history:
        try:
            plan = Plan(history, seed)
            over: list[float] = []

            def is_over() -> bool:
                if not over and history.now() > 800 and all(run.end for run in history.runs):
                    over.append(history.now())
                return bool(over) and history.now() > over[0] + _SETTLED_S

            history.play_until(is_over, _LONGEST_S)
            check(history, plan)
        except BaseException:
            print(f"seed {seed}:", *history.notes, sep="\n")
            for run in history.runs:
                for log in run.logs:
                    print(f"--- {log.name}", log.read_text() if log.exists() else "", sep="\n")
            raise


@pytest.mark.parametrize("wait_s", [None, 1500, 20])
def test_of_two_runs_in_queues_the_one_that_is_admitted_first_trains(
    launchers: Launchers, tmp_path: Path, wait_s: float | None
) -> None:
    """The other one takes its result, whether or not its queue ever has quota."""
    with History(launchers, tmp_path) as history:
        history.configure(num_steps=80, save_every=10, queue="full")
        history.use_queue("full", wait_s)
        first = history.submit(str(uuid.UUID(int=1 << 96)))
        history.at(50, lambda: history.use_queue("free", 20))
        history.at(51, partial(history.submit, str(uuid.UUID(int=2 << 96))))
        history.play_until(lambda: len(history.runs) == 2 and all(run.end for run in history.runs), 3000)
        assert [run.end for run in history.runs] == [SUCCEEDED] * 2, history.notes
        assert history.violations == []
        (trained,) = set(history.begun)
        winner = first if wait_s == 20 else history.runs[1]
        assert trained.split("-")[1] == winner.id[:8], history.notes
        for run in history.runs:
            assert history.is_complete(history.root / f"{run.workflow}-0" / "policy")
            taken = f"unchanged: from run {winner.workflow}" in run.logs[-1].read_text()
            assert taken == (run is not winner)


@pytest.mark.slow
def test_sample(launchers: Launchers, tmp_path: Path) -> None:
    """A few histories."""
    for seed in range(SAMPLE):
        play(seed, launchers, tmp_path / str(seed))


@pytest.mark.long(minutes=3)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_campaign(part: int, launchers: Launchers, tmp_path: Path) -> None:
    """All of them."""
    for seed in range(SAMPLE + part, SAMPLE + HISTORIES, PARTS):
        play(seed, launchers, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
