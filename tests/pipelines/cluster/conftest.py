"""A Kubeflow Pipelines to talk to, and the pipeline that is submitted to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from components.preflight.config import load_params
from pipelines.graph import write
from tests.fake_cluster import ApiServer
from tests.presets import ROOT


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled pipeline."""
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    write(path, load_params(ROOT / "params.yaml"))
    return path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with one user, which the environment names; its Kubernetes API too."""
    with ApiServer(namespace="kubeflow") as server:
        for name in ("KF_PIPELINES_ENDPOINT", "KUBERNETES_SERVICE_HOST", "GRPO_PIPELINE_TOKEN", "GRPO_PIPELINE_COOKIE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GRPO_PIPELINE_ENDPOINT", server.url)
        monkeypatch.setenv("GRPO_PIPELINE_KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        # The client keeps a namespace of its own under the home folder.
        monkeypatch.setattr("kfp.Client._LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
        server.cluster.add_runtime()
        yield server
