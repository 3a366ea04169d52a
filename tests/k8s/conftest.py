"""A training job, for what accepts or refuses one."""

from pathlib import Path
from typing import Any

import pytest

from components.cluster.manifest import train_job
from tests.cluster.launched import EVERY_SETTING, launched
from tests.fake_cluster import ApiServer


@pytest.fixture(params=[False, True], ids=["without-samplers", "with-samplers"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A training job with everything that a run can ask for."""
    with ApiServer() as server:
        settings = EVERY_SETTING | {"rollout_servers": 2 if request.param else 0}
        job = launched(server, tmp_path, monkeypatch, queue="research", **settings)
    job.with_samplers = request.param
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-1", "uid": "1234"}
    made = train_job(job.job, job.stage, {"HF_HUB_OFFLINE": "1"}, owner, "2026-01-01T00:00:00+00:00")
    made["metadata"] |= {"namespace": "kubeflow", "uid": "5678"}  # as the server sets them
    return made
