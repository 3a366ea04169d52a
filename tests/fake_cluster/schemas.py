"""What an API server refuses of an object by the schema of its kind: fields without a schema, wrong types, limits.

Core kinds have Kubernetes' own schemas (kubernetes-validate). Those of Trainer come from the models of
`kubeflow_trainer_api`, without the fields that Trainer 2.2, the oldest that is supported, does not have. What released
versions ship themselves lies beside the checkout, if at all. Rules over several fields are in `admission`.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml
from kubernetes_validate.utils import schema_contents

KUBERNETES = "1.34.0"
Json = dict[str, Any]

UPSTREAM = Path("../shared/upstream")
needs_upstream = pytest.mark.skipif(not UPSTREAM.is_dir(), reason=f"{UPSTREAM} with the definitions is not here")
_MODELS = {
    "TrainJob": "trainer_v1alpha1_train_job:TrainerV1alpha1TrainJob",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime:TrainerV1alpha1TrainingRuntime",
}
_NEW_IN_2_3 = ("TrainerV1alpha1PodSpecPatch", "terminationGracePeriodSeconds")

_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_METADATA = {
    "$ref": "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
    "properties": {"labels": {"additionalProperties": {"type": "string", "pattern": f"^({_QUALIFIED})?$"}}},
    "required": ["name"],
}
_QUANTITY = r"^[+-]?(\d+|\d+\.\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
_UNIONS = {
    "IoK8sApimachineryPkgApiResourceQuantity": {"type": ["string", "number"], "pattern": _QUANTITY},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["string", "integer"]},
}


def problems(document: Json, kubernetes: str = KUBERNETES) -> list[str]:
    """Return what is wrong with a document in a version of Kubernetes, with paths; KeyError without a schema."""
    errors = _validator(document["apiVersion"], document["kind"], kubernetes).iter_errors(document)
    return list(dict.fromkeys(problem for error in errors for problem in _problems(error)))


def refused(release: str, document: Json) -> list[str]:
    """Return what the definition in a release such as `trainer-2.2.0` refuses of an object, strictly."""
    errors = _definition(release, document["kind"], document["apiVersion"].rpartition("/")[2]).iter_errors(document)
    return [problem for error in errors for problem in _problems(error)]


def _problems(error: Any) -> Iterator[str]:
    path = error.json_path.removeprefix("$").removeprefix(".")
    if error.validator != "additionalProperties":
        yield f"{path}: Invalid value: {error.message[:300]}"
        return
    for key in sorted(set(error.instance) - set(error.schema.get("properties", {}))):
        yield f'unknown field "{path}.{key}"'


@lru_cache
def _validator(api_version: str, kind: str, kubernetes: str) -> Any:
    folder = f"kubernetes-json-schema/v{kubernetes}-local-strict"
    definitions = referencing.Resource.from_contents(schema_contents(f"{folder}/_definitions.json", kubernetes))
    registry: Any = definitions @ referencing.Registry()
    if kind in _MODELS:
        schema = _model_schema(kind)
    else:
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
        try:
            schema = schema_contents(f"{folder}/{kind.lower()}-{group}.json", kubernetes)
        except FileNotFoundError:
            raise KeyError(f"no schema of {api_version} {kind}") from None
    schema = {**schema, "properties": {**schema["properties"], "metadata": _METADATA}}
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _model_schema(kind: str) -> Json:
    module, _, name = _MODELS[kind].partition(":")
    schema = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name).model_json_schema(by_alias=True)
    schema["$defs"].get(_NEW_IN_2_3[0], {"properties": {}})["properties"].pop(_NEW_IN_2_3[1], None)
    schema["$defs"] |= _UNIONS
    strict: Json = _strict(schema)
    return strict


@lru_cache
def _definition(release: str, kind: str, version: str) -> Any:
    for path in (UPSTREAM / release).glob("*.yaml"):
        definition = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if definition["spec"]["names"]["kind"] == kind:
            (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
            schema = _strict(found["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            return jsonschema.Draft202012Validator(schema)
    raise KeyError(f"{release} has no {kind}")


def _strict(schema: Any) -> Any:
    """Return a schema as an API server applies it: without nulls, and a field that is not named is an error."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: value for key, value in schema.items() if key not in ("default", "title", "description")}
    if {"type": "null"} in made.get("anyOf", []):
        (either,) = [each for each in made.pop("anyOf") if each != {"type": "null"}]
        made = {**either, **made}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _strict(made[key])
    for key in ("properties", "$defs"):
        if key in made:
            made[key] = {name: _strict(inner) for name, inner in made[key].items()}
    is_closed = "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields")
    return {"additionalProperties": False, **made} if is_closed else made
