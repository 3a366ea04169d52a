"""What Kueue accepts, of the fields that are used here; anything else is refused."""

from typing import Any

Json = dict[str, Any]


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
_QUANTITY = {"type": "string", "pattern": r"^\d+([KMGT]i?|m)?$"}
_METADATA = _object({"name": _NAME, "namespace": _NAME, "labels": {"type": "object"}}, "name")


def _kind(kind: str, spec: Json | None) -> Json:
    properties = {"apiVersion": {"const": "kueue.x-k8s.io/v1beta1"}, "kind": {"const": kind}, "metadata": _METADATA}
    return _object({**properties, "spec": spec}, *properties, "spec") if spec else _object(properties, *properties)


_RESOURCE = _object({"name": {"type": "string"}, "nominalQuota": _QUANTITY}, "name", "nominalQuota")
_FLAVOR = _object({"name": _NAME, "resources": {"type": "array", "items": _RESOURCE}}, "name", "resources")
_COVERED = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_GROUP = _object(
    {"coveredResources": _COVERED, "flavors": {"type": "array", "items": _FLAVOR}}, "coveredResources", "flavors"
)
SCHEMAS = {
    "LocalQueue": _kind("LocalQueue", _object({"clusterQueue": _NAME}, "clusterQueue")),
    "ClusterQueue": _kind(
        "ClusterQueue",
        _object(
            {"namespaceSelector": {"type": "object"}, "resourceGroups": {"type": "array", "items": _GROUP}},
            "resourceGroups",
        ),
    ),
    "ResourceFlavor": _kind("ResourceFlavor", None),
}
