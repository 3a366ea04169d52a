"""What happens to an object between the request and the store: schema, metadata, defaults, the rules of its kind."""

from dataclasses import dataclass, field
from functools import lru_cache

from tests.fake_cluster import runtime_rules, schemas, train_job_rules
from tests.fake_cluster.errors import ApiError, Json, invalid
from tests.fake_cluster.kinds import CLUSTER_TRAINING_RUNTIMES, LEASES, TRAIN_JOBS, TRAINING_RUNTIMES, Kind
from tests.fake_cluster.names import metadata_problems
from tests.fake_cluster.store import Store

_METADATA = {
    "name",
    "namespace",
    "generateName",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
}
_REFERENCE = {"apiVersion", "kind", "name", "uid", "controller", "blockOwnerDeletion"}
_STATUS_SET_BY_SERVER = ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields", "selfLink")


@dataclass
class Admitted:
    """What is kept of an object, and what the client is warned of."""

    document: Json
    warnings: list[str] = field(default_factory=list)


def decode(kind: Kind, document: Json, validation: str) -> Admitted:
    """Hold an object against its schema: what has no field is refused or dropped, as the request wants.

    `validation` is the query parameter `fieldValidation`: Strict, Warn (also if empty) or Ignore.

    Raises:
        ApiError: 400 for unknown fields under Strict, and for another kind than the path's; 422 for wrong types.
    """
    _check_kind(kind, document)
    found = [*_metadata_fields(document)]
    if _has_schema(kind):
        found += [each for each in schemas.problems(document) if not each.path.startswith("metadata.")]
    if kind == TRAIN_JOBS:
        found += train_job_rules.unknown_in_2_2(document)
    unknown = [problem for problem in found if problem.kind == "unknown"]
    wrong = [problem for problem in found if problem.kind != "unknown"]
    if unknown and validation == "Strict":
        said = ", ".join(problem.message for problem in unknown)
        subject = f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}'
        raise ApiError(400, f"{subject}: strict decoding error: {said}")
    if wrong:
        raise invalid(kind.qualified, document["metadata"].get("name", ""), [str(problem) for problem in wrong])
    warnings = [problem.message for problem in unknown] if validation != "Ignore" else []
    return Admitted(schemas.without(document, unknown), warnings)


def admit(store: Store, kind: Kind, document: Json, before: Json | None) -> None:
    """Fill in defaults and apply the rules of the kind; changes the document.

    Raises:
        ApiError: Some rule is broken.
    """
    causes = list(metadata_problems(kind, document["metadata"]))
    if causes:
        raise invalid(kind.qualified, document["metadata"].get("name", ""), causes)
    if kind in (TRAINING_RUNTIMES, CLUSTER_TRAINING_RUNTIMES):
        runtime_rules.check(document)
    if kind == TRAIN_JOBS:
        if "spec" not in document:
            raise invalid(kind.qualified, document["metadata"]["name"], ["spec.runtimeRef: Required value"])
        train_job_rules.fill_in(store, document)
        if before is None and train_job_rules.QUEUE_LABEL in document["metadata"].get("labels", {}):
            document["spec"]["suspend"] = True
        train_job_rules.check(store, document, before)


def keep_server_fields(document: Json, before: Json) -> None:
    """Put back what a write cannot change."""
    metadata, old = document["metadata"], before["metadata"]
    for name in (*_STATUS_SET_BY_SERVER, "deletionTimestamp", "namespace", "name"):
        if name in old:
            metadata[name] = old[name]
        else:
            metadata.pop(name, None)


@lru_cache
def _has_schema(kind: Kind) -> bool:
    # A lease's times have microseconds, which its schema would check as a format: nothing is lost without it.
    return kind != LEASES and schemas.has_schema(kind.api_version, kind.name)


def _check_kind(kind: Kind, document: Json) -> None:
    if not isinstance(document, dict) or not isinstance(document.get("metadata", {}), dict):
        raise ApiError(400, "the object provided is unrecognized (must be of type Object)")
    version, name = document.setdefault("apiVersion", kind.api_version), document.setdefault("kind", kind.name)
    if version != kind.api_version:
        raise ApiError(
            400,
            f"the API version in the data ({version}) does not match the expected API version ({kind.api_version})",
        )
    if name != kind.name:
        raise ApiError(400, f"the kind in the data ({name}) does not match the expected kind ({kind.name})")
    document.setdefault("metadata", {})


def _metadata_fields(document: Json) -> list[schemas.Problem]:
    metadata = document["metadata"]
    paths = [f"metadata.{key}" for key in metadata if key not in _METADATA]
    for number, owner in enumerate(metadata.get("ownerReferences") or []):
        paths += [f"metadata.ownerReferences[{number}].{key}" for key in owner if key not in _REFERENCE]
    return [schemas.Problem(path, "unknown", f'unknown field "{path}"') for path in paths]
