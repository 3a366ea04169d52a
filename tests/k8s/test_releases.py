"""The objects that we create, against the definitions of the releases that docs/how-to/kubernetes.md names."""

from pathlib import Path
from typing import Any

import pytest

from components.cluster.manifest import train_job
from tests.cluster.launched import EVERY_SETTING, launched
from tests.fake_cluster import ApiServer
from tests.fake_cluster.schemas import needs_upstream, refused
from tests.k8s.rendered import K8S, base, one, overlay, render

pytestmark = needs_upstream
each_trainer = pytest.mark.parametrize("release", ["trainer-2.2.0", "trainer-2.3.0"])


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A training job with everything that a run can ask for."""
    with ApiServer() as server:
        job = launched(server, tmp_path, monkeypatch, queue="research", rollout_servers=2, **EVERY_SETTING)
    job.with_samplers = True
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-1", "uid": "1234"}
    return train_job(job.job, job.stage, {"HF_HUB_OFFLINE": "1"}, owner, "2026-01-01T00:00:00+00:00")


@each_trainer
def test_trainer_accepts_our_training_jobs_and_runtimes(release: str, manifest: dict[str, Any]) -> None:
    """Strictly: a field that a release does not know is refused."""
    assert refused(release, manifest) == []
    for name in ("grpo-torch", "grpo-torch-vllm"):
        assert refused(release, one(base(), "TrainingRuntime", name)) == []


@each_trainer
def test_unknown_field_is_found(release: str, manifest: dict[str, Any]) -> None:
    """The grace period in a patch is new in 2.3, and the check tells the releases apart."""
    job = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 60
    is_refused = any("terminationGracePeriodSeconds" in problem for problem in refused(release, manifest))
    assert is_refused == (release == "trainer-2.2.0")


@pytest.mark.parametrize("release", ["kueue-0.17.3", "kueue-0.19.2"])
def test_kueue_accepts_our_queues(release: str) -> None:
    """Strictly, as Trainer."""
    documents = [*render(K8S / "cluster"), one(overlay("standalone-kueue"), "LocalQueue", "grpo-pipeline")]
    kinds = ("ClusterQueue", "LocalQueue", "ResourceFlavor")
    assert {document["kind"]: refused(release, document) for document in documents} == {kind: [] for kind in kinds}
