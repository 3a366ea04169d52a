"""What released versions of Trainer, JobSet and Kueue refuse, by the definitions that they ship (../shared/upstream).

The API server validates an object against the definition of its kind: with `fieldValidation: Strict` a field that has
no schema is refused. Rules in CEL and those of webhooks are not part of this.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

Json = dict[str, Any]

UPSTREAM = Path("../shared/upstream")
needs_upstream = pytest.mark.skipif(not UPSTREAM.is_dir(), reason=f"{UPSTREAM} with the definitions is not here")
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required")


def refused(release: str, document: Json) -> list[str]:
    """Return what a release such as `trainer-2.2.0` refuses of an object, each with its path; empty for a good one."""
    _, _, version = document["apiVersion"].rpartition("/")
    errors = jsonschema.Draft202012Validator(_schema(release, document["kind"], version)).iter_errors(document)
    return [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]


def fields(release: str, kind: str, version: str) -> set[str]:
    """Return the path of every field that a release has for a kind, `[]` for each item of a list."""
    return _fields(_definition(release, kind, version), "")


def _fields(schema: Json, path: str) -> set[str]:
    found = _fields(schema["items"], f"{path}[]") if "items" in schema else set()
    for name, inner in schema.get("properties", {}).items():
        found |= {f"{path}.{name}".lstrip("."), *_fields(inner, f"{path}.{name}".lstrip("."))}
    return found


@lru_cache
def _schema(release: str, kind: str, version: str) -> Json:
    """The JSON schema that stands for a definition, strictly."""
    schema = _strict(_definition(release, kind, version))
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


@lru_cache
def _definition(release: str, kind: str, version: str) -> Json:
    for path in (UPSTREAM / release).glob("*.yaml"):
        definition = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if definition["spec"]["names"]["kind"] == kind:
            (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
            schema: Json = found["schema"]["openAPIV3Schema"]
            return schema
    raise KeyError(f"{release} has no {kind}")


def _strict(schema: Json) -> Json:
    """A part of a definition as a JSON schema in which a field without a schema is an error."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: schema[key] for key in _KEPT if key in schema}
    if "items" in schema:
        made["items"] = _strict(schema["items"])
    if "properties" in schema:
        made["properties"] = {name: _strict(inner) for name, inner in schema["properties"].items()}
    if "additionalProperties" in schema:
        inner = schema["additionalProperties"]
        made["additionalProperties"] = _strict(inner) if isinstance(inner, dict) else inner
    elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made
