import copy
import re
from typing import Any

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.cluster.jobs import train_job
from tests.cluster.releases import fields, needs_upstream
from tests.fake_cluster import runtime
from tests.fake_cluster.schemas import problems, without
from tests.fake_cluster.train_job_rules import NEW_IN_2_3

POD = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}]}],
        "affinity": {},
    },
}
FULL = train_job(
    trainer={"numNodes": 2, "resourcesPerNode": {"limits": {"cpu": "1", "nvidia.com/gpu": 8}}},
    runtimePatches=[
        {
            "manager": "a.b/c",
            "trainingRuntimeSpec": {
                "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": POD}}}]}}
            },
        }
    ],
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a document has mappings whose keys are fields."""
    found = [path] if isinstance(value, dict) and path[-1:] not in {("labels",), ("limits",)} else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return found + [place for key, each in inner for place in _places(each, (*path, key))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_good_documents_have_no_problems() -> None:
    """A TrainJob with all that is used here, and the runtimes."""
    assert problems(FULL) == []
    assert problems(runtime("grpo-torch")) == []


@pytest.mark.parametrize("place", _places(FULL), ids=lambda place: ".".join(str(part) for part in place) or "root")
def test_an_unknown_field_is_found_wherever_it_is(place: tuple[Any, ...]) -> None:
    """At every depth, where the models drop it silently; pruning leaves the document as it was without it."""
    document = copy.deepcopy(FULL)
    _at(document, place)["volumeMuonts"] = []
    found = problems(document)
    assert [problem.kind for problem in found] == ["unknown"]
    assert found[0].path.endswith("volumeMuonts")
    assert without(document, found) == FULL
    model = TrainerV1alpha1TrainJob.from_dict(document)
    assert model is not None
    assert "volumeMuonts" not in str(model.to_dict())


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (train_job(trainer={"numNodes": True}), "spec.trainer.numNodes: .*type integer"),
        (train_job(trainer={"env": {}}), "spec.trainer.env: .*type array"),
        (train_job(trainer=[]), "spec.trainer: .*type object"),
        (train_job(suspend="no"), "spec.suspend: .*type boolean"),
        (train_job(runtimeRef={}), "spec.runtimeRef.name: Required value"),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {}}, "spec.containers: Required"),
        ({"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": 1}}, "data.a: "),
        ({"apiVersion": "batch/v1", "kind": "Job", "spec": {"templat": {}}}, 'unknown field "spec.templat"'),
    ],
)
def test_mistakes_are_named_by_path(document: dict[str, Any], said: str) -> None:
    """Types and required fields, of custom and of core kinds."""
    assert any(re.search(said, str(problem)) for problem in problems(document)), problems(document)


def test_a_kind_without_a_schema_is_no_kind_without_mistakes() -> None:
    """Nobody is told that a document is good that was never looked at."""
    with pytest.raises(KeyError, match=r"no schema of example\.com/v1 Thing"):
        problems({"apiVersion": "example.com/v1", "kind": "Thing"})


@needs_upstream
def test_the_server_of_the_tests_knows_what_is_new_in_the_newer_release() -> None:
    """It refuses exactly those fields of a training job, as the older release does."""
    older, newer = (fields(release, "TrainJob", "v1alpha1") for release in ("trainer-2.2.0", "trainer-2.3.0"))
    assert newer - older == NEW_IN_2_3
    assert older - newer == set()
