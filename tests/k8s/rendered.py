"""The manifests as `kubectl kustomize` renders them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("standalone", "standalone-kueue", "multi-user", "multi-user-kueue")
NAMESPACES = {
    "standalone": "kubeflow",
    "standalone-kueue": "kubeflow",
    "multi-user": "grpo",
    "multi-user-kueue": "grpo",
}
STEPS = {"kubeflow": "pipeline-runner", "grpo": "default-editor"}
"""The service account that runs the steps, by namespace."""
Json = dict[str, Any]


def require_kubectl() -> None:
    """Skip a test where there is no kubectl; in CI there has to be one."""
    if shutil.which("kubectl") is None:
        assert not os.environ.get("CI"), "CI needs kubectl, 1.27 or newer"
        pytest.skip("kubectl is not installed")


@lru_cache
def render(folder: Path) -> list[Json]:
    """Return the documents of a kustomization."""
    require_kubectl()
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # One loader for each: kustomize writes quantities such as "4" with their quotes.
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def overlay(name: str) -> list[Json]:
    """Return the documents of one of the overlays."""
    return render(K8S / "overlays" / name)


def one(documents: list[Json], kind: str, name: str) -> Json:
    """Return the document of this kind and name."""
    (found,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates(document: Json) -> Iterator[tuple[str, Json]]:
    """Each pod template of a document, with where it stands."""
    if document["kind"] == "CronJob":
        yield document["metadata"]["name"], document["spec"]["jobTemplate"]["spec"]["template"]
    if document["kind"] == "TrainingRuntime":
        for job in document["spec"]["template"]["spec"]["replicatedJobs"]:
            yield f"{document['metadata']['name']}/{job['name']}", job["template"]["spec"]["template"]
