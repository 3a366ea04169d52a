"""What the API server refuses of an object by its schema: fields without a schema, wrong types, broken limits.

Core kinds have Kubernetes' own schemas (kubernetes-validate); those of Trainer and JobSet come from the models of
`kubeflow_trainer_api`, with the limits and without the fields that Trainer 2.2 does not have. Metadata is checked by
one schema for all kinds. Rules over several fields are in `admission`.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import jsonschema
import referencing
from kubernetes_validate.utils import schema_contents

KUBERNETES = "1.34.0"
Json = dict[str, Any]

_MODELS = {
    "TrainJob": "trainer_v1alpha1_train_job:TrainerV1alpha1TrainJob",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime:TrainerV1alpha1TrainingRuntime",
    "JobSet": "jobset_v1alpha2_job_set:JobsetV1alpha2JobSet",
}
LIMITS: dict[tuple[str, str], Json] = {
    ("TrainerV1alpha1TrainJobSpec", "activeDeadlineSeconds"): {"minimum": 1},
    ("TrainerV1alpha1TrainJobSpec", "managedBy"): {
        "enum": ["trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"]
    },
    ("TrainerV1alpha1TrainJobSpec", "runtimePatches"): {"maxItems": 16},
    ("TrainerV1alpha1Trainer", "env"): {"maxItems": 128},
    ("TrainerV1alpha1Trainer", "command"): {"maxItems": 128},
    ("TrainerV1alpha1Trainer", "args"): {"maxItems": 128},
    ("TrainerV1alpha1Trainer", "image"): {"maxLength": 500},
}
"""Limits in the definition of a TrainJob that its models do not know, by model and field."""
NEW_IN_2_3 = {("TrainerV1alpha1PodSpecPatch", "terminationGracePeriodSeconds")}
"""Fields of a TrainJob that Trainer 2.2, the oldest that is supported, does not know."""

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEYS = {"pattern": rf"^({_LABEL}(\.{_LABEL})*/)?{_QUALIFIED}$"}
_STRING, _REQUIRED = {"type": "string"}, {"type": "string", "minLength": 1}
_REFERENCE = dict.fromkeys(("apiVersion", "kind", "name", "uid"), _REQUIRED)
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{_SUBDOMAIN}$"},
        "namespace": _STRING,
        "labels": {"propertyNames": _KEYS, "additionalProperties": {**_STRING, "pattern": f"^({_QUALIFIED})?$"}},
        "annotations": {"propertyNames": _KEYS, "additionalProperties": _STRING},
        "ownerReferences": {
            "items": {
                "properties": {**_REFERENCE, "controller": {}, "blockOwnerDeletion": {}},
                "required": list(_REFERENCE),
                "additionalProperties": False,
            }
        },
        **dict.fromkeys(("finalizers", "uid", "resourceVersion", "generation", "creationTimestamp"), True),
        **dict.fromkeys(("deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"), True),
    },
    "required": ["name"],
    "additionalProperties": False,
}
_QUANTITY = r"^[+-]?(\d+|\d+\.\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
_UNIONS = {
    "IoK8sApimachineryPkgApiResourceQuantity": {"type": ["string", "number"], "pattern": _QUANTITY},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["string", "integer"]},
}


class Problem(NamedTuple):
    """One thing that is wrong with a document."""

    path: str
    """Such as `spec.trainer.env[0].value`."""
    message: str
    is_unknown: bool
    """Whether it is a field without a schema."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def problems(document: Json) -> list[Problem]:
    """Return what is wrong with a document; empty for a valid one.

    Raises:
        KeyError: There is no schema for the document's kind.
    """
    errors = _validator(document["apiVersion"], document["kind"]).iter_errors(document)
    return list(dict.fromkeys(problem for error in errors for problem in _problems(error)))


def _problems(error: Any) -> Iterator[Problem]:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)[1:]
    prefix = f"{path}." if path else ""
    if error.validator == "additionalProperties":
        for key in sorted(set(error.instance) - set(error.schema.get("properties", {}))):
            yield Problem(prefix + key, f'unknown field "{prefix}{key}"', is_unknown=True)
    elif error.validator == "required":
        for key in set(error.validator_value) - set(error.instance):
            yield Problem(prefix + key, "Required value", is_unknown=False)
    else:
        value = json.dumps(error.instance)[:100]
        expected = f"{path} in body must be of type {error.validator_value}" if error.validator == "type" else ""
        yield Problem(path, f"Invalid value: {value}: {expected or error.message}", is_unknown=False)


@lru_cache
def _validator(api_version: str, kind: str) -> Any:
    schema, registry = _core_schema(api_version, kind) if kind not in _MODELS else (_model_schema(kind), None)
    schema = {**schema, "properties": {**schema["properties"], "metadata": _METADATA}}
    return jsonschema.Draft202012Validator(schema, registry=registry or referencing.Registry())


def _core_schema(api_version: str, kind: str) -> tuple[Json, Any]:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    folder = f"kubernetes-json-schema/v{KUBERNETES}-local-strict"
    try:
        schema = schema_contents(f"{folder}/{kind.lower()}-{group}.json", KUBERNETES)
    except FileNotFoundError:
        raise KeyError(f"no schema of {api_version} {kind}") from None
    resources = (schema, _definitions(folder))
    registry: Any = referencing.Registry()
    for resource in resources:
        registry = referencing.Resource.from_contents(resource) @ registry
    return schema, registry


@lru_cache
def _definitions(folder: str) -> Json:
    contents: Json = schema_contents(f"{folder}/_definitions.json", KUBERNETES)
    return contents


def _model_schema(kind: str) -> Json:
    module, _, name = _MODELS[kind].partition(":")
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    schema: Json = model.model_json_schema(by_alias=True)
    for name, definition in schema["$defs"].items():
        fields = definition.get("properties", {})
        for field in list(fields):
            fields[field] = {**fields[field], **LIMITS.get((name, field), {})}
            if (name, field) in NEW_IN_2_3:
                del fields[field]
    schema["$defs"] |= _UNIONS
    strict: Json = _strict(schema)
    return strict


def _strict(schema: Any) -> Any:
    """Return a schema of pydantic as that of a server: without nulls, and with no field that is not named."""
    made = {key: value for key, value in schema.items() if key not in ("default", "title", "description")}
    if "anyOf" in made:
        (either,) = [each for each in made.pop("anyOf") if each != {"type": "null"}]
        made = {**either, **made}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _strict(made[key])
    for key in ("properties", "$defs"):
        if key in made:
            made[key] = {name: _strict(inner) for name, inner in made[key].items()}
    return {"additionalProperties": False, **made} if "properties" in made else made
