"""A cluster, and the real client connected to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client, config

from tests.fake_cluster import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster with the runtime grpo-torch, which allows one restart."""
    with ApiServer() as server:
        server.cluster.add_runtime("grpo-torch", max_restarts=1)
        yield server


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> client.ApiClient:
    """The real client."""
    return config.new_client_from_config(str(server.kubeconfig(tmp_path / "kubeconfig")))
