"""What the API server and the webhooks of Trainer and Kueue refuse of a TrainJob, or set in it."""

from collections.abc import Iterable, Iterator

from tests.fake_cluster import schemas
from tests.fake_cluster.http import ApiError, Json
from tests.fake_cluster.kinds import TRAIN_JOBS, TRAINING_RUNTIMES
from tests.fake_cluster.kueue import QUEUE_LABEL
from tests.fake_cluster.store import Store

_GROUP = TRAIN_JOBS.group


def admit(store: Store, job: Json, before: Json | None = None) -> None:
    """Check a new TrainJob, or the new state of one, and fill in its defaults.

    A field without a schema is always refused, as with `fieldValidation: Strict`: ApiError 400, or 422 for what the
    definition forbids, 403 for what a webhook denies.
    """
    problems = schemas.problems(job)
    unknown = [problem for problem in problems if problem.startswith("unknown field")]
    _refuse(400, "TrainJob cannot be handled as a TrainJob: strict decoding error", unknown)
    _refuse(422, f'TrainJob "{job["metadata"].get("name", "")}" is invalid', problems)
    spec = job["spec"]
    spec["runtimeRef"] = {"apiGroup": _GROUP, "kind": "ClusterTrainingRuntime", **spec["runtimeRef"]}
    job["spec"] = {"suspend": False, "managedBy": f"{_GROUP}/trainjob-controller", **spec}
    if before is None and QUEUE_LABEL in job["metadata"].get("labels", {}):
        job["spec"]["suspend"] = True
    _refuse(422, f'TrainJob "{job["metadata"]["name"]}" is invalid', _changed(job, before) if before else ())
    missing = f"spec.runtimeRef: {spec['runtimeRef']['name']} not found: it must be created before the TrainJob"
    denied = [missing] if runtime_of(store, job) is None else []
    _refuse(403, f'admission webhook "validator.trainjob.{_GROUP}" denied the request', denied)


def runtime_of(store: Store, job: Json) -> Json | None:
    """Return the runtime that a TrainJob refers to; there are none for the whole cluster."""
    reference, namespace = job["spec"]["runtimeRef"], job["metadata"]["namespace"]
    in_namespace = reference["kind"] == "TrainingRuntime"
    return store.get(TRAINING_RUNTIMES, namespace, reference["name"]) if in_namespace else None


def _refuse(code: int, what: str, problems: Iterable[str]) -> None:
    why = ", ".join(problems)
    if why:
        raise ApiError(code, f"{what}: {why}")


def _changed(job: Json, before: Json) -> Iterator[str]:
    """Of the spec only `suspend` can be changed here."""
    for field, value in job["spec"].items():
        if field != "suspend" and value != before["spec"].get(field):
            yield f"spec.{field}: Invalid value: field is immutable"
