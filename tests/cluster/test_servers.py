import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.cluster.job import Job
from components.cluster.servers import serve_in_pod
from components.shared.environment import JOB_VARIABLE, TRAIN_JOB_VARIABLE
from components.shared.errors import PipelineError
from tests.train_grpo.settings import SERVERS, grpo_config


def test_pod_waits_for_the_turn_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, the pods of another job may do the same work, or nothing is written yet; it ends when asked to."""
    job = Job(tmp_path / "launch", "", {}, {}, {}, num_processes=1, grace_s=1)
    then = iter([partial(job.write, "grpo-2"), partial(job.end_turn), partial(job.write, "grpo-1")])
    monkeypatch.setenv(TRAIN_JOB_VARIABLE, "grpo-1")
    monkeypatch.setattr(time, "sleep", lambda _: next(then)())
    assert Job.read_in_pod(job.folder) == job
    assert not list(then)
    job.end_turn()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(PipelineError, match="grpo-1: its step has not let it begin within 900 s"):
        Job.read_in_pod(job.folder)
    monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as for the first process of a container
    with pytest.raises(SystemExit, match="75"):
        Job.read_in_pod(job.folder)
    signal.signal(signal.SIGTERM, before)


def test_pod_becomes_the_server_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the job's model and settings, reachable from other pods; devices are those of the pod."""
    config = grpo_config(sampler__servers={**SERVERS, "num_servers": 1, "devices": ["4,5"]})
    folders = {"reference": str(tmp_path / "reference")}
    job = Job(tmp_path / "launch", "", config.model_dump(mode="json"), folders, {}, num_processes=1, grace_s=1)
    job.write("grpo-1")
    executed: list[Any] = []
    monkeypatch.setenv(JOB_VARIABLE, str(job.folder))
    monkeypatch.setenv(TRAIN_JOB_VARIABLE, "grpo-1")
    monkeypatch.setattr(os, "execve", lambda *command: executed.extend(command))
    serve_in_pod()
    program, command, environment = executed
    assert Path(program).name.startswith("python")
    assert {"--host=0.0.0.0", "--port=8000", f"--model={tmp_path / 'reference'}", "--dtype=float32"} <= set(command)
    assert "--middleware=components.rollout.vllm.servers.RequireKey" in command
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment.get("CUDA_VISIBLE_DEVICES") != "4,5"
