"""Filters, order and pages of Kubeflow Pipelines' lists."""

import json
from collections.abc import Callable
from typing import Any

from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "EQUALS": lambda found, wanted: found == wanted,
    "NOT_EQUALS": lambda found, wanted: found != wanted,
    "GREATER_THAN": lambda found, wanted: found > wanted,
    "GREATER_THAN_EQUALS": lambda found, wanted: found >= wanted,
    "LESS_THAN": lambda found, wanted: found < wanted,
    "LESS_THAN_EQUALS": lambda found, wanted: found <= wanted,
    "IS_SUBSTRING": lambda found, wanted: wanted in found,
}
_NUMBERS = {
    1: "EQUALS",
    2: "NOT_EQUALS",
    3: "GREATER_THAN",
    5: "GREATER_THAN_EQUALS",
    6: "LESS_THAN",
    7: "LESS_THAN_EQUALS",
    9: "IS_SUBSTRING",
}
"""The same as protobuf numbers them."""
_KEYS = {"id", "name", "display_name", "created_at", "state", "status", "storage_state", "experiment_id", "namespace"}
_DEFAULT_SIZE = 20


def page(rows: list[Json], request: Request, called: str) -> Answer:
    """One page of a list, under the key `called`.

    Raises:
        ApiError: The filter, the order or the page cannot be read.
    """
    query = request.query
    predicates = _predicates(query.get("filter", ""))
    found = [row for row in rows if all(matches(row) for matches in predicates)]
    key, _, direction = (query.get("sort_by") or "created_at").partition(" ")
    if key not in _KEYS or direction not in ("", "asc", "desc"):
        raise ApiError(400, f"Invalid sorting field: {key}")
    found.sort(key=lambda row: str(row.get(key, "")), reverse=direction == "desc")
    size, start = int(query.get("page_size") or 0) or _DEFAULT_SIZE, int(query.get("page_token") or 0)
    end = start + size
    body: Json = {called: found[start:end], "total_size": len(found)}
    return Answer({**body, "next_page_token": str(end)} if end < len(found) else body)


def _predicates(text: str) -> list[Callable[[Json], bool]]:
    return [_predicate(each) for each in json.loads(text).get("predicates", [])] if text else []


def _predicate(predicate: Json) -> Callable[[Json], bool]:
    operation, key = predicate.get("operation"), predicate.get("key")
    name = _NUMBERS.get(operation, "") if isinstance(operation, int) else str(operation)
    if name not in _OPERATIONS or key not in _KEYS:
        raise ApiError(400, f"Invalid filter: {operation} of {key}")
    wanted = next(value for name, value in predicate.items() if name not in ("operation", "key"))
    return lambda row: _OPERATIONS[name](row.get(str(key), ""), wanted)
