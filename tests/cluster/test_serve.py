import os
from pathlib import Path
from typing import Any

import pytest

from components.cluster import servers
from components.cluster.job import Job
from components.shared.environment import JOB_VARIABLE
from tests.train_grpo.settings import SERVERS, grpo_config


def test_a_pod_becomes_the_server_that_its_job_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the job's model and settings, reachable from other pods; devices are the pod's own."""
    config = grpo_config(sampler__servers={**SERVERS, "num_servers": 1, "devices": ["4,5"]})
    job = Job(
        folder=tmp_path / "launch",
        function="",
        config=config.model_dump(mode="json"),
        folders={"reference": str(tmp_path / "reference")},
        outputs={},
        num_processes=1,
        grace_s=1,
    )
    job.write()
    became: list[Any] = []
    monkeypatch.setenv(JOB_VARIABLE, str(job.folder))
    monkeypatch.setattr(os, "execve", lambda *command: became.extend(command))
    servers.serve_in_pod()
    program, command, environment = became
    assert Path(program).name.startswith("python")
    assert {"--host=0.0.0.0", "--port=8000", f"--model={tmp_path / 'reference'}", "--dtype=float32"} <= set(command)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment.get("CUDA_VISIBLE_DEVICES") != "4,5"
