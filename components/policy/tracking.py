"""Logs of a training: the metrics of each finished step go to live files, and to the trackers that are configured.

A tracker is a class with the three methods of `Tracker` and a line in `TRACKERS`. It runs in a separate thread, so a
slow server costs a training no time, and a failure ends only that tracker.
On a cluster two more trackers need no configuration: the MLflow run that Kubeflow's plugin has started, and the status
of the TrainJob.
"""

import json
import math
import os
import queue
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

from components.policy.config import MlflowConfig, TrackingConfig, WandbConfig
from components.policy.parallel import Ranks
from components.shared import jsonl
from components.shared.environment import (
    MLFLOW_RUN_VARIABLE,
    MLFLOW_URI_VARIABLE,
    MLFLOW_WORKSPACE_VARIABLE,
    TRAINER_VARIABLES,
)
from components.shared.errors import StoppedError
from components.shared.lineage import flat
from components.shared.live import LIVE, LiveFiles, Row
from components.shared.progress import say

_FINISH_S = {"finished": 60.0, "stopped": 10.0, "failed": 10.0}
"""Time for a tracker to send the remaining steps, by the status with which the training ends."""
_REQUEST_S = 10.0
_MAX_REASON_CHARACTERS = 160
"""Length of a library's message in a warning."""
_MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MAX_MLFLOW_PARAMS = 100
"""MLflow's limit of parameters in one request."""
_JOB_STATUS_EVERY_S = 10.0
Samples = Sequence[Mapping[str, Any]]
"""Completions that were sampled in a step, with their rewards."""


@dataclass(frozen=True)
class Run:
    """A run of a tracker: one training stage, in a group with the other one of the same pipeline run."""

    group: str
    """Name of the pipeline run."""
    stage: str
    steps_done: int
    """Number of steps before the first one to log, if the tracker continues a run; 0 for a new one."""
    num_steps: int
    config: dict[str, str]
    """Values of the config as JSON, by the path of their key."""
    folder: Path
    """Folder in which trackers that write files create theirs."""
    state: dict[str, str]
    """Values that a tracker stores to continue its run when the training is resumed; empty for a new one."""


class Tracker(Protocol):
    """Receives the steps of a training, all in one thread; an exception in any method ends the tracker."""

    def start(self, run: Run) -> None:
        """Create a run, or continue the one of `run.state`."""

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        """Log the metrics of a step, and completions if a checkpoint follows; a resumed training repeats steps."""

    def finish(self, status: str) -> None:
        """End the run: `finished`, `failed`, or `stopped`, after which it may be resumed."""


class TrainingLog:
    """The live files and the trackers of a training; only the main process has any."""

    def __init__(self, files: LiveFiles | None, trackers: "list[_TrackerThread]", checkpoint_steps: int) -> None:
        self._files, self._trackers, self._checkpoint_steps = files, trackers, checkpoint_steps

    def step(self, row: Row, completions: Samples = ()) -> None:
        """Log a finished step."""
        if self._files:
            self._files.append(row, completions)
        has_checkpoint = int(row["step"] or 0) % self._checkpoint_steps == 0
        for tracker in self._trackers:
            tracker.log(row, completions if has_checkpoint else ())


@contextmanager
def training_log(
    stage: str, config: Any, ranks: Ranks, work: Path, rows: Sequence[Row], completions: Samples = ()
) -> Iterator[TrainingLog]:
    """Yield the log of a training whose finished steps have these rows and completions; `config` is of its stage."""
    if not ranks.is_main:
        yield TrainingLog(None, [], config.checkpoint.every_steps)
        return
    files = LiveFiles(work, stage, config.num_steps)
    files.restart(rows, completions)
    flat_config = dict(flat(stage, config.model_dump(mode="json")))
    outputs = work.resolve().parents[2]  # `work` is outputs/work/STAGE/ID
    threads = []
    for name, tracker in _trackers(config.tracking, files):
        state_file = work / LIVE / f"{name}.json"
        state = jsonl.read_json(state_file) if state_file.is_file() else {}
        steps_done = len(rows) if state else 0
        run = Run(files.name, stage, steps_done, config.num_steps, flat_config, outputs, state)
        threads.append(_TrackerThread(name, tracker, run, state_file))
        for row in rows[steps_done:]:  # a tracker that is new to a resumed training gets the earlier steps too
            threads[-1].log(row, ())
    status = "failed"
    try:
        yield TrainingLog(files, threads, config.checkpoint.every_steps)
        status = "finished"
    except StoppedError:
        status = "stopped"
        raise
    finally:
        for thread in threads:
            thread.finish(status)


def _trackers(config: TrackingConfig, files: LiveFiles) -> Iterator[tuple[str, Tracker]]:
    """Yield the name of each tracker of this training, and the tracker."""
    for name, tracker in TRACKERS.items():
        settings = getattr(config, name)
        if settings:
            yield name, tracker(settings)
    if files.mlflow and not config.mlflow:
        # With the id of the run in its name: a retry of the task has another run, which has to get all steps.
        yield f"mlflow-{files.mlflow[MLFLOW_RUN_VARIABLE]}", _MlflowOfKubeflow(files.mlflow)
    if os.environ.keys() >= set(TRAINER_VARIABLES):
        yield "job_status", _JobStatus()


class _TrackerThread:
    """The thread of a tracker, with a queue of steps to log."""

    def __init__(self, name: str, tracker: Tracker, run: Run, state_file: Path) -> None:
        self._name, self._tracker, self._run, self._state_file = name, tracker, run, state_file
        self._rows: queue.SimpleQueue[tuple[Row, Samples] | None] = queue.SimpleQueue()
        """Steps with their completions; None at the end of the training."""
        self._status = ""
        # A daemon: if an error ends the process before `finish`, the process does not wait for this thread.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def log(self, row: Row, samples: Samples) -> None:
        self._rows.put((row, samples))

    def finish(self, status: str) -> None:
        self._status = status
        self._rows.put(None)
        self._thread.join(_FINISH_S[status])
        if self._thread.is_alive():
            self._warn(f"did not take all steps within {_FINISH_S[status]:g} s")

    def _work(self) -> None:
        try:
            self._tracker.start(self._run)
            jsonl.write_json(self._state_file, self._run.state)
            for row, samples in iter(self._rows.get, None):
                metrics = {name: value for name, value in row.items() if value is not None and name != "step"}
                self._tracker.log(int(row["step"] or 0), metrics, samples)
            self._tracker.finish(self._status)
        except Exception as error:  # any, of a library, a server or the network: the training goes on
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:_MAX_REASON_CHARACTERS]
            self._warn(f"has failed ({reason}); the training goes on without it")

    def _warn(self, problem: str) -> None:
        say(self._run.stage, f"warning: {self._run.stage}.tracking.{self._name} {problem}")


class _TensorBoard:
    """Event files in `tensorboard/RUN/STAGE`; a resumed training keeps the folder of its first run."""

    def start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.state.setdefault("folder", str(run.folder / "tensorboard" / run.group / run.stage))
        # TensorBoard hides earlier values of the steps that a resumed training repeats.
        self._writer = SummaryWriter(folder, purge_step=run.steps_done + 1, flush_secs=5)

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        self._writer.close()


class _Wandb:
    """A run per stage, in a group per pipeline run; the library writes its files into the folder `wandb`."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def start(self, run: Run) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            id=run.state.setdefault("id", uuid.uuid4().hex[:12]),
            resume="allow",
            group=run.group,
            name=f"{run.group}/{run.stage}",
            job_type=run.stage,
            config=run.config,
            allow_val_change=True,  # operational keys may change when a training is resumed
            dir=os.environ.get("WANDB_DIR") or run.folder,
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        if step >= self._run.step:  # it already has the steps that a resumed training repeats
            self._run.log(dict(metrics), step=step)

    def finish(self, status: str) -> None:
        import wandb

        self._run.finish(exit_code=int(status != "finished"))
        wandb.teardown()  # waits until its files are complete: ranks exit without running exit hooks


class _Mlflow:
    """A run per stage in an experiment; the tag `pipeline_run` groups them."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def start(self, run: Run) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._last_step = MlflowClient(self._config.uri), 0
        if not run.state:
            experiment = self._client.get_experiment_by_name(self._config.experiment)
            if experiment is None:
                experiment_id = self._client.create_experiment(self._config.experiment)
            else:
                experiment_id = experiment.experiment_id
            tags = {"pipeline_run": run.group, "stage": run.stage}
            created = self._client.create_run(experiment_id, tags=tags, run_name=f"{run.group}/{run.stage}")
            run.state["id"] = created.info.run_id
            params = [Param(name, value) for name, value in run.config.items()]
            for first in range(0, len(params), _MAX_MLFLOW_PARAMS):
                self._client.log_batch(run.state["id"], params=params[first : first + _MAX_MLFLOW_PARAMS])
        self._id = run.state["id"]
        if run.steps_done:
            self._client.update_run(self._id, status="RUNNING")
            logged = self._client.get_metric_history(self._id, "step_s")  # any metric that every step has
            self._last_step = max((metric.step for metric in logged), default=0)

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        from mlflow.entities import Metric

        if step > self._last_step:  # MLflow would keep both values of a repeated step
            now_ms = int(time.time() * 1000)
            values = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
            self._client.log_batch(self._id, metrics=values)
            if samples:
                text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in samples)
                self._client.log_text(self._id, text, f"samples/step-{step:06d}.jsonl")

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._id, _MLFLOW_STATUS[status])


class _MlflowOfKubeflow(_Mlflow):
    """The run that Kubeflow's MLflow plugin has started for the task, with its parameters, and will end."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(MlflowConfig(uri=variables[MLFLOW_URI_VARIABLE]))
        self._variables = variables

    def start(self, run: Run) -> None:
        if MLFLOW_WORKSPACE_VARIABLE in self._variables:  # the client reads it only from the environment
            os.environ[MLFLOW_WORKSPACE_VARIABLE] = self._variables[MLFLOW_WORKSPACE_VARIABLE]
        run.state.setdefault("id", self._variables[MLFLOW_RUN_VARIABLE])
        super().start(run)

    def finish(self, status: str) -> None:
        pass


class _JobStatus:
    """The status of the TrainJob, sent to Kubeflow Trainer: progress, time left and the latest metrics."""

    def start(self, run: Run) -> None:
        url, certificates, token = (os.environ[each] for each in TRAINER_VARIABLES)
        self._url, self._token = url, Path(token)
        self._context = ssl.create_default_context(cafile=certificates) if url.startswith("https:") else None
        self._run, self._started_s, self._sent_s = run, time.monotonic(), -math.inf
        run.state["begun"] = "true"  # any state marks a run as continued, so that earlier steps are not sent again

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        now_s, num_steps = time.monotonic(), self._run.num_steps
        if now_s - self._sent_s < _JOB_STATUS_EVERY_S and step < num_steps:
            return
        self._sent_s = now_s
        step_s = (now_s - self._started_s) / max(1, step - self._run.steps_done)
        status = {
            "progressPercentage": 100 * step // num_steps,
            "estimatedRemainingSeconds": round(step_s * (num_steps - step)),
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in metrics.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token.read_text().strip()}"}
        request = Request(self._url, json.dumps({"trainerStatus": status}).encode(), headers)
        with urlopen(request, timeout=_REQUEST_S, context=self._context):
            pass

    def finish(self, status: str) -> None:
        pass


TRACKERS: dict[str, Callable[[Any], Tracker]] = {
    "tensorboard": lambda _: _TensorBoard(),
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}
"""By key of `tracking`, which is also the name of its Python package."""
