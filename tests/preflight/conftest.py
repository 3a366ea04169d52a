"""A cluster in which a run can start, and the form of that run."""

import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import SECRET_KEYS
from components.preflight.form import Form
from components.shared.environment import KUBECONFIG_VARIABLE
from pipelines.grpo_post_training_on_cluster import FORM
from tests.fake_cluster import ApiServer

CLAIM = "grpo-pipeline"


def claim(name: str = CLAIM, mode: str = "ReadWriteMany", phase: str = "Bound") -> dict[str, Any]:
    """A volume claim as the cluster has it."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    return {**kind, "metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with all that a run needs, which is the one that this process finds."""
    for key in (key for keys in SECRET_KEYS.values() for key in keys):
        monkeypatch.delenv(key, raising=False)
    with ApiServer() as server:
        server.cluster.add_runtime()
        server.cluster.add(claim())
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture
def form() -> Form:
    """The run form as it opens."""
    return copy.deepcopy(FORM)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a commit on `main`, which has the tag `v1`, and another commit after it."""
    folder = tmp_path / "data"
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "main", str(folder)], check=True)
    for message in ("one", "two"):
        git(folder, "commit", "--quiet", "--allow-empty", "--message", message)
        if message == "one":
            git(folder, "tag", "--annotate", "v1", "--message", "the first")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """What git says in a repository."""
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
