"""What is wrong with a Kubernetes object, field by field: core kinds, JobSet and Kubeflow Trainer's kinds.

Core kinds are held against Kubernetes' own schemas, the others against the models of `kubeflow_trainer_api`. Those
drop a key they do not know without a word, which is how a typing error becomes a job without its volumes; here each
key that has no field is named. Both know types, and neither knows rules over several fields.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import jsonschema
import referencing
from kubernetes_validate.utils import schema_contents
from pydantic import BaseModel

KUBERNETES = "1.34.0"
Json = dict[str, Any]

_MODELS = {
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainer_v1alpha1_train_job:TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): (
        "trainer_v1alpha1_training_runtime:TrainerV1alpha1TrainingRuntime"
    ),
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): (
        "trainer_v1alpha1_cluster_training_runtime:TrainerV1alpha1ClusterTrainingRuntime"
    ),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset_v1alpha2_job_set:JobsetV1alpha2JobSet",
}
_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("string", (str,)),
    bytes: ("string", (str,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    bool: ("boolean", (bool,)),
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a document."""

    path: str
    """Such as `spec.trainer.env[0].value`."""
    kind: str
    """`unknown`, `missing`, `type` or `value`."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def problems(document: Json) -> list[Problem]:
    """What is wrong with a document; empty for a good one.

    Raises:
        KeyError: There is no schema of the document's kind.
    """
    named = _MODELS.get((document["apiVersion"], document["kind"]))
    if named is None:
        return list(_core_problems(document))
    return list(_check_model(_model(named), document, ""))


def has_schema(api_version: str, kind: str) -> bool:
    """Whether documents of this kind can be checked."""
    try:
        return (api_version, kind) in _MODELS or _validator(api_version, kind) is not None
    except KeyError:
        return False


def without(document: Json, unknown: list[Problem]) -> Json:
    """A copy of a document without the fields found unknown: what a server that prunes keeps of it."""
    gone = {problem.path for problem in unknown}
    kept: Json = _pruned(document, "", gone)
    return kept


def _pruned(value: Any, path: str, gone: set[str]) -> Any:
    if isinstance(value, dict):
        inner = {key: _join(path, key) for key in value}
        return {key: _pruned(each, inner[key], gone) for key, each in value.items() if inner[key] not in gone}
    if isinstance(value, list):
        return [_pruned(each, f"{path}[{number}]", gone) for number, each in enumerate(value)]
    return value


@lru_cache
def _model(named: str) -> type[BaseModel]:
    module, _, name = named.partition(":")
    found: type[BaseModel] = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    return found


def _check_model(model: type[BaseModel], value: Any, path: str) -> Iterator[Problem]:
    if "actual_instance" in model.model_fields:
        yield from _check_either(model, value, path)
        return
    if not isinstance(value, dict):
        yield _wrong_type("object", value, path)
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key in value:
        if key not in fields:
            yield Problem(_join(path, key), "unknown", f'unknown field "{_join(path, key)}"')
    for key, field in fields.items():
        if field.is_required() and value.get(key) is None:
            yield Problem(_join(path, key), "missing", "Required value")
        # A null is as good as no field at all.
        elif value.get(key) is not None:
            yield from _check(field.annotation, value[key], _join(path, key))


def _check(annotation: Any, value: Any, path: str) -> Iterator[Problem]:
    annotation = _bare(annotation)
    origin = get_origin(annotation)
    if origin is list:
        yield from _check_list(get_args(annotation)[0], value, path)
    elif origin is dict:
        yield from _check_map(get_args(annotation)[1], value, path)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _check_model(annotation, value, path)
    elif annotation in _TYPES:
        name, accepted = _TYPES[annotation]
        if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
            yield _wrong_type(name, value, path)
    # What is left is a date or anything at all.


def _check_list(inner: Any, value: Any, path: str) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield _wrong_type("array", value, path)
        return
    for number, each in enumerate(value):
        yield from _check(inner, each, f"{path}[{number}]")


def _check_map(inner: Any, value: Any, path: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield _wrong_type("object", value, path)
        return
    for key, each in value.items():
        yield from _check(inner, each, _join(path, key))


def _check_either(model: type[BaseModel], value: Any, path: str) -> Iterator[Problem]:
    """Quantities and ports, which are numbers or strings."""
    is_quantity = model.__name__.endswith("Quantity")
    if isinstance(value, bool) or not isinstance(value, (str, int, float) if is_quantity else (str, int)):
        yield _wrong_type("integer or string", value, path)
    elif is_quantity and not _QUANTITY.fullmatch(str(value)):
        yield Problem(path, "value", f'Invalid value: "{value}": quantities must match the regular expression')


def _bare(annotation: Any) -> Any:
    """A type without Optional and Annotated around it."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, UnionType):
            annotation = next(each for each in get_args(annotation) if each is not type(None))
        else:
            return annotation


def _wrong_type(expected: str, value: Any, path: str) -> Problem:
    found = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    got = found.get(type(value), "null")
    return Problem(path, "type", f'Invalid value: "{got}": {path} in body must be of type {expected}: "{got}"')


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _core_problems(document: Json) -> Iterator[Problem]:
    for error in _validator(document["apiVersion"], document["kind"]).iter_errors(document):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)[1:]
        if error.validator == "additionalProperties":
            for key in sorted(set(error.instance) - set(error.schema.get("properties", {}))):
                yield Problem(_join(path, key), "unknown", f'unknown field "{_join(path, key)}"')
        elif error.validator == "required":
            for key in sorted(set(error.validator_value) - set(error.instance)):
                yield Problem(_join(path, key), "missing", "Required value")
        else:
            yield Problem(path, "type", f"Invalid value: {error.message}")


@lru_cache
def _validator(api_version: str, kind: str) -> Any:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    folder = f"kubernetes-json-schema/v{KUBERNETES}-local-strict"
    try:
        schema = schema_contents(f"{folder}/{kind.lower()}-{group}.json", KUBERNETES)
    except FileNotFoundError:
        raise KeyError(f"no schema of {api_version} {kind}") from None
    registry: Any = referencing.Resource.from_contents(schema) @ _definitions(folder)
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


@lru_cache
def _definitions(folder: str) -> Any:
    resource = referencing.Resource.from_contents(schema_contents(f"{folder}/_definitions.json", KUBERNETES))
    return resource @ referencing.Registry()
