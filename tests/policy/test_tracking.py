from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

from components.policy.parallel import Ranks
from components.policy.tracking import _FINISH_S, training_log
from components.shared import jsonl, live
from components.shared.environment import JOURNAL_VARIABLE, POD_VARIABLE, TRAINER_VARIABLES
from components.shared.errors import StoppedError
from components.shared.live import LIVE, STEPS
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.test_slow_rewards import answering

ROWS: list[dict[str, float | None]] = [
    {"step": step, "reward": step / 8, "kl": None if step == 1 else step / 1024, "step_s": 0.5} for step in range(1, 5)
]
_MAIN = Ranks(0, 1)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of unfinished work of a run that is called `evening`."""
    monkeypatch.setenv(JOURNAL_VARIABLE, str(tmp_path / "evening" / "journal.jsonl"))
    folder = tmp_path / "work" / "train_grpo" / "key"
    folder.mkdir(parents=True)
    return folder


def _train(work: Path, *, start: int, stop: int, ends: bool = True, every_steps: int = 4, **tracking: Any) -> None:
    """Report the steps after `start` up to `stop`, of a training that is resumed if steps are finished."""
    config = grpo_config(num_steps=4, checkpoint__every_steps=every_steps, tracking=tracking)
    completions = [{"step": row["step"], "completion": "#### 2"} for row in ROWS]
    try:
        with training_log("train_grpo", config, _MAIN, work, ROWS[:start], completions[:start]) as log:
            for row, completion in zip(ROWS[start:stop], completions[start:stop], strict=True):
                log.step(row, [completion])
            if not ends:
                raise StoppedError("stopped")
    except StoppedError:
        pass


def _figures(rows: Sequence[dict[str, float | None]], name: str) -> dict[int, float]:
    return {int(row["step"] or 0): value for row in rows if (value := row[name]) is not None}


def _live(work: Path, name: str = STEPS) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_rows(work / LIVE / name)]


def test_only_the_main_process_reports(work: Path) -> None:
    """The others share its folder."""
    config = grpo_config(tracking={"tensorboard": True})
    with training_log("train_grpo", config, Ranks(1, 2), work, []) as log:
        log.step(ROWS[0])
    assert list(work.parents[2].rglob("*.*")) == []


@pytest.mark.parametrize("is_new", [False, True])
def test_tensorboard_has_every_step_once(work: Path, tmp_path: Path, is_new: bool) -> None:
    """Also a step that came again after a resumption, and those before where a resumed training begins to track."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train(work, start=0, stop=3, ends=False, tensorboard=not is_new)
    _train(work, start=2, stop=4, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "evening" / "train_grpo"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "kl", "step_s"}
    for name in ("reward", "kl"):
        assert [(event.step, event.value) for event in events.Scalars(name)] == [*_figures(_live(work), name).items()]


def test_wandb_continues_its_run(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: two parts of one run, in a group of the pipeline's run, whose files are where the user wants them."""
    import wandb

    monkeypatch.setitem(_FINISH_S, "stopped", 60.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "before"))
    with patch.object(wandb.Run, "log", autospec=True, side_effect=wandb.Run.log) as log:
        _train(work, start=0, stop=3, ends=False, wandb={"project": "sums"})
        monkeypatch.delenv("WANDB_DIR")
        _train(work, start=2, stop=4, wandb={"project": "sums"})
    for folder in (tmp_path / "before", tmp_path):
        assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    logged = [(call.kwargs["step"], *call.args[1].items()) for call in log.call_args_list]
    rows = [[(name, value) for name, value in row.items() if value is not None] for row in [*ROWS[:3], *ROWS[2:]]]
    assert logged == [(step, *values) for (_, step), *values in rows]
    first, *_, last = (call.args[0] for call in log.call_args_list)
    assert (first.id, first.project, first.group) == (last.id, "sums", "evening")
    assert last.config["train_grpo.learning_rate"] == "0.001"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database of MLflow, which its client takes for a server."""
    from mlflow import MlflowClient

    monkeypatch.setitem(_FINISH_S, "stopped", 60.0)
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    MlflowClient(uri).search_experiments()  # makes its tables
    return uri


def test_mlflow_has_every_step_once(work: Path, server: str) -> None:
    """Read by its own client: a resumed training continues its run."""
    from mlflow import MlflowClient

    for start, stop in ((0, 3), (2, 4)):
        _train(work, start=start, stop=stop, ends=stop == 4, mlflow={"uri": server, "experiment": "sums"})
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("evening/train_grpo", "FINISHED")
    assert run.data.tags["pipeline_run"] == "evening"
    assert run.data.params["train_grpo.learning_rate"] == "0.001"
    for name in ("reward", "kl"):
        logged = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        assert sorted(logged) == sorted(_figures(_live(work), name).items())


def test_a_training_logs_into_the_run_of_kubeflow(work: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher leaves where that is; each attempt of the task has all steps, and Kubeflow ends the run itself."""
    from mlflow import MlflowClient

    client = MlflowClient(server)
    experiment = client.create_experiment("kubeflow")
    attempts = [client.create_run(experiment).info.run_id for _ in range(2)]
    for run_id, start in zip(attempts, (0, 2), strict=True):
        with monkeypatch.context() as pod:
            variables = {"MLFLOW_RUN_ID": run_id, "MLFLOW_TRACKING_URI": server}
            for name, value in {**variables, POD_VARIABLE: "train-grpo"}.items():
                pod.setenv(name, value)
            live.begin(work, "train_grpo")
        _train(work, start=start, stop=min(start + 3, 4), every_steps=2)
    for run_id, last in zip(attempts, (3, 4), strict=True):
        logged = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "reward")]
        assert sorted(logged) == sorted((step, step / 8) for step in range(1, last + 1))
        assert client.get_run(run_id).info.status == "RUNNING"
    assert [each.path for each in client.list_artifacts(attempts[0], "samples")] == ["samples/step-000002.jsonl"]
    assert len(client.search_runs([experiment])) == 2


def test_the_status_of_a_job_has_its_progress(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubeflow Trainer's own models read it: percent, time left and the last figures."""
    (tmp_path / "token").write_text("s3cr3t\n")
    monkeypatch.setattr("components.policy.tracking._JOB_STATUS_EVERY_S", 0.0)
    with answering([(200, {})] * 3) as (url, sent):
        values = (f"{url}/status", str(tmp_path / "ca.crt"), str(tmp_path / "token"))
        for name, value in zip(TRAINER_VARIABLES, values, strict=True):
            monkeypatch.setenv(name, value)
        _train(work, start=0, stop=3, ends=False)
    assert {request["key"] for request in sent} == {"Bearer s3cr3t"}
    read = [TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(request) for request in sent]
    statuses = [request.trainer_status for request in read if request and request.trainer_status]
    assert [status.progress_percentage for status in statuses] == [25, 50, 75]
    assert all((status.estimated_remaining_seconds or 0) >= 0 and status.last_updated_time for status in statuses)
    figures = {metric.name: metric.value for metric in statuses[-1].metrics or []}
    assert (figures["reward"], figures["kl"]) == ("0.375", "0.00292969")


def test_a_server_that_is_down_ends_no_training(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one warning, and all steps are in the live files."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _train(work, start=0, stop=4, mlflow={"uri": "http://127.0.0.1:9"})
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warning.startswith("train_grpo: warning: train_grpo.tracking.mlflow has failed (")
    assert _live(work) == ROWS
