"""What Kubeflow Trainer 2.2 and 2.3 accept as a TrainJob, beyond the types of its fields.

The rules of the resource's definition answer 422 Invalid; those of the admission webhook 403 Forbidden, as webhooks
do.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.fake_cluster import schemas
from tests.fake_cluster.errors import ApiError, Json, invalid
from tests.fake_cluster.kinds import (
    CLUSTER_TRAINING_RUNTIMES,
    JOB_SETS,
    TRAIN_JOBS,
    TRAINING_RUNTIMES,
)
from tests.fake_cluster.store import Store, rfc3339

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
CONTROLLER = "trainer.kubeflow.org/trainjob-controller"
_MANAGERS = (CONTROLLER, "kueue.x-k8s.io/multikueue")
_RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
_OWN_ENV = {"node", "dataset-initializer", "model-initializer"}
"""Containers whose environment is set by the TrainJob's own fields, never by a patch."""
_IMMUTABLE = ("runtimeRef", "initializer", "trainer", "activeDeadlineSeconds", "managedBy")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/_.~%!$&'()*+,;=:-]+")
_FINISHED = ("Complete", "Failed")
_POD_SPEC = "spec.runtimePatches[].trainingRuntimeSpec.template.spec.replicatedJobs[].template.spec.template.spec"
NEW_IN_2_3 = {f"{_POD_SPEC}.terminationGracePeriodSeconds"}
"""Fields of a TrainJob that Trainer 2.2 does not know, `[]` for each item of a list."""


def unknown_in_2_2(document: Json) -> list[schemas.Problem]:
    """The fields of a TrainJob that only Trainer 2.3 knows: this server is a 2.2, the oldest that is supported."""
    paths = [path for path in _paths(document) if re.sub(r"\[\d+\]", "[]", path) in NEW_IN_2_3]
    return [schemas.Problem(path, "unknown", f'unknown field "{path}"') for path in paths]


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """The path of every field in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}".lstrip(".")
            yield from _paths(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, f"{path}[{number}]")


def fill_in(store: Store, document: Json) -> None:
    """Set what the definition's defaults, Trainer's webhook and Kueue's webhook set."""
    spec = document["spec"]
    spec.setdefault("suspend", False)
    spec.setdefault("managedBy", CONTROLLER)
    reference = spec["runtimeRef"]
    reference.setdefault("apiGroup", "trainer.kubeflow.org")
    reference.setdefault("kind", "ClusterTrainingRuntime")
    for patch in spec.get("runtimePatches", []):
        patch.setdefault("time", rfc3339(store.clock.now()))


def check(store: Store, document: Json, before: Json | None) -> None:
    """Refuse a TrainJob as the API server and the webhook would; `before` is what it was, if this is an update.

    Raises:
        ApiError: 422 for what the definition forbids, 403 for what the webhook denies.
    """
    name = document["metadata"]["name"]
    causes = list(_definition_problems(document["spec"], name))
    if before is not None:
        causes += list(_changed(document["spec"], before["spec"]))
    if causes:
        raise invalid(TRAIN_JOBS.qualified, name, causes)
    denied = list(_webhook_problems(store, document, before))
    if denied:
        said = denied[0] if len(denied) == 1 else f"[{', '.join(denied)}]"
        webhook = "validator.trainjob.trainer.kubeflow.org"
        raise ApiError(403, f'admission webhook "{webhook}" denied the request: {said}')


def _definition_problems(spec: Json, name: str) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield '<nil>: Invalid value: "object": metadata.name must match RFC 1035 DNS label format'
    if len(name) > 63:
        yield '<nil>: Invalid value: "object": metadata.name must be no more than 63 characters'
    deadline = spec.get("activeDeadlineSeconds", 1)
    if deadline < 1:
        yield (
            f"spec.activeDeadlineSeconds: Invalid value: {deadline}: spec.activeDeadlineSeconds in body should be "
            "greater than or equal to 1"
        )
    if spec.get("managedBy", CONTROLLER) not in _MANAGERS:
        yield f'spec.managedBy: Invalid value: "string": ManagedBy must be {_MANAGERS[0]} or {_MANAGERS[1]} if set'
    yield from _unique("spec.runtimePatches", "manager", spec.get("runtimePatches", []), 16)
    trainer = spec.get("trainer", {})
    yield from _unique("spec.trainer.env", "name", trainer.get("env", []), 128)
    for field in ("command", "args"):
        if len(trainer.get(field, [])) > 128:
            yield f"spec.trainer.{field}: Too many: {len(trainer[field])}: must have at most 128 items"
    if len(trainer.get("image", "")) > 500:
        yield "spec.trainer.image: Too long: may not be more than 500 bytes"


def _unique(path: str, key: str, items: list[Json], most: int) -> Iterator[str]:
    """Lists that are maps by a key: each value once."""
    if len(items) > most:
        yield f"{path}: Too many: {len(items)}: must have at most {most} items"
    seen: set[str] = set()
    for number, item in enumerate(items):
        if item[key] in seen:
            yield f'{path}[{number}]: Duplicate value: {{"{key}":"{item[key]}"}}'
        seen.add(item[key])


def _changed(spec: Json, before: Json) -> Iterator[str]:
    for field in _IMMUTABLE:
        if field in spec and field in before and spec[field] != before[field]:
            yield f'spec.{field}: Invalid value: "{_json_type(spec[field])}": field is immutable'


def _json_type(value: Any) -> str:
    return {dict: "object", int: "integer"}.get(type(value), "string")


def _webhook_problems(store: Store, document: Json, before: Json | None) -> Iterator[str]:
    spec = document["spec"]
    runtime = runtime_of(store, document)
    if runtime is None:
        reference = spec["runtimeRef"]
        yield (
            f'spec.runtimeRef: Invalid value: {{"name":"{reference["name"]}","apiGroup":"{reference["apiGroup"]}",'
            f'"kind":"{reference["kind"]}"}}: {reference["kind"]}.trainer.kubeflow.org "{reference["name"]}" not '
            "found: specified runtime must be created before the TrainJob is created"
        )
        return
    reserved = sorted({each["name"] for each in spec.get("trainer", {}).get("env", [])} & _RESERVED)
    if "torch" in runtime["spec"].get("mlPolicy", {}) and reserved:
        yield (
            "spec.trainer.env: Invalid value: must not have reserved envs, invalid envs configured: "
            f"[{' '.join(reserved)}]"
        )
    yield from _patch_problems(spec, containers_of(runtime))
    yield from _patch_changes(store, document, before)


def runtime_of(store: Store, document: Json) -> Json | None:
    """The runtime that a TrainJob refers to."""
    reference = document["spec"]["runtimeRef"]
    if reference["kind"] == "TrainingRuntime":
        return store.get(TRAINING_RUNTIMES, document["metadata"]["namespace"], reference["name"])
    return store.get(CLUSTER_TRAINING_RUNTIMES, "", reference["name"])


def containers_of(runtime: Json) -> dict[str, set[str]]:
    """The names of the containers in each of a runtime's replicated jobs."""
    found = {}
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        found[job["name"]] = {each["name"] for each in [*pod.get("initContainers", []), *pod["containers"]]}
    return found


def _patch_problems(spec: Json, containers: dict[str, set[str]]) -> Iterator[str]:
    for number, patch in enumerate(spec.get("runtimePatches", [])):
        path = f"spec.runtimePatches[{number}]"
        if not _MANAGER.fullmatch(patch["manager"]):
            yield (
                f'{path}.manager: Invalid value: "{patch["manager"]}": must be a domain-prefixed path (such as '
                '"acme.io/foo")'
            )
        template = patch.get("trainingRuntimeSpec", {}).get("template", {})
        for job in template.get("spec", {}).get("replicatedJobs", []):
            if job["name"] not in containers:
                yield f"{path}: Invalid value: must not have replicatedJob {job['name']} that the runtime does not have"
                continue
            pod = job.get("template", {}).get("spec", {}).get("template", {}).get("spec", {})
            yield from _container_problems(path, job["name"], pod, containers[job["name"]])


def _container_problems(path: str, job: str, pod: Json, known: set[str]) -> Iterator[str]:
    for field in ("initContainers", "containers"):
        for container in pod.get(field, []):
            if container["name"] not in known:
                yield f"{path}: Invalid value: must not have {field[:-1]} that doesn't exist in the runtime job {job}"
            elif container.get("env") and container["name"] in _OWN_ENV:
                yield (
                    f"{path}: Invalid value: must not have envs for the dataset-initializer, model-initializer, node "
                    "containers"
                )


def _patch_changes(store: Store, document: Json, before: Json | None) -> Iterator[str]:
    """Patches may change only while the job is suspended and none of its pods runs."""
    if before is None or document["spec"].get("runtimePatches") == before["spec"].get("runtimePatches"):
        return
    if not before["spec"].get("suspend") and not document["spec"].get("suspend"):
        yield ("spec.runtimePatches: Forbidden: RuntimePatches can only be modified when the TrainJob is suspended")
        return
    job_set = store.get(JOB_SETS, document["metadata"]["namespace"], document["metadata"]["name"]) or {}
    for job in job_set.get("status", {}).get("replicatedJobsStatus", []):
        if job["active"] > 0:
            yield (
                "spec.runtimePatches: Forbidden: RuntimePatches cannot be modified when the JobSet's ReplicatedJob "
                f"{job['name']} is still active"
            )


def is_finished(document: Json) -> bool:
    """Whether a TrainJob has ended, either way."""
    conditions = document.get("status", {}).get("conditions", [])
    return any(each["type"] in _FINISHED and each["status"] == "True" for each in conditions)
