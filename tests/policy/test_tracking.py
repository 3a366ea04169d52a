"""What a training reports while it goes on: live files, and the three trackers, each by its own library."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

from components.policy.parallel import Ranks
from components.policy.tracking import _FINISH_S, training_log
from components.shared import jsonl, live
from components.shared.environment import JOURNAL_VARIABLE, POD_VARIABLE, TRAINER_VARIABLES
from components.shared.errors import StoppedError
from components.shared.live import LIVE, STEPS
from tests.train_grpo.settings import grpo_config

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


def _train(work: Path, *, start: int, stop: int, ends: bool = True, **tracking: Any) -> None:
    """Report the steps after `start` up to `stop`, of a training that is resumed if steps are finished."""
    config = grpo_config(num_steps=4, tracking=tracking)
    completions = [{"step": row["step"], "completion": "#### 2"} for row in ROWS]
    try:
        with training_log("train_grpo", config, _MAIN, work, ROWS[:start], completions[:start]) as log:
            for row, completion in zip(ROWS[start:stop], completions[start:stop], strict=True):
                log.step(row, [completion])
            if not ends:
                raise StoppedError("stopped")
    except StoppedError:
        pass


def _stopped_and_resumed(work: Path, **tracking: Any) -> None:
    """Stop after step 3, of which the checkpoint has two."""
    _train(work, start=0, stop=3, ends=False, **tracking)
    _train(work, start=2, stop=4, **tracking)


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


def _events(folder: Path) -> Any:
    """What the reader of TensorBoard reads of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "evening" / "train_grpo"))
    events.Reload()
    return events


def test_tensorboard_has_every_step_once(work: Path, tmp_path: Path) -> None:
    """A step that came again after a resumption counts once."""
    _stopped_and_resumed(work, tensorboard=True)
    events = _events(tmp_path)
    assert set(events.Tags()["scalars"]) == {"reward", "kl", "step_s"}
    for name in ("reward", "kl"):
        assert {event.step: event.value for event in events.Scalars(name)} == _figures(_live(work), name)
        assert len(events.Scalars(name)) == len(_figures(ROWS, name))


def test_a_tracker_that_a_resumed_training_begins_with_has_the_steps_before(work: Path, tmp_path: Path) -> None:
    """From the checkpoint: a run is worth tracking that went better than expected."""
    _train(work, start=0, stop=2, ends=False)
    _train(work, start=2, stop=4, tensorboard=True)
    assert {event.step: event.value for event in _events(tmp_path).Scalars("reward")} == _figures(ROWS, "reward")


def test_wandb_continues_its_run(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, read from its files: two parts of one run, in a group of the pipeline's run."""
    monkeypatch.setitem(_FINISH_S, "stopped", 60.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "before"))
    _train(work, start=0, stop=3, ends=False, wandb={"project": "sums"})
    monkeypatch.delenv("WANDB_DIR")
    _train(work, start=2, stop=4, wandb={"project": "sums"})
    parts = [next((folder / "wandb").glob("offline-run-*/*.wandb")) for folder in (tmp_path / "before", tmp_path)]
    (first, run, config), (second, resumed, _) = map(_read_wandb, parts)
    assert first == _by_step(ROWS[:3])
    assert second == _by_step(ROWS[2:])
    assert (run.run_id, run.project, run.run_group) == (resumed.run_id, "sums", "evening")
    assert config["train_grpo.learning_rate"] == "0.001"


def _by_step(rows: Sequence[dict[str, float | None]]) -> dict[int, dict[str, float]]:
    return {
        int(row["step"] or 0): {name: value for name, value in row.items() if value is not None and name != "step"}
        for row in rows
    }


def _read_wandb(path: Path) -> tuple[dict[int, dict[str, float]], Any, dict[str, Any]]:
    """Return the history of a run by step, its record and its config."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # generated without types

    history: dict[int, dict[str, float]] = {}
    run, config = None, {}
    for data in _leveldb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run = record.run
            config = {item.key: json.loads(item.value_json) for item in run.config.update}
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = record.history.step.num
            history[step] = {name: value for name, value in values.items() if not name.startswith("_")}
    return history, run, config


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which has blocks of 32 KiB, after the seven bytes of wandb's."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = -place % 32768
        if 0 < left < 7:
            place += left
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # the whole record, or the last part of one
            yield record
            record = b""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tracking server of MLflow with a database of its own."""
    tmp_path = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = (tmp_path / "mlflow.log").open("wb")
    with log, subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            for _ in range(600):
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 15)


@pytest.mark.long(minutes=0.4)
def test_mlflow_has_every_step_once(work: Path, server: str) -> None:
    """Read by its own client, from a real server: a resumed training continues its run."""
    from mlflow import MlflowClient

    _stopped_and_resumed(work, mlflow={"uri": server, "experiment": "sums"})
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


@pytest.mark.long(minutes=0.4)
def test_a_training_logs_into_the_run_that_kubeflow_has_begun_for_its_task(
    work: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher leaves where that is; each attempt of the task has all steps, and Kubeflow ends the run itself."""
    from mlflow import MlflowClient

    client = MlflowClient(server)
    experiment = client.create_experiment("kubeflow")
    attempts = [client.create_run(experiment).info.run_id for _ in range(2)]
    config = grpo_config(num_steps=4, checkpoint__every_steps=2)
    for run_id, start in zip(attempts, (0, 2), strict=True):
        with monkeypatch.context() as pod:
            variables = {"MLFLOW_RUN_ID": run_id, "MLFLOW_TRACKING_URI": server}
            for name, value in {**variables, POD_VARIABLE: "train-grpo"}.items():
                pod.setenv(name, value)
            live.begin(work, "train_grpo")
        completions = [{"step": row["step"], "completion": "#### 2"} for row in ROWS]
        with training_log("train_grpo", config, _MAIN, work, ROWS[:start], completions[:start]) as log:
            for row, completion in zip(ROWS[start : start + 3], completions[start : start + 3], strict=False):
                log.step(row, [completion])
    for run_id, last in zip(attempts, (3, 4), strict=True):
        logged = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "reward")]
        assert sorted(logged) == sorted((step, step / 8) for step in range(1, last + 1))
        assert client.get_run(run_id).info.status == "RUNNING"
    assert [each.path for each in client.list_artifacts(attempts[0], "samples")] == ["samples/step-000002.jsonl"]
    assert len(client.search_runs([experiment])) == 2


def test_the_status_of_a_train_job_has_the_progress_of_its_training(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubeflow Trainer's own models read it: percent, time left and the last figures."""
    sent: list[tuple[str, bytes]] = []

    class Trainer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append((self.headers["Authorization"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    (tmp_path / "token").write_text("s3cr3t\n")
    monkeypatch.setattr("components.policy.tracking._JobStatus._EVERY_S", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Trainer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        values = (f"http://127.0.0.1:{http.server_port}/status", str(tmp_path / "ca.crt"), str(tmp_path / "token"))
        for name, value in zip(TRAINER_VARIABLES, values, strict=True):
            monkeypatch.setenv(name, value)
        _train(work, start=0, stop=3, ends=False)
        http.shutdown()
    assert {token for token, _ in sent} == {"Bearer s3cr3t"}
    read = [TrainerV1alpha1UpdateTrainJobStatusRequest.from_json(body.decode()) for _, body in sent]
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
