"""Random histories of runs on a cluster: nothing is lost, nothing is left, and nothing is reported falsely.

About 90 a minute on two busy cores. A failure prints its seed, what happened, and the logs of all launchers.
"""

import random
import re
import shutil
import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.cluster import runs
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.logs import LOST
from tests.cluster.histories import ELSEWHERE, History, Launchers, Run
from tests.fake_cluster import BEFORE, Json, argo, kinds
from tests.pipelines.cluster.argo import Stage, details, pod

PIPELINE = dict(
    zip(
        ("pipeline_spec", "platform_spec"),
        yaml.safe_load_all(Path("pipelines/grpo_post_training.yaml").read_text()),
        strict=True,
    )
)
KNOWN = r"stopped|SIGTERM|its log is gone|trying again|somebody has deleted|API server"
"""Parts of the reasons for which runs fail here."""
SAMPLE, HISTORIES, PARTS = 16, 1000, 4
_HOUR_S = 3600.0
_SETTLED_S = 2000.0
"""Time after the last run has ended in which the reaper removes what is left."""
_LONGEST_S = 6 * _HOUR_S


@pytest.fixture(autouse=True)
def _no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client keeps a namespace in a file below the home folder."""
    monkeypatch.setattr("kfp.Client._LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launchers]:
    """What starts launchers."""
    with Launchers(tmp_path_factory.mktemp("launchers")) as started:
        yield started


def retry_strategy(version: str) -> argo.RetryStrategy:
    """Return how the compiled training step is retried by Argo, with a version of Kubeflow Pipelines."""

    def policies(value: Any) -> Iterator[Any]:
        for key, inner in value.items() if isinstance(value, dict) else ():
            if key == "train-grpo":
                yield inner.get("retryPolicy")
            yield from policies(inner)

    policy = next(each for each in policies(PIPELINE) if each)
    seconds = {key: float(policy[key].removesuffix("s")) for key in ("backoffDuration", "backoffMaxDuration")}
    return argo.RetryStrategy(
        limit=policy["maxRetryCount"],
        policy={"2.16": "OnFailure", "2.17": "OnError"}[version],
        duration_s=seconds["backoffDuration"],
        factor=policy["backoffFactor"],
        max_duration_s=seconds["backoffMaxDuration"],
    )


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
            namespace=draw.choice(["", "", "", ELSEWHERE]),
            start_timeout_s=1800,
            stall_timeout_s=_HOUR_S * 24,
            max_restarts=10,
        )
        self._submit()
        if draw.random() < 0.4:
            history.at(draw.uniform(0, 300), self._submit)
        for _ in range(draw.randrange(1, 6)):
            history.at(draw.uniform(1, 500), self._happening())

    def _submit(self) -> None:
        self.history.submit(str(uuid.UUID(int=self.draw.getrandbits(128), version=4)))

    def _run(self) -> Run:
        return self.draw.choice(self.history.runs)

    def _happening(self) -> Any:
        kinds_of = [
            (4, self._drain),
            (2, self._lose),
            (1, self._evict),
            (4, self._disturb_training),
            (2, self._preempt),
            (3, self._outage),
            (1, self._lost_answers),
            (2, self._pause_controllers),
            (1, self._upgrade),
            (1, self._terminate),
            (1, self._remove),
            (1, self._delete_job),
            (2, self._strike),
            (1, self._change_settings),
        ]
        weights, happenings = zip(*kinds_of, strict=True)
        happening = self.draw.choices(happenings, weights)[0]

        def happen() -> None:
            if self.history.is_away() and happening != self._lose:
                self.history.after(30, happen)  # it takes an API server
            else:
                happening()

        return happen

    def _drain(self) -> None:
        self.history.drain_launcher(self._run())

    def _lose(self) -> None:
        self.history.lose_launcher(self._run())

    def _evict(self) -> None:
        run = self._run()
        if run.launcher:
            self.may_fail.add(run.id)
        self.history.evict_launcher(run)

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
        self.history.outage(self.draw.choice([20, 76, 300, 580, 800]), **self.draw.choice(faults))

    def _lost_answers(self) -> None:
        self.history.lose_answers(self.draw.choice(["POST", "PATCH", "DELETE"]), self.draw.randrange(1, 4))

    def _pause_controllers(self) -> None:
        self.history.note("the controllers restart")
        self.history.cluster.controllers_return_s = self.history.now() + self.draw.choice([10, 60, 300])

    def _upgrade(self) -> None:
        self.history.note("Kubeflow Pipelines is upgraded")
        self.history.argo_returns_s = self.history.now() + self.draw.choice([30, 120, 300])

    def _terminate(self) -> None:
        run = self._run()
        self.may_fail.add(run.id)
        self.history.terminate(run)

    def _remove(self) -> None:
        run = self._run()
        self.may_fail.add(run.id)
        self.history.remove(run)

    def _delete_job(self) -> None:
        self.history.delete_jobs()

    def _change_settings(self) -> None:
        self.history.note("later steps have other settings")
        self.history.setting = "1"
        self.history.drain_launcher(self._run())

    def _strike(self) -> None:
        number = self.draw.choice([signal.SIGTERM, signal.SIGKILL])
        self.history.strike(self.draw.choice(["POST", "PATCH", "DELETE"]), number)


def check(history: History, plan: Plan, version: str) -> None:
    """Check what must hold at the end of every history."""
    assert history.cluster.all(kinds.TRAIN_JOBS) == [], "a job is left"
    training = [pod for pod in history.cluster.all(kinds.PODS) if "jobset" in str(pod["metadata"].get("labels"))]
    assert training == [], "pods are left"
    assert history.violations == [], history.violations
    for run in history.runs:
        assert run.end is not None
        output = history.root / f"{run.workflow}-{len(run.attempts) - 1}" / "policy"
        log = run.logs[-1].read_text() if run.logs and run.logs[-1].exists() else ""
        if run.end.phase == argo.SUCCEEDED:
            assert history.is_complete(output), f"{run.workflow} has succeeded without a policy: {output}"
        else:
            lost = [each for each in run.attempts if each.phase == argo.ERROR]
            is_lost = version == "2.16" if lost else False
            may_fail = plan.may_fail | set(history.struck)
            assert run.id in may_fail or is_lost or len(lost) > 3, f"{run.workflow} has failed: {log[-2000:]}"


def check_status(history: History) -> None:
    """Check that the state of each run is shown, and why it failed."""
    for run in history.runs:
        assert run.end is not None
        if not run.attempts:
            continue  # no pod of it ever was
        first, *lines = status(history, run, PIPELINE)
        errors = [line for line in lines if line.startswith("error: ")]
        if run.is_removed:
            assert LOST in lines, lines
        elif run.end.phase == argo.SUCCEEDED:
            assert first.endswith("succeeded"), first
            assert errors == []
        else:
            assert first.endswith("failed"), first
            assert errors, lines
            assert re.search(KNOWN, errors[0]), errors


def status(history: History, run: Run, pipeline: Json) -> list[str]:
    """Return what `grpo-pipeline status` prints of a run as it has ended."""
    kfp, end = history.server.kfp, run.end
    assert end is not None
    state = "RUNNING" if run.is_removed else "SUCCEEDED" if end.phase == argo.SUCCEEDED else "FAILED"
    times = {"created_at": history.clock.stamp(), "finished_at": None if run.is_removed else history.clock.stamp()}
    stage = Stage(state, len(run.attempts), times["created_at"] or "", history.clock.stamp())
    row = {"run_id": run.id, "display_name": run.workflow, "state": state, "pipeline_spec": pipeline, **times}
    kfp.runs[run.id] = {**row, "run_details": {"task_details": details({"train-grpo": stage})}}
    gone = run.is_removed
    kfp.pods = {
        pod("train-grpo", number): log.read_text() + ending if log.exists() else None
        for number, (log, ending, attempt) in enumerate(zip(run.logs, run.endings, run.attempts, strict=True))
        if not (gone or attempt.phase == argo.ERROR)
    }
    kubeflow = Kubeflow(history.server.url)
    return runs.show(kubeflow, kubeflow.run(run.id))


def play(seed: int, launchers: Launchers, root: Path) -> History:
    """Play the history of a seed."""
    version = random.Random(-seed).choice(["2.16", "2.17", "2.17", "2.17"])
    with History(launchers, root, retry_strategy(version)) as history:
        try:
            plan = Plan(history, seed)
            over: list[float] = []

            def is_over() -> bool:
                if not over and history.now() > 800 and all(run.end for run in history.runs):
                    over.append(history.now())
                return bool(over) and history.now() > over[0] + _SETTLED_S

            history.play_until(is_over, _LONGEST_S)
            check(history, plan, version)
            check_status(history)
        except BaseException:
            print(f"seed {seed}, Kubeflow Pipelines {version}:", *history.notes, sep="\n")
            for run in history.runs:
                for log in run.logs:
                    print(f"--- {log.name}", log.read_text() if log.exists() else "", sep="\n")
            raise
        return history


@pytest.mark.slow
def test_reaper_leaves_steps_the_time_to_come_back(launchers: Launchers, tmp_path: Path) -> None:
    """After minutes without an API server, the reaper may be the first to reach it again."""
    with History(launchers, tmp_path, retry_strategy("2.17")) as history:
        history.configure(num_steps=300, save_every=10, namespace=ELSEWHERE)
        run = history.submit(str(uuid.UUID(int=1)))
        history.at(99, lambda: history.outage(800, status=503))
        history.play_until(lambda: run.end is not None, _LONGEST_S)
        assert history.violations == [], history.notes
        assert run.end == argo.End(argo.SUCCEEDED, "")


@pytest.mark.parametrize("wait_s", [None, 1500, 20], ids=["never admitted", "admitted later", "admitted at once"])
def test_of_two_runs_in_queues_the_one_that_is_admitted_first_trains(
    launchers: Launchers, tmp_path: Path, wait_s: float | None
) -> None:
    """The other one takes its result, whether or not its queue ever has quota."""
    with History(launchers, tmp_path, retry_strategy("2.17")) as history:
        history.configure(num_steps=80, save_every=10, queue="full")
        history.use_queue("full", wait_s)
        first = history.submit(str(uuid.UUID(int=1 << 96)))
        history.at(50, lambda: history.use_queue("free", 20))
        history.at(51, partial(history.submit, str(uuid.UUID(int=2 << 96))))
        history.play_until(lambda: len(history.runs) == 2 and all(run.end for run in history.runs), 3000)
        assert [run.end for run in history.runs] == [argo.End(argo.SUCCEEDED, "")] * 2, history.notes
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
