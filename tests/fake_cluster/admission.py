"""What the API server and the webhooks of Trainer, JobSet and Kueue refuse of an object, or set in it."""

import re
from collections.abc import Iterator
from functools import lru_cache

from tests.fake_cluster import schemas
from tests.fake_cluster.http import ApiError, Json
from tests.fake_cluster.kinds import TRAIN_JOBS, TRAINING_RUNTIMES, Kind
from tests.fake_cluster.store import Store

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_CONTAINERS = {"trainer": "node"} | {name: name for name in ("model-initializer", "dataset-initializer")}
"""The container that a runtime needs for each step."""
_RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/_.~%!$&'()*+,;=:-]+")


def admit(store: Store, kind: Kind, document: Json, before: Json | None = None) -> None:
    """Check a new object, or the new state of one, and fill in its defaults.

    A field without a schema is always refused, as with `fieldValidation: Strict`.

    Raises:
        ApiError: 400 for another kind than the path's or an unknown field, 422 for what a definition forbids, 403 for
            what a webhook denies.
    """
    for key, expected in (("apiVersion", kind.api_version), ("kind", kind.name)):
        if document.setdefault(key, expected) != expected:
            raise ApiError(400, f"the {key} in the data ({document[key]}) does not match the expected {expected}")
    _check_schema(kind, document)
    if kind == TRAINING_RUNTIMES:
        _deny(kind, _runtime_problems(document["spec"]["template"]["spec"].get("replicatedJobs", [])))
    if kind == TRAIN_JOBS:
        spec = document["spec"]
        spec["runtimeRef"] = {"apiGroup": _GROUP, "kind": "ClusterTrainingRuntime", **spec["runtimeRef"]}
        document["spec"] = {"suspend": False, "managedBy": f"{_GROUP}/trainjob-controller", **spec}
        if before is None and QUEUE_LABEL in document["metadata"].get("labels", {}):
            document["spec"]["suspend"] = True
        _refuse_invalid(kind, document, _train_job_problems(document, before))
        _deny(kind, _webhook_problems(store, document))


_GROUP = TRAIN_JOBS.group


def runtime_of(store: Store, train_job: Json) -> Json | None:
    """Return the runtime that a TrainJob refers to; there are none for the whole cluster."""
    reference, namespace = train_job["spec"]["runtimeRef"], train_job["metadata"]["namespace"]
    return (
        store.get(TRAINING_RUNTIMES, namespace, reference["name"]) if reference["kind"] == "TrainingRuntime" else None
    )


def _check_schema(kind: Kind, document: Json) -> None:
    problems = schemas.problems(document) if _has_schema(kind) else []
    unknown = [problem.message for problem in problems if problem.is_unknown]
    if unknown:
        subject = f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}'
        raise ApiError(400, f"{subject}: strict decoding error: {', '.join(unknown)}")
    _refuse_invalid(kind, document, map(str, problems))


@lru_cache
def _has_schema(kind: Kind) -> bool:
    try:
        schemas.problems({"apiVersion": kind.api_version, "kind": kind.name})
    except KeyError:
        return False
    return True


def _refuse_invalid(kind: Kind, document: Json, problems: Iterator[str]) -> None:
    causes = list(problems)
    if causes:
        name = document["metadata"].get("name", "")
        message = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
        listed = [{"message": cause.partition(": ")[2], "field": cause.partition(": ")[0]} for cause in causes]
        details = {"name": name, "causes": listed}
        raise ApiError(422, f'{kind.qualified} "{name}" is invalid: {message}', details=details)


def _deny(kind: Kind, problems: Iterator[str]) -> None:
    denied = list(problems)
    if denied:
        webhook = f"validator.{kind.name.lower()}.trainer.kubeflow.org"
        raise ApiError(403, f'admission webhook "{webhook}" denied the request: {", ".join(denied)}')


def _runtime_problems(jobs: list[Json]) -> Iterator[str]:
    earlier: set[str] = set()
    for number, job in enumerate(jobs):
        path = f"spec.template.spec.replicatedJobs[{number}]"
        step = job["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR_LABEL)
        pod = job["template"]["spec"]["template"]["spec"]
        if step in _CONTAINERS:
            if job.get("replicas", 1) != 1:
                yield f"{path}.replicas: Invalid value: {job['replicas']}: always must be 1"
            if _CONTAINERS[step] not in {each["name"] for each in pod["containers"]}:
                yield f"{path}...containers: must contain the required container for the ancestor: {step}"
        if pod.get("priorityClassName") and step != "trainer":
            yield f"{path}...priorityClassName: must not be set on this replicatedJob"
        for needed in job.get("dependsOn", []):
            if needed["name"] not in earlier:
                yield f"{path}.dependsOn: {needed['name']} must be a replicatedJob before this one"
        earlier.add(job["name"])


def _train_job_problems(document: Json, before: Json | None) -> Iterator[str]:
    """What the definition forbids beyond its schema; of the spec only `suspend` can be changed here."""
    name, spec = document["metadata"]["name"], document["spec"]
    if not _NAME.fullmatch(name):
        yield '<nil>: Invalid value: "object": metadata.name must match RFC 1035 DNS label format'
    lists = {"spec.runtimePatches": ("manager", spec), "spec.trainer.env": ("name", spec.get("trainer", {}))}
    for path, (key, parent) in lists.items():
        values = [item[key] for item in parent.get(path.rpartition(".")[2], [])]
        for value in {value for value in values if values.count(value) > 1}:
            yield f'{path}: Duplicate value: {{"{key}":"{value}"}}'
    for field in spec if before else ():
        if before and field != "suspend" and spec[field] != before["spec"].get(field):
            yield f"spec.{field}: Invalid value: field is immutable"


def _webhook_problems(store: Store, document: Json) -> Iterator[str]:
    spec, runtime = document["spec"], runtime_of(store, document)
    if runtime is None:
        reference = spec["runtimeRef"]
        yield (
            f'spec.runtimeRef: Invalid value: {reference["kind"]}.{_GROUP} "{reference["name"]}" not found: specified '
            "runtime must be created before the TrainJob is created"
        )
        return
    reserved = sorted({each["name"] for each in spec.get("trainer", {}).get("env", [])} & _RESERVED)
    if "torch" in runtime["spec"].get("mlPolicy", {}) and reserved:
        yield f"spec.trainer.env: Invalid value: must not have reserved envs, invalid envs configured: {reserved}"
    pods = {job["name"]: job["template"]["spec"]["template"] for job in _replicated_jobs(runtime["spec"])}
    for number, patch in enumerate(spec.get("runtimePatches", [])):
        path = f"spec.runtimePatches[{number}]"
        if not _MANAGER.fullmatch(patch["manager"]):
            yield f'{path}.manager: Invalid value: "{patch["manager"]}": must be a domain-prefixed path'
        for job in _replicated_jobs(patch.get("trainingRuntimeSpec", {})):
            if job["name"] not in pods:
                yield f"{path}: Invalid value: must not have replicatedJob {job['name']} that the runtime does not have"
            else:
                pod = job.get("template", {}).get("spec", {}).get("template", {}).get("spec", {})
                yield from _container_problems(path, pod, pods[job["name"]]["spec"])


def _replicated_jobs(runtime_spec: Json) -> list[Json]:
    jobs: list[Json] = runtime_spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
    return jobs


def _container_problems(path: str, patch: Json, pod: Json) -> Iterator[str]:
    for field in ("initContainers", "containers"):
        known = {each["name"] for each in pod.get(field, [])}
        for container in patch.get(field, []):
            if container["name"] not in known:
                yield f"{path}: Invalid value: must not have {field[:-1]} that doesn't exist in the runtime job"
            elif container.get("env") and container["name"] in _CONTAINERS.values():
                yield f"{path}: Invalid value: must not have envs for the {', '.join(_CONTAINERS.values())} containers"
