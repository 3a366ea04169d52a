"""Label and field selectors, as lists, watches and bulk deletion take them."""

import re
from collections.abc import Callable
from typing import Any

from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.kinds import Kind

Matches = Callable[[Json], bool]
_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")
_EQUAL = re.compile(r"([^!=\s]+)\s*(==|!=|=)\s*([^!=\s]*)")
_PRESENT = re.compile(r"(!?)\s*([^!=\s(),]+)")


def selector(kind: Kind, labels: str, fields: str) -> Matches:
    """Whether an object is selected.

    Raises:
        ApiError: A selector cannot be read, or names a field that cannot be selected by.
    """
    tests = [_label_test(part) for part in _parts(labels)]
    tests += [_field_test(kind, part) for part in _parts(fields)]
    return lambda document: all(test(document) for test in tests)


def _parts(text: str) -> list[str]:
    """Split at the commas that are not within parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label_test(part: str) -> Matches:
    if found := _SET.fullmatch(part):
        key, wanted, values = found[1], found[2] == "in", {each.strip() for each in found[3].split(",")}
        return lambda document: (_labels(document).get(key) in values) == wanted
    if found := _EQUAL.fullmatch(part):
        key, wanted, value = found[1], found[2] != "!=", found[3]
        return lambda document: (_labels(document).get(key) == value) == wanted
    if found := _PRESENT.fullmatch(part):
        key, wanted = found[2], not found[1]
        return lambda document: (key in _labels(document)) == wanted
    raise ApiError(400, f"unable to parse requirement: {part}")


def _field_test(kind: Kind, part: str) -> Matches:
    found = _EQUAL.fullmatch(part)
    if not found:
        raise ApiError(400, f"invalid field selector {part!r}: can't understand it")
    path, wanted, value = found[1], found[2] != "!=", found[3]
    if path not in kind.selectable:
        raise ApiError(400, f"field label not supported: {path}")
    return lambda document: (_field(document, path) == value) == wanted


def _labels(document: Json) -> dict[str, str]:
    return document["metadata"].get("labels") or {}


def _field(document: Json, path: str) -> str:
    value: Any = document
    for key in path.split("."):
        value = value.get(key, "") if isinstance(value, dict) else ""
    return str(value)
