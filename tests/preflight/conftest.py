"""A cluster in which a run can start, and the form of that run."""

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.cluster.kube import Clock
from components.preflight.config import load_params
from components.preflight.form import Form, as_overrides, form_of, overrides_of
from components.preflight.preflight import Ready, preflight
from components.shared.deployment import OPTIONAL_SECRET_KEYS, SECRET_KEYS, DeploymentConfig
from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.errors import PipelineError
from tests.fake_cluster import ApiServer
from tests.presets import ROOT

CLAIM = "grpo-pipeline"
NOT_CHECKED = "not checked until this is right: "
DEPLOYMENT = DeploymentConfig()
GSM8K = {
    "prepare_data": {"sources": [{"kind": "gsm8k", "train": "train.jsonl", "test": "test.jsonl"}]},
    "train_grpo": {"validation": None},  # these sources have no dev problems
}


def ready(form: Form, deployment: DeploymentConfig = DEPLOYMENT, **changes: Any) -> Ready:
    """What preflight returns for a form with keys of `overrides` added."""
    return preflight(with_overrides(form, **changes), deployment)


def refused(form: Form, deployment: DeploymentConfig = DEPLOYMENT, clock: Clock | None = None) -> list[str]:
    """The lines of preflight's refusal, without what it was not able to check."""
    with pytest.raises(PipelineError) as raised:
        preflight(form, deployment, deadline_s=20.0, clock=clock)
    assert raised.value.exit_code == 2
    first, *lines = [line for line in str(raised.value).splitlines() if not line.startswith(NOT_CHECKED)]
    assert not lines or first == f"{len(lines)} problems to correct before this run can start"
    return lines or [first]


def with_overrides(form: Form, **sections: Any) -> Form:
    """A form with more keys in `overrides`, merged into each section."""
    return {**form, "overrides": as_overrides(_merged(overrides_of(form), sections))}


def _merged(base: Any, overlay: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(overlay, dict):
        return overlay
    return {**base, **{key: _merged(base.get(key), value) for key, value in overlay.items()}}


def claim(name: str = CLAIM, mode: str = "ReadWriteMany") -> dict[str, Any]:
    """A volume claim as the cluster has it."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    return {**kind, "metadata": {"name": name}, "spec": spec, "status": {"phase": "Bound"}}


def node(name: str, allocatable: dict[str, Any]) -> dict[str, Any]:
    """A node as the cluster has it; with GPUs it has their type as a label."""
    labels = {"pool": "a", **({"nvidia.com/gpu.product": "NVIDIA-H200"} if "nvidia.com/gpu" in allocatable else {})}
    status = {"allocatable": {"pods": "110", **allocatable}}
    kind = {"apiVersion": "v1", "kind": "Node"}
    return {**kind, "metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with all that a run needs, which is the one that this process finds."""
    for key in itertools.chain(*SECRET_KEYS.values(), *OPTIONAL_SECRET_KEYS.values()):
        monkeypatch.delenv(key, raising=False)
    with ApiServer() as server:
        server.cluster.add_runtime()
        server.cluster.add(claim())
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture
def form() -> Form:
    """The run form as it opens."""
    return form_of(load_params(ROOT / "params.yaml"))


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
