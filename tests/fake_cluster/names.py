"""Kubernetes' rules for names, labels and annotations."""

import re
from collections.abc import Iterator

from tests.fake_cluster.errors import Json
from tests.fake_cluster.kinds import NAMESPACES, Kind

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character"
)
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character"
)
_ANNOTATIONS_BYTES = 256 * 1024


def metadata_problems(kind: Kind, metadata: Json) -> Iterator[str]:
    """What is wrong with an object's metadata, each as `path: message`."""
    yield from _name_problems(kind, metadata)
    for key, value in (metadata.get("labels") or {}).items():
        yield from _key_problems("metadata.labels", key)
        yield from _value_problems(value)
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        yield from _key_problems("metadata.annotations", key.lower())
    if sum(len(key) + len(str(value)) for key, value in annotations.items()) > _ANNOTATIONS_BYTES:
        yield f"metadata.annotations: Too long: may not be more than {_ANNOTATIONS_BYTES} bytes"
    for number, owner in enumerate(metadata.get("ownerReferences") or []):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield f'metadata.ownerReferences[{number}].{field}: Invalid value: "": {field} must not be empty'


def _name_problems(kind: Kind, metadata: Json) -> Iterator[str]:
    name = metadata.get("name")
    if not name:
        yield "metadata.name: Required value: name or generateName is required"
        return
    pattern, rule, longest = (_LABEL, _LABEL_RULE, 63) if kind == NAMESPACES else (_SUBDOMAIN, _SUBDOMAIN_RULE, 253)
    if not pattern.fullmatch(name):
        yield f'metadata.name: Invalid value: "{name}": {rule}'
    if len(name) > longest:
        yield f'metadata.name: Invalid value: "{name}": must be no more than {longest} characters'


def _key_problems(path: str, key: str) -> Iterator[str]:
    prefix, _, name = key.rpartition("/")
    if "/" in prefix or ("/" in key and not (_SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253)):
        yield f'{path}: Invalid value: "{key}": prefix part {_SUBDOMAIN_RULE}'
    if not _QUALIFIED.fullmatch(name):
        yield f'{path}: Invalid value: "{key}": {_KEY_RULE}'
    if len(name) > 63:
        yield f'{path}: Invalid value: "{key}": name part must be no more than 63 characters'


def _value_problems(value: object) -> Iterator[str]:
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        yield f'metadata.labels: Invalid value: "{value}": {_VALUE_RULE}'
    elif len(value) > 63:
        yield f'metadata.labels: Invalid value: "{value}": must be no more than 63 characters'
