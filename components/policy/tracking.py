"""What a training reports of each step, as soon as it is finished: live files, and the trackers that are configured.

A tracker is a class with the three methods of `Tracker` and a line in `TRACKERS`. It runs in a thread of its own: a
server that is slow or down costs a training no time, and the first failure of a tracker ends that tracker alone.
On a cluster two more trackers need no configuration: the MLflow run that Kubeflow's plugin has begun, and the status of
the TrainJob.
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
"""Time for a tracker to hand on what it still has, at the end of a training."""


_REQUEST_S = 10.0
_LONGEST_REASON = 160
"""Characters of a library's message that a warning has."""


Samples = Sequence[Mapping[str, Any]]
"""Completions that were sampled in a step, with their rewards."""


@dataclass(frozen=True)
class Run:
    """A training as trackers know it: one run of them, in a group with the other training of the pipeline's run."""

    group: str
    """Name of the pipeline's run."""
    stage: str
    steps_done: int
    """Steps that are before the first one now, of a run that a tracker continues; 0 for a new one."""
    num_steps: int
    config: dict[str, str]
    """Each key with its path and its value as JSON."""
    folder: Path
    """In which trackers that write files make folders of their own."""
    state: dict[str, str]
    """What a tracker stores to continue its run when the training is resumed; empty for a new one."""


class Tracker(Protocol):
    """Takes the steps of a training, called by one thread; an exception of any method ends the tracker."""

    def start(self, run: Run) -> None:
        """Begin a run, or continue the one of `run.state`."""

    def log(self, step: int, figures: Mapping[str, float], samples: Samples) -> None:
        """Take what was measured in a step, and its completions where a checkpoint follows.

        After a resumption steps may come again.
        """

    def finish(self, status: str) -> None:
        """End the run: `finished`, `failed`, or `stopped`, after which it may be resumed."""


class TrainingLog:
    """The live files of a training and its trackers; neither in any process but the main one."""

    def __init__(self, files: LiveFiles | None, trackers: "list[_Thread]", checkpoint_steps: int) -> None:
        self._files, self._trackers, self._checkpoint_steps = files, trackers, checkpoint_steps

    def step(self, row: Row, completions: Samples = ()) -> None:
        """Report a finished step."""
        if self._files:
            self._files.append(row, completions)
        is_shown = int(row["step"] or 0) % self._checkpoint_steps == 0
        for tracker in self._trackers:
            tracker.log(row, completions if is_shown else ())


@contextmanager
def training_log(
    stage: str,
    config: Any,
    ranks: Ranks,
    work: Path,
    rows: Sequence[Row],
    completions: Samples = (),
) -> Iterator[TrainingLog]:
    """Yield the log of a training, of which the steps with these `rows` and `completions` are finished.

    `config` is that of the stage: its keys `num_steps`, `tracking` and `checkpoint` are read, and all are reported.
    """
    if not ranks.is_main:
        yield TrainingLog(None, [], config.checkpoint.every_steps)
        return
    files = LiveFiles(work, stage, config.num_steps)
    files.restart(rows, completions)
    flat_config = dict(flat(stage, config.model_dump(mode="json")))
    trackers = []
    for name, tracker in _trackers(config.tracking, files):
        state_file = work / LIVE / f"{name}.json"
        state = jsonl.read_json(state_file) if state_file.is_file() else {}
        # A tracker that a resumed training begins with gets the earlier steps, too.
        steps_done, earlier = (len(rows), []) if state else (0, rows)
        run = Run(files.name, stage, steps_done, config.num_steps, flat_config, work.resolve().parents[2], state)
        trackers.append(_Thread(name, tracker, run, state_file))
        for row in earlier:
            trackers[-1].log(row, ())
    status = "failed"
    try:
        yield TrainingLog(files, trackers, config.checkpoint.every_steps)
        status = "finished"
    except StoppedError:
        status = "stopped"
        raise
    finally:
        for each in trackers:
            each.finish(status)


def _trackers(config: TrackingConfig, files: LiveFiles) -> Iterator[tuple[str, Tracker]]:
    """Yield the trackers that are configured, and those that Kubeflow offers a training, with the name of each."""
    for name, tracker in TRACKERS.items():
        if settings := getattr(config, name):
            yield name, tracker(settings)
    if files.mlflow and not config.mlflow:
        # By the run: another attempt of the task has another one, which gets all steps.
        yield f"mlflow-{files.mlflow[MLFLOW_RUN_VARIABLE]}", _MlflowOfKubeflow(files.mlflow)
    if os.environ.keys() >= set(TRAINER_VARIABLES):
        yield "job_status", _JobStatus()


class _Thread:
    """The thread of a tracker, and the queue of rows that it takes."""

    def __init__(self, name: str, tracker: Tracker, run: Run, state_file: Path) -> None:
        self._name, self._tracker, self._run, self._state_file = name, tracker, run, state_file
        self._rows: queue.SimpleQueue[tuple[Row, Samples] | None] = queue.SimpleQueue()
        self._status = ""
        # A daemon: a training that ends for another reason does not wait for it.
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
                figures = {name: value for name, value in row.items() if value is not None and name != "step"}
                self._tracker.log(int(row["step"] or 0), figures, samples)
            self._tracker.finish(self._status)
        except Exception as error:  # of a library, a server or a network: no failure of the training
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:_LONGEST_REASON]
            self._warn(f"has failed ({reason}); the training goes on without it")

    def _warn(self, what: str) -> None:
        say(self._run.stage, f"warning: {self._run.stage}.tracking.{self._name} {what}")


# The trackers ---------------------------------------------------------------------------------------------------------


class _TensorBoard:
    """Event files in `tensorboard/RUN/STAGE`, which is the folder of the first run also where others resume it."""

    def __init__(self, _: bool) -> None:
        pass

    def start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.state.setdefault("folder", str(run.folder / "tensorboard" / run.group / run.stage))
        # Of a resumed training: TensorBoard hides the steps that come again.
        self._writer = SummaryWriter(folder, purge_step=run.steps_done + 1, flush_secs=5)

    def log(self, step: int, figures: Mapping[str, float], samples: Samples) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        self._writer.close()


class _Wandb:
    """A run per stage, in a group per run of the pipeline; its own files are in `wandb`."""

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
            allow_val_change=True,  # of operational keys, where the training is resumed
            dir=os.environ.get("WANDB_DIR") or run.folder,
            settings=settings,
        )

    def log(self, step: int, figures: Mapping[str, float], samples: Samples) -> None:
        if step >= self._run.step:  # of what was resumed, it has the others
            self._run.log(dict(figures), step=step)

    def finish(self, status: str) -> None:
        import wandb

        self._run.finish(exit_code=int(status != "finished"))
        wandb.teardown()  # waits until its files are complete; ranks end without the hooks that would


class _Mlflow:
    """A run per stage in an experiment; the tag `pipeline_run` groups them."""

    _PARAMS_AT_ONCE = 100
    _STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}  # noqa: RUF012  # a constant

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
            identity = (
                experiment.experiment_id if experiment else self._client.create_experiment(self._config.experiment)
            )
            tags = {"pipeline_run": run.group, "stage": run.stage}
            created = self._client.create_run(identity, tags=tags, run_name=f"{run.group}/{run.stage}")
            run.state["id"] = created.info.run_id
            params = [Param(name, value) for name, value in run.config.items()]
            for first in range(0, len(params), self._PARAMS_AT_ONCE):
                self._client.log_batch(run.state["id"], params=params[first : first + self._PARAMS_AT_ONCE])
        self._id = run.state["id"]
        if run.steps_done:
            self._client.update_run(self._id, status="RUNNING")
            logged = self._client.get_metric_history(self._id, _STEP_S)
            self._last_step = max((metric.step for metric in logged), default=0)

    def log(self, step: int, figures: Mapping[str, float], samples: Samples) -> None:
        from mlflow.entities import Metric

        if step > self._last_step:  # MLflow would have a value twice
            now_ms = int(time.time() * 1000)
            metrics = [Metric(name, value, now_ms, step) for name, value in figures.items()]
            self._client.log_batch(self._id, metrics=metrics)
            if samples:
                text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in samples)
                self._client.log_text(self._id, text, f"samples/step-{step:06d}.jsonl")

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._id, self._STATUS[status])


class _MlflowOfKubeflow(_Mlflow):
    """The run that Kubeflow's plugin for MLflow has begun for the task, with its parameters, and ends with the task."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(MlflowConfig(uri=variables[MLFLOW_URI_VARIABLE]))
        self._variables = variables

    def start(self, run: Run) -> None:
        if MLFLOW_WORKSPACE_VARIABLE in self._variables:  # MLflow's client reads it from nowhere else
            os.environ[MLFLOW_WORKSPACE_VARIABLE] = self._variables[MLFLOW_WORKSPACE_VARIABLE]
        run.state.setdefault("id", self._variables[MLFLOW_RUN_VARIABLE])
        super().start(run)

    def finish(self, status: str) -> None:
        pass


class _JobStatus:
    """The status of the TrainJob, where Kubeflow Trainer takes it: progress, time left and the last figures."""

    _EVERY_S = 10.0

    def start(self, run: Run) -> None:
        url, certificates, token = (os.environ[each] for each in TRAINER_VARIABLES)
        self._url, self._token = url, Path(token)
        self._context = ssl.create_default_context(cafile=certificates) if url.startswith("https:") else None
        self._run, self._began_s, self._sent_s = run, time.monotonic(), -math.inf
        self._first_step = run.steps_done
        run.state["begun"] = "true"  # a resumed training does not report the steps before it again

    def log(self, step: int, figures: Mapping[str, float], samples: Samples) -> None:
        now_s, total = time.monotonic(), self._run.num_steps
        if now_s - self._sent_s < self._EVERY_S and step < total:
            return
        self._sent_s = now_s
        left_s = (now_s - self._began_s) / max(1, step - self._first_step) * (total - step)
        status = {
            "progressPercentage": 100 * step // total,
            "estimatedRemainingSeconds": round(left_s),
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in figures.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token.read_text().strip()}"}
        request = Request(self._url, json.dumps({"trainerStatus": status}).encode(), headers)
        with urlopen(request, timeout=_REQUEST_S, context=self._context):
            pass

    def finish(self, status: str) -> None:
        pass


_STEP_S = "step_s"
"""A figure that every step has."""

TRACKERS: dict[str, Callable[[Any], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}
"""By key of `tracking`, which is also the name of its Python package."""
