"""A cluster, and jobs for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from components.shared.environment import KUBECONFIG_VARIABLE
from tests.cluster.launched import MakeJob, launched
from tests.fake_cluster import ApiServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with the runtime grpo-torch, to which this process connects."""
    with ApiServer() as server:
        server.cluster.add_runtime("grpo-torch")
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture
def make_job(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """A function that makes a job for that cluster; its arguments are settings of the cluster."""
    return lambda **changes: launched(server, tmp_path / "volume", monkeypatch, **changes)
