"""What we create, by the definitions of every version that docs/how-to/kubernetes.md lists."""

import re
from pathlib import Path
from typing import Any

import pytest

from components.cluster.manifest import train_job
from tests.cluster.launched import EVERY_SETTING, launched
from tests.fake_cluster import ApiServer
from tests.fake_cluster.pods import job_set_of
from tests.fake_cluster.schemas import KUBERNETES, UPSTREAM, needs_upstream, problems, refused
from tests.k8s.rendered import K8S, OVERLAYS, one, overlay, render
from tests.presets import PAGES, ROOT

_SECTION = re.search(
    r"^## Versions that work together\n(.*?)^## ",
    (ROOT / "docs/how-to/kubernetes.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
assert _SECTION is not None
_HEAD, *_ROWS = [
    line.strip("| ").split(" | ") for line in _SECTION[1].splitlines() if re.match(r"\| .*\d|\| \| ", line)
]
_WORK = [row for row in _ROWS if len(row) > len(_HEAD)]
VERSIONS = {product: [row[column] for row in _WORK] for column, product in enumerate(_HEAD, 1)}
"""By product, the newest first."""
_TOO_OLD = [row[0] for row in _ROWS if len(row) == 2]
_RELEASES = {"Kubeflow Pipelines": "pipelines", "Model Registry": "model-registry", "Trainer": "trainer"} | {
    "JobSet": "jobset",
    "Kueue": "kueue",
}
"""What begins the name of a folder with the definitions of a release."""
_VERSION = r"v?\d+\.\d+(?:\.\d+)?"
_FETCHED = {
    "Kubernetes": rf"kindest/node:({_VERSION})",
    "Kubeflow Pipelines": rf"PIPELINE_VERSION=({_VERSION})",
    "Trainer": rf"TRAINER_VERSION=({_VERSION})",
    "Kueue": rf"kueue/releases/download/({_VERSION})",
}
"""Versions in commands."""
each_kubernetes = pytest.mark.parametrize("kubernetes", VERSIONS["Kubernetes"])
each_trainer = pytest.mark.parametrize("trainer", VERSIONS["Trainer"])
each_job_set = pytest.mark.parametrize("job_set", VERSIONS["JobSet"])
each_kueue = pytest.mark.parametrize("kueue", VERSIONS["Kueue"])


@pytest.fixture(params=[False, True])
def manifest(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A training job with everything that a run can ask for."""
    with ApiServer() as server:
        settings = EVERY_SETTING | {"rollout_servers": 2 if request.param else 0}
        job = launched(server, tmp_path, monkeypatch, queue="research", **settings)
    job.with_samplers = request.param
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-1", "uid": "1234"}
    made = train_job(job.job, job.stage, {"HF_HUB_OFFLINE": "1"}, owner, "2026-01-01T00:00:00+00:00")
    made["metadata"] |= {"namespace": "kubeflow", "uid": "5678"}  # as the server sets them
    return made


@each_kubernetes
@pytest.mark.parametrize("folder", ["overlays/multi-user-kueue", "one-machine"])
def test_kubernetes_accepts_our_objects(kubernetes: str, folder: str) -> None:
    """Strictly: a field that a version does not know is refused."""
    ours = [each for each in render(K8S / folder) if "kueue" not in each["apiVersion"]]
    assert [fault for document in ours for fault in problems(document, f"{kubernetes}.0")] == []


@needs_upstream
@each_trainer
def test_trainer_accepts_our_training_jobs_and_runtimes(trainer: str, manifest: dict[str, Any]) -> None:
    """Those of every overlay."""
    assert refused(f"trainer-{trainer}", manifest) == []
    for document in (each for name in OVERLAYS for each in overlay(name) if each["kind"] == "TrainingRuntime"):
        assert refused(f"trainer-{trainer}", document) == []


@needs_upstream
@each_job_set
def test_job_set_accepts_what_trainer_makes_of_them(job_set: str, manifest: dict[str, Any]) -> None:
    """The runtime of the job, with every patch merged in."""
    runtime = one(overlay("standalone"), "TrainingRuntime", manifest["spec"]["runtimeRef"]["name"])
    assert refused(f"jobset-{job_set}", job_set_of(manifest, runtime)) == []


@needs_upstream
@each_kueue
def test_kueue_accepts_our_queues(kueue: str) -> None:
    """Strictly, as Trainer."""
    documents = [*render(K8S / "cluster"), one(overlay("multi-user-kueue"), "LocalQueue", "grpo-pipeline")]
    found = {document["kind"]: refused(f"kueue-{kueue}", document) for document in documents}
    assert found == {kind: [] for kind in ("ClusterQueue", "LocalQueue", "ResourceFlavor")}


@needs_upstream
def test_the_table_lists_the_releases_whose_definitions_we_have() -> None:
    """All of them and no others, so that every listed version has been validated."""
    listed = {f"{prefix}-{version}" for name, prefix in _RELEASES.items() for version in VERSIONS[name]}
    assert listed == {path.name for path in UPSTREAM.iterdir() if path.is_dir()}


def test_every_version_that_a_page_names_is_in_the_table() -> None:
    """As one that works, or as one that does not; commands install one that works."""
    assert KUBERNETES.rpartition(".")[0] in VERSIONS["Kubernetes"]
    for path in PAGES:
        text = " ".join(path.read_text(encoding="utf-8").split())
        for product, listed in VERSIONS.items():
            name = product.partition(" Workflows")[0]
            lists = re.findall(rf"\b{name}(?: Workflows)?((?:,? (?:and |or |to )?{_VERSION}\b)+)", text)
            too_old = [
                version for each in _TOO_OLD if each.startswith(product) for version in re.findall(_VERSION, each)
            ]
            for version in re.findall(_VERSION, " ".join(lists)):
                assert any(_agree(version, each) for each in [*listed, *too_old]), f"{path}: {product} {version}"
            for version in re.findall(_FETCHED.get(product, "(?!)"), text):
                assert any(_agree(version, each) for each in listed), f"{path}: {product} {version}"


def _agree(version: str, other: str) -> bool:
    """Whether one of two versions is the other, or a patch of it."""
    parts, others = version.removeprefix("v").split("."), other.split(".")
    return parts[: len(others)] == others[: len(parts)]
