"""Merge patch (RFC 7386) and JSON patch (RFC 6902)."""

import copy
from typing import Any

from tests.fake_cluster.errors import ApiError, Json

MERGE = "application/merge-patch+json"
LIST = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
ACCEPTED = (LIST, MERGE)


def merged(target: Any, patch: Any) -> Any:
    """The target with a merge patch applied: null removes, mappings are merged, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def edited(target: Json, operations: Any) -> Json:
    """The target with a JSON patch applied.

    Raises:
        ApiError: An operation cannot be read, or names a place that is not there.
    """
    if not isinstance(operations, list):
        raise ApiError(400, "error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    document = copy.deepcopy(target)
    for operation in operations:
        try:
            _apply(document, operation)
        except (KeyError, IndexError, ValueError, TypeError, AssertionError):
            message = f"the server rejected our request due to an error in our request: {operation}"
            raise ApiError(422, message) from None
    return document


def _apply(document: Json, operation: Json) -> None:
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = document
    for part in path:
        place = place[int(part)] if isinstance(place, list) else place[part]
    match operation["op"]:
        case "add" if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        case "add":
            place[last] = operation["value"]
        case "replace":
            place[_existing(place, last)] = operation["value"]
        case "remove":
            del place[_existing(place, last)]
        case "test":
            assert place[_existing(place, last)] == operation["value"]
        case other:
            raise ValueError(other)


def _existing(place: Any, key: str) -> Any:
    index: int | str = int(key) if isinstance(place, list) else key
    place[index]
    return index
