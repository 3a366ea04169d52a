"""What the API server and the webhooks of Trainer and Kueue refuse of a TrainJob, or set in it."""

import copy
import re
from collections.abc import Iterable, Iterator

from tests.fake_cluster import schemas
from tests.fake_cluster.http import ApiError, Json
from tests.fake_cluster.kinds import TRAIN_JOBS, TRAINING_RUNTIMES
from tests.fake_cluster.kueue import QUEUE_LABEL
from tests.fake_cluster.store import Store

_GROUP = TRAIN_JOBS.group
_RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/_.~%!$&'()*+,;=:-]+")


def admit(store: Store, job: Json, before: Json | None = None) -> None:
    """Check a new TrainJob, or the new state of one, and fill in its defaults.

    A field without a schema is always refused, as with `fieldValidation: Strict`.

    Raises:
        ApiError: 400 for another kind than the path's or an unknown field, 422 for what the definition forbids, 403 for
            what a webhook denies.
    """
    for key, expected in (("apiVersion", TRAIN_JOBS.api_version), ("kind", TRAIN_JOBS.name)):
        if job.setdefault(key, expected) != expected:
            raise ApiError(400, f"the {key} in the data ({job[key]}) does not match the expected {expected}")
    problems = schemas.problems(job)
    unknown = [problem for problem in problems if problem.startswith("unknown field")]
    _refuse(400, "TrainJob cannot be handled as a TrainJob: strict decoding error", unknown)
    _refuse(422, f'TrainJob "{job["metadata"].get("name", "")}" is invalid', problems)
    spec = job["spec"]
    spec["runtimeRef"] = {"apiGroup": _GROUP, "kind": "ClusterTrainingRuntime", **spec["runtimeRef"]}
    job["spec"] = {"suspend": False, "managedBy": f"{_GROUP}/trainjob-controller", **spec}
    if before is None and QUEUE_LABEL in job["metadata"].get("labels", {}):
        job["spec"]["suspend"] = True
    _refuse(422, f'TrainJob "{job["metadata"]["name"]}" is invalid', _invalid(job, before))
    _refuse(403, f'admission webhook "validator.trainjob.{_GROUP}" denied the request', _denied(store, job))


def runtime_of(store: Store, job: Json) -> Json | None:
    """Return the runtime that a TrainJob refers to; there are none for the whole cluster."""
    reference, namespace = job["spec"]["runtimeRef"], job["metadata"]["namespace"]
    in_namespace = reference["kind"] == "TrainingRuntime"
    return store.get(TRAINING_RUNTIMES, namespace, reference["name"]) if in_namespace else None


def _refuse(code: int, what: str, problems: Iterable[str]) -> None:
    why = ", ".join(problems)
    if why:
        raise ApiError(code, f"{what}: {why}")


def _invalid(job: Json, before: Json | None) -> Iterator[str]:
    """What the definition forbids beyond its schema; of the spec only `suspend` can be changed here."""
    spec = job["spec"]
    if not _NAME.fullmatch(job["metadata"]["name"]):
        yield '<nil>: Invalid value: "object": metadata.name must match RFC 1035 DNS label format'
    for key, items in (("manager", spec.get("runtimePatches", [])), ("name", spec.get("trainer", {}).get("env", []))):
        values = [item[key] for item in items]
        yield from (f'Duplicate value: {{"{key}":"{value}"}}' for value in set(values) if values.count(value) > 1)
    for field in spec if before else ():
        if before and field != "suspend" and spec[field] != before["spec"].get(field):
            yield f"spec.{field}: Invalid value: field is immutable"


def _denied(store: Store, job: Json) -> Iterator[str]:
    spec, runtime = job["spec"], runtime_of(store, job)
    if runtime is None:
        yield f"spec.runtimeRef: {spec['runtimeRef']['name']} not found: it must be created before the TrainJob"
        return
    reserved = sorted({each["name"] for each in spec.get("trainer", {}).get("env", [])} & _RESERVED)
    if reserved:
        yield f"spec.trainer.env: Invalid value: must not have reserved envs, invalid envs configured: {reserved}"
    pods = {each["name"]: _pod(each) for each in _replicated_jobs(runtime["spec"])}
    for patch in spec.get("runtimePatches", []):
        if not _MANAGER.fullmatch(patch["manager"]):
            yield f'Invalid value: manager "{patch["manager"]}": must be a domain-prefixed path'
        for each in _replicated_jobs(patch.get("trainingRuntimeSpec", {})):
            if each["name"] not in pods:
                yield f"Invalid value: must not have replicatedJob {each['name']} that the runtime does not have"
            else:
                yield from _wrong_containers(_pod(each), pods[each["name"]])


def immutable_in_job_set(before: Json, after: Json) -> list[str]:
    """Return what JobSet's webhook refuses of a change of its spec.

    Of a JobSet that is suspended, or is being suspended, where its pods may run and their labels can change.
    """
    can_change = before["spec"]["suspend"] or after["spec"]["suspend"]

    def fixed(job_set: Json) -> list[Json]:
        jobs: list[Json] = copy.deepcopy(job_set["spec"]["replicatedJobs"])
        for template in (job["template"]["spec"]["template"] for job in jobs if can_change):
            template.pop("metadata", None)
            for key in ("nodeSelector", "tolerations", "schedulingGates"):
                template["spec"].pop(key, None)
        return jobs

    is_same = fixed(before) == fixed(after)
    return [] if is_same else ["spec.replicatedJobs: Invalid value: field is immutable"]


def _wrong_containers(patch: Json, pod: Json) -> Iterator[str]:
    known = {container["name"] for container in pod.get("containers", [])}
    for container in patch.get("containers", []):
        if container["name"] not in known:
            yield "Invalid value: must not have container that doesn't exist in the runtime job"
        elif container["name"] == "node" and container.get("env"):
            yield "Invalid value: must not have envs for the node container"


def _replicated_jobs(runtime_spec: Json) -> list[Json]:
    jobs: list[Json] = runtime_spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
    return jobs


def _pod(job: Json) -> Json:
    pod: Json = job.get("template", {}).get("spec", {}).get("template", {}).get("spec", {})
    return pod
