"""Kubeflow Model Registry's REST API, as far as its client calls it: models, versions and their artifacts.

Nothing in it is atomic: model, version and artifact are three requests, and whoever dies between them leaves what the
next one finds.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mr_openapi
from pydantic import ValidationError

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.routes import Route, dispatch

PREFIX = "/api/model_registry/"
_MODELS, _VERSIONS, _ARTIFACTS = "registered_models", "model_versions", "model_artifacts"
_CREATES: dict[str, Any] = {
    _MODELS: mr_openapi.RegisteredModelCreate,
    _VERSIONS: mr_openapi.ModelVersionCreate,
    _ARTIFACTS: mr_openapi.ModelArtifact,
}
_UPDATES: dict[str, Any] = {
    _MODELS: mr_openapi.RegisteredModelUpdate,
    _VERSIONS: mr_openapi.ModelVersionUpdate,
    _ARTIFACTS: mr_openapi.ModelArtifactUpdate,
}
_VALUES: dict[str, tuple[str, Any]] = {
    "MetadataBoolValue": ("bool_value", bool),
    "MetadataIntValue": ("int_value", str),
    "MetadataDoubleValue": ("double_value", (int, float)),
    "MetadataStringValue": ("string_value", str),
    "MetadataStructValue": ("struct_value", str),
    "MetadataProtoValue": ("proto_value", str),
}
_SET_BY_SERVER = ("id", "createTimeSinceEpoch", "lastUpdateTimeSinceEpoch")


@dataclass
class Row:
    """One thing that is registered, and under which other one."""

    id: str
    parent: str
    document: Json


@dataclass
class RegistryApi:
    """The registry's state and its answers.

    Attributes:
        api_versions: The versions of the API that are served: `v1`, `v1alpha3` or both.
        token: What the client has to present; with None nobody is asked.
        tables: What is registered.
    """

    clock: Clock
    api_versions: tuple[str, ...] = ("v1",)
    token: str | None = None
    tables: dict[str, list[Row]] = field(default_factory=lambda: {_MODELS: [], _VERSIONS: [], _ARTIFACTS: []})

    def documents(self, table: str) -> list[Json]:
        """What is registered: of `registered_models`, `model_versions` or `model_artifacts`."""
        return [row.document for row in self.tables[table]]

    def answer(self, request: Request) -> Answer:
        """Answer a request.

        Raises:
            ApiError: It is refused.
        """
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized")
        version, _, path = request.path.removeprefix(PREFIX).partition("/")
        if version not in self.api_versions:
            raise ApiError(404, "404 page not found")
        with self.clock.changed:
            return dispatch(self._routes(), request, path)

    def _routes(self) -> list[Route]:
        return [
            *[("GET", table.removesuffix("s"), partial(self._find, table)) for table in self.tables],
            *[("GET", table, partial(self._list, table)) for table in self.tables],
            *[("GET", f"{table}/{{}}", partial(self._get, table)) for table in self.tables],
            *[("PATCH", f"{table}/{{}}", partial(self._patch, table)) for table in self.tables],
            ("POST", _MODELS, partial(self._create, _MODELS)),
            ("POST", _VERSIONS, partial(self._create, _VERSIONS)),
            ("GET", f"{_MODELS}/{{}}/versions", partial(self._list_within, _VERSIONS, _MODELS)),
            ("GET", f"{_VERSIONS}/{{}}/artifacts", partial(self._list_within, _ARTIFACTS, _VERSIONS)),
            ("POST", f"{_VERSIONS}/{{}}/artifacts", self._attach),
        ]

    def _row(self, table: str, id_: str) -> Row:
        for row in self.tables[table]:
            if row.id == id_:
                return row
        raise ApiError(404, f"no {_called(table)} found for id {id_}")

    def _get(self, table: str, _: Request, id_: str) -> Answer:
        return Answer(self._row(table, id_).document)

    def _list(self, table: str, request: Request) -> Answer:
        return _page(self.documents(table), request)

    def _list_within(self, table: str, parents: str, request: Request, id_: str) -> Answer:
        self._row(parents, id_)
        return _page([row.document for row in self.tables[table] if row.parent == id_], request)

    def _find(self, table: str, request: Request) -> Answer:
        name, external, parent = (request.query.get(key, "") for key in ("name", "externalId", "parentResourceId"))
        if not external and (not name or (table != _MODELS and not parent)):
            raise ApiError(400, "invalid parameters call, supply either (name and parentResourceId), or externalId")
        for row in self.tables[table]:
            named = row.document.get("name") == name and (table == _MODELS or row.parent == parent)
            if (row.document.get("externalId") == external) if external else named:
                return Answer(row.document)
        raise ApiError(404, f"no {_called(table)} found for name={name}, externalId={external}")

    def _create(self, table: str, request: Request) -> Answer:
        document = _checked(_CREATES[table], request.object())
        parent = document["registeredModelId"] if table == _VERSIONS else ""
        if parent:
            self._row(_MODELS, parent)
        self._check_unique(table, parent, document)
        return Answer(self._keep(table, parent, document), 201)

    def _attach(self, request: Request, version: str) -> Answer:
        body = request.object()
        if body.get("artifactType") != "model-artifact":
            raise ApiError(400, f"unknown artifactType: {body.get('artifactType')}")
        self._row(_VERSIONS, version)
        document = _checked(mr_openapi.ModelArtifact, body)
        if body.get("id"):
            return self._changed(_ARTIFACTS, body["id"], document)
        self._check_unique(_ARTIFACTS, version, document)
        return Answer(self._keep(_ARTIFACTS, version, document), 201)

    def _patch(self, table: str, request: Request, id_: str) -> Answer:
        return self._changed(table, id_, _checked(_UPDATES[table], request.object()))

    def _check_unique(self, table: str, parent: str, document: Json) -> None:
        for row in self.tables[table]:
            same_name = row.parent == parent and row.document.get("name") == document.get("name")
            external = document.get("externalId")
            if same_name or (external and row.document.get("externalId") == external):
                raise ApiError(409, f"{_called(table)} {document.get('name')}: already exists")

    def _keep(self, table: str, parent: str, document: Json) -> Json:
        now = str(int(self.clock.now().timestamp() * 1000))
        id_ = str(1 + sum(len(rows) for rows in self.tables.values()))
        times = {"createTimeSinceEpoch": now, "lastUpdateTimeSinceEpoch": now}
        row = Row(id_, parent, {"state": "LIVE", **document, "id": id_, **times})
        self.tables[table].append(row)
        return row.document

    def _changed(self, table: str, id_: str, document: Json) -> Answer:
        row = self._row(table, id_)
        now = str(int(self.clock.now().timestamp() * 1000))
        row.document = {**row.document, **document, "lastUpdateTimeSinceEpoch": now}
        return Answer(row.document)


def _called(table: str) -> str:
    return table.replace("_", " ").removesuffix("s")


def _page(documents: list[Json], request: Request) -> Answer:
    size = int(request.query.get("pageSize") or len(documents) or 1)
    start = int(request.query.get("nextPageToken") or 0)
    end = start + size
    token = str(end) if end < len(documents) else ""
    items = documents[start:end]
    return Answer({"items": items, "size": len(items), "pageSize": size, "nextPageToken": token})


def _checked(model: Any, body: Json) -> Json:
    """A request's document, if it has only fields of its kind and their types.

    Raises:
        ApiError: 400.
    """
    known = {each.alias or name for name, each in model.model_fields.items()}
    for name in body:
        if name not in known:
            raise ApiError(400, f'json: unknown field "{name}"')
    for name, value in (body.get("customProperties") or {}).items():
        _check_property(name, value)
    try:
        model.from_dict(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(400, f"required field {first['loc'][0]}: {first['msg']}") from None
    return {name: value for name, value in body.items() if value is not None and name not in _SET_BY_SERVER}


def _check_property(name: str, value: Any) -> None:
    kind = value.get("metadataType") if isinstance(value, dict) else None
    if kind not in _VALUES:
        raise ApiError(400, f"customProperties.{name}: metadataType is required")
    key, type_ = _VALUES[kind]
    found = value.get(key)
    right = isinstance(found, type_) and isinstance(found, bool) == (type_ is bool)
    if set(value) != {key, "metadataType"} or not right:
        raise ApiError(400, f"customProperties.{name}: {key} is required")
    if kind == "MetadataIntValue" and not re.fullmatch(r"-?\d+", str(found)):
        raise ApiError(400, f"customProperties.{name}: int_value is no integer")
