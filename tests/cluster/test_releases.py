"""The objects that we make, against the definitions of the releases that docs/how-to/kubernetes.md names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.cluster.manifest import train_job
from tests.cluster.launched import launched
from tests.cluster.releases import needs_upstream, refused
from tests.fake_cluster import ApiServer

pytestmark = needs_upstream
TRAINERS = ("trainer-2.2.0", "trainer-2.3.0")
BASE = Path("k8s/base")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster."""
    with ApiServer() as server:
        yield server


def manifest(server: ApiServer, root: Path, monkeypatch: pytest.MonkeyPatch, *, with_samplers: bool) -> dict[str, Any]:
    """A training job with everything that a run can ask for."""
    job = launched(
        server,
        root,
        monkeypatch,
        gpus_per_node=1,
        gpu_type="NVIDIA-H100-80GB-HBM3",
        queue="research",
        rollout_servers=2,
        node_selector={"pool": "training"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        secrets={"hub": ["HF_TOKEN"]},
        service_account="trainer",
    )
    job.with_samplers = with_samplers
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-1", "uid": "1234"}
    return train_job(job.job, job.cluster, {"HF_HUB_OFFLINE": "1"}, owner, "2026-01-01T00:00:00+00:00")


@pytest.mark.parametrize("release", TRAINERS)
@pytest.mark.parametrize("with_samplers", [False, True])
def test_every_release_of_trainer_takes_our_training_jobs(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, with_samplers: bool
) -> None:
    """Strictly: a field that a release does not know would be refused with 400."""
    assert refused(release, manifest(server, tmp_path, monkeypatch, with_samplers=with_samplers)) == []


@pytest.mark.parametrize("release", TRAINERS)
@pytest.mark.parametrize("name", ["runtime-torch", "runtime-torch-vllm"])
def test_every_release_of_trainer_takes_our_runtimes(release: str, name: str) -> None:
    """Strictly, as `kubectl apply` sends them."""
    assert refused(release, yaml.safe_load((BASE / f"{name}.yaml").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("version", [("2.2.0", False), ("2.3.0", True)])
def test_a_field_that_a_release_does_not_know_is_found(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[str, bool]
) -> None:
    """The grace period in a patch is new in 2.3, and the check tells the two releases apart."""
    release, is_known = version
    made = manifest(server, tmp_path, monkeypatch, with_samplers=False)
    (job,) = made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 60
    found = refused(f"trainer-{release}", made)
    assert (found == []) == is_known
    assert is_known or "terminationGracePeriodSeconds" in found[0]
