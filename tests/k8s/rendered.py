"""The manifests of k8s/: the base as it is written, and overlays as `kubectl kustomize` renders them."""

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("standalone", "standalone-kueue", "multi-user", "multi-user-kueue")
NAMESPACES = {name: "kubeflow" if name.startswith("standalone") else "grpo" for name in OVERLAYS}
STEPS = {"kubeflow": "pipeline-runner", "grpo": "default-editor"}
"""The service account that runs the steps, by namespace."""
Json = dict[str, Any]


def require_kubectl() -> None:
    """Skip a test where there is no kubectl; in CI there has to be one."""
    if shutil.which("kubectl") is None:
        assert not os.environ.get("CI"), "CI needs kubectl, 1.27 or newer"
        pytest.skip("kubectl is not installed")


@lru_cache
def base() -> list[Json]:
    """Return the documents of k8s/base, which need no kubectl."""
    paths = [path for path in sorted((K8S / "base").glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


@lru_cache
def render(folder: Path) -> list[Json]:
    """Return the documents of a kustomization."""
    require_kubectl()
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def overlay(name: str) -> list[Json]:
    """Return the documents of one of the overlays."""
    return render(K8S / "overlays" / name)


def one(documents: list[Json], kind: str, name: str) -> Json:
    """Return the document of this kind and name."""
    (document,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return document


def pod_templates(documents: list[Json]) -> dict[str, Json]:
    """Return every pod template of documents, by its CronJob or by its runtime and replicated job."""
    templates: dict[str, Json] = {}
    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] == "CronJob":
            templates[name] = document["spec"]["jobTemplate"]["spec"]["template"]
        if document["kind"] == "TrainingRuntime":
            for job in document["spec"]["template"]["spec"]["replicatedJobs"]:
                templates[f"{name}/{job['name']}"] = job["template"]["spec"]["template"]
    return templates
