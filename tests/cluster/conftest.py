from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, launched
from tests.fake_cluster import ApiServer


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """A job that is not submitted yet, and a cluster with its runtime, to which this process connects."""
    with ApiServer() as server:
        yield launched(server, tmp_path / "volume", monkeypatch)


@pytest.fixture
def server(job: Launched) -> ApiServer:
    """That cluster's server."""
    return job.server
