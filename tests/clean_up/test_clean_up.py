"""The last task of a run: what it removes from a cluster, and its summary."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.clean_up.clean_up import Ending, clean_up, run
from components.cluster import kube
from components.shared import stage
from components.shared.environment import KUBECONFIG_VARIABLE, POD_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from tests.cluster.launched import add_train_job
from tests.fake_cluster import ApiServer, Fault, kinds

_RUN = "0b1c2d3e"
_FAILED = Ending(_RUN, "FAILED", "Task exit-handler-1 failed.")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster, to which this process connects."""
    with ApiServer() as server:
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


def _add_job(server: ApiServer, name: str, run_id: str = _RUN) -> None:
    add_train_job(server, name, {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: run_id})


def _add_pod(
    server: ApiServer, task: str, *lines: str, run_id: str = _RUN, code: int | None = 0, reason: str = "Completed"
) -> None:
    """The pod of a task that has ended with an exit code after 90 seconds, or still waits."""
    status: dict[str, Any] = {"phase": "Pending"}
    if code is not None:
        times = {"startedAt": "2026-01-01T10:00:00Z", "finishedAt": "2026-01-01T10:01:30Z"}
        ended = {"terminated": {"exitCode": code, "reason": reason, **times}}
        common = {"image": "light", "imageID": "", "ready": False, "restartCount": 0}
        statuses = [{"name": "wait", "state": {}, **common}, {"name": "main", "state": ended, **common}]
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": statuses}
    labels = {"pipeline/runid": run_id, "grpo-pipeline/task": task}
    metadata = {"name": f"{task}-{len(server.cluster.all(kinds.PODS))}", "labels": labels}
    spec = {"containers": [{"name": "main", "image": "light"}]}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}
    (pod,) = server.cluster.add(document)
    if code is not None:
        server.cluster.print(pod, *lines)
    server.clock.advance(1)


def _summary(ending: Ending, folder: Path) -> str:
    page = folder / "summary.md"
    clean_up(ending, "", page, [])
    return page.read_text()


def test_jobs_of_the_run_are_removed(server: ApiServer, tmp_path: Path) -> None:
    """By their label; those of other runs stay."""
    for name, run_id in (("mine-sft", _RUN), ("mine-grpo", _RUN), ("other", "ffffffff")):
        _add_job(server, name, run_id)
    text = _summary(_FAILED, tmp_path)
    assert "Removed: mine-grpo, mine-sft." in text
    assert [job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)] == ["other"]
    assert "Nothing of the run was left in the cluster." in _summary(_FAILED, tmp_path)


def test_summary_has_the_outcome_of_each_task(server: ApiServer, tmp_path: Path) -> None:
    """In the order of the tasks, with seconds and the last line, such as the verdict of the gate."""
    _add_pod(server, "train-grpo", "train_grpo 50/50  reward 0.9", "train_grpo: accuracy 0.91")
    _add_pod(server, "report", "report: gate passed: word_problems +12 points", "[KFP Executor] Wrote output")
    _add_pod(server, "other", "other: not of this run", run_id="ffffffff")
    lines = _summary(Ending(_RUN, "SUCCEEDED", ""), tmp_path).splitlines()
    assert lines[0] == "# Run succeeded"
    assert [line for line in lines if line.startswith("| ")] == [
        "| task | outcome | seconds | last line |",
        "| train-grpo | done | 90 | train_grpo: accuracy 0.91 |",
        "| report | done | 90 | report: gate passed: word_problems +12 points |",
    ]


@pytest.mark.parametrize(
    ("code", "reason", "meaning"),
    [
        (2, "Error", "something has to be corrected"),
        (75, "Error", "transient, may work the next time"),
        (137, "OOMKilled", "out of memory"),
        (1, "Error", "Error"),
    ],
)
def test_failed_task_is_named_with_its_error(
    server: ApiServer, tmp_path: Path, code: int, reason: str, meaning: str
) -> None:
    """At the top, with all lines of the error and none of Kubeflow's; of a task that was retried, the last attempt."""
    _add_pod(server, "register", "error: register: an earlier try", code=75, reason="Error")
    lines = (
        "register: begins",
        "error: register: 2 to correct",
        "storage: no | more",
        "I1122 10:00:00.0 1 main.go:1] 2",
    )
    _add_pod(server, "register", *lines, code=code, reason=reason)
    _add_pod(server, "clean-up", code=None)
    text = _summary(_FAILED, tmp_path)
    error = "error: register: 2 to correct; storage: no \\| more"
    assert f"**register failed: exit code {code}: {meaning}.** {error}\n" in text
    assert text.count("| register |") == 1
    assert "| clean-up | pending |  |  |" in text
    assert "Error from Kubeflow: Task exit-handler-1 failed." in text


def test_failed_removal_is_reported_and_repeated(server: ApiServer, tmp_path: Path) -> None:
    """Where the cluster does not answer, the task fails, with a summary all the same; the next attempt removes."""
    _add_job(server, "mine")
    page, removed = tmp_path / "summary.md", list[str]()
    server.faults.add(Fault("DELETE", status=503), Fault("GET", "/pods", status=503))
    for left in ("Training jobs of the run may be left in the cluster: ", "Removed: mine."):
        with pytest.raises(RetryableError, match="503"):
            clean_up(_FAILED, "", page, removed)
        assert left in page.read_text()
    clean_up(_FAILED, "", page, removed)
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    assert "Removed: mine." in page.read_text(), "by the attempt before"


def test_busy_cluster_is_asked_again(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the task itself: Kubeflow would take it for a failure as any other, and a job would be left."""
    monkeypatch.setenv(POD_VARIABLE, "clean-up-1")
    monkeypatch.setattr(stage, "PAUSES_S", (0.0,))
    _add_job(server, "mine")
    server.faults.add(Fault("DELETE", status=503))
    run(_FAILED, "", str(tmp_path / "summary.md"))
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


def test_missing_cluster_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a summary all the same."""
    monkeypatch.setenv(KUBECONFIG_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(SystemExit) as ended:
        run(_FAILED, "", str(tmp_path / "out" / "summary"))
    assert ended.value.code == PipelineError.exit_code
    assert "# Run failed" in (tmp_path / "out" / "summary").read_text()
