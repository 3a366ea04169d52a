"""Kubeflow Model Registry's REST API as far as its client calls it: models, versions and their artifacts."""

from functools import partial

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.http import Answer, ApiError, Json, Request, Route, dispatch

_PREFIX = "/api/model_registry/"
_MODELS, _VERSIONS, _ARTIFACTS = "registered_models", "model_versions", "model_artifacts"
_SET_BY_SERVER = ("id", "createTimeSinceEpoch", "lastUpdateTimeSinceEpoch")


class RegistryApi:
    """The registry's state and its answers."""

    prefixes = (_PREFIX,)

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.api_versions: tuple[str, ...] = ("v1",)  # or v1alpha3
        self.token: str | None = None
        self.tables: dict[str, list[tuple[str, Json]]] = {_MODELS: [], _VERSIONS: [], _ARTIFACTS: []}
        """What is registered, each with the id of its parent."""

    def refusal(self, _: Request, error: ApiError) -> Json:
        """Return a refusal as this API writes it."""
        return {"code": str(error.code), "message": error.message}

    def documents(self, table: str) -> list[Json]:
        """Return what is registered: of `registered_models`, `model_versions` or `model_artifacts`."""
        return [document for _, document in self.tables[table]]

    def answer(self, request: Request) -> Answer:
        """Answer a request, or raise ApiError."""
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized")
        version, _, path = request.path.removeprefix(_PREFIX).partition("/")
        if version not in self.api_versions:
            raise ApiError(404, "404 page not found")
        routes: list[Route] = [
            *[("GET", table.removesuffix("s"), partial(self._find, table)) for table in self.tables],
            *[("GET", table, partial(self._list, table)) for table in self.tables],
            ("POST", _MODELS, partial(self._create, _MODELS)),
            ("POST", _VERSIONS, partial(self._create, _VERSIONS)),
            ("GET", f"{_MODELS}/{{}}/versions", partial(self._list, _VERSIONS)),
            ("PATCH", f"{_VERSIONS}/{{}}", self._update_version),
            ("GET", f"{_VERSIONS}/{{}}/artifacts", partial(self._list, _ARTIFACTS)),
            ("POST", f"{_VERSIONS}/{{}}/artifacts", partial(self._create, _ARTIFACTS)),
        ]
        with self.clock.changed:
            return dispatch(routes, request, path)

    def _list(self, table: str, request: Request, parent: str | None = None) -> Answer:
        items = [document for of, document in self.tables[table] if parent in (None, of)]
        page = {"size": len(items), "pageSize": int(request.query.get("pageSize") or 100), "nextPageToken": ""}
        return Answer({"items": items, **page})

    def _find(self, table: str, request: Request) -> Answer:
        request.check_query("name", "parentResourceId")
        name, parent = request.query.get("name", ""), request.query.get("parentResourceId", "")
        if not name or (table != _MODELS and not parent):
            raise ApiError(400, "invalid parameters call, supply either (name and parentResourceId), or externalId")
        for of, document in self.tables[table]:
            if (document["name"], of) == (name, parent):
                return Answer(document)
        raise ApiError(404, f"no {table} found for name={name}")

    def _create(self, table: str, request: Request, parent: str = "") -> Answer:
        document = _sent(request)
        parent = document.get("registeredModelId", parent)
        above = {_MODELS: None, _VERSIONS: _MODELS, _ARTIFACTS: _VERSIONS}[table]
        if above and parent not in {each["id"] for each in self.documents(above)}:
            raise ApiError(404, f"no {above} found for id {parent}")
        if any((of, each["name"]) == (parent, document.get("name")) for of, each in self.tables[table]):
            raise ApiError(409, f"{table} {document.get('name')}: already exists")
        id_ = str(1 + sum(map(len, self.tables.values())))
        times = dict.fromkeys(_SET_BY_SERVER[1:], str(int(self.clock.now().timestamp() * 1000)))
        document = {"state": "LIVE", **document, "id": id_, **times}
        self.tables[table].append((parent, document))
        return Answer(document, 201)

    def _update_version(self, request: Request, id_: str) -> Answer:
        document = next(each for each in self.documents(_VERSIONS) if each["id"] == id_)
        document.update(_sent(request))
        return Answer(document)


def _sent(request: Request) -> Json:
    values = request.object().items()
    return {name: value for name, value in values if value is not None and name not in _SET_BY_SERVER}
