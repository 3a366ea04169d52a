"""Kubernetes' paths: what a request names, whether it is allowed, and the verb that answers it."""

from collections.abc import Callable

from tests.fake_cluster.access import Access
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kinds import DEFINITIONS, KINDS, NAMESPACES, PODS, kind_at
from tests.fake_cluster.logs import LogReader
from tests.fake_cluster.resources import Resources, Target
from tests.fake_cluster.store import Store

_NO_SUCH_PATH = "the server could not find the requested resource"
_ON_ONE = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_ON_ALL = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}
_REVIEW = "selfsubjectaccessreviews"


class KubernetesApi:
    """Everything under /api and /apis, and /version."""

    def __init__(self, store: Store, access: Access, logs: LogReader) -> None:
        self._store, self._access, self._logs = store, access, logs
        self._resources = Resources(store)
        self._verbs: dict[str, Callable[[Target, Request], Answer]] = {
            "get": self._resources.get,
            "list": self._resources.list,
            "watch": self._resources.list,
            "create": self._resources.create,
            "update": self._resources.update,
            "patch": self._resources.patch,
            "delete": self._resources.delete,
            "deletecollection": self._resources.delete_all,
        }

    def answer(self, request: Request) -> Answer:
        """Answer a request.

        Raises:
            ApiError: It is refused.
        """
        if request.path in ("/version", "/version/"):
            return Answer({"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"})
        if request.path in ("/healthz", "/readyz", "/livez"):
            return Answer("ok")
        self._access.authenticate(request)
        group, version, rest = _split(request.path)
        if group == "authorization.k8s.io" and rest == [_REVIEW] and request.method == "POST":
            return self._review(request)
        if not rest:
            return self._discovery(group, version)
        target = self._target(group, version, rest)
        verb = self._verb(target, request)
        resource = target.kind.plural + (f"/{target.subresource}" if target.subresource else "")
        # A namespace's own name counts as its namespace, too.
        namespace = target.namespace or (target.name if target.kind == NAMESPACES else "")
        self._access.authorize(verb, target.kind.group, resource, namespace, target.name)
        with self._store.clock.changed:
            if target.subresource == "log":
                return self._logs.read(target.namespace, target.name, request)
            return self._verbs[verb](target, request)

    def _target(self, group: str, version: str, rest: list[str]) -> Target:
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = kind_at(group, version, rest[0])
        if kind is None or not self._is_installed(kind.plural, group):
            raise ApiError(404, _NO_SUCH_PATH, reason="NotFound")
        name, subresource = (*rest[1:3], "", "")[:2]
        allowed = {"", "status" if kind.status else "", "log" if kind == PODS else ""}
        if len(rest) > 3 or subresource not in allowed or (name and kind.namespaced != bool(namespace)):
            raise ApiError(404, _NO_SUCH_PATH, reason="NotFound")
        return Target(kind, namespace, name, subresource)

    def _is_installed(self, plural: str, group: str) -> bool:
        """Custom kinds exist where their definition does."""
        kind = next(each for each in KINDS if (each.plural, each.group) == (plural, group))
        return not kind.custom or self._store.get(DEFINITIONS, "", kind.resource) is not None

    def _verb(self, target: Target, request: Request) -> str:
        verb = (_ON_ONE if target.name else _ON_ALL).get(request.method)
        if verb is None or (target.subresource == "log" and verb != "get"):
            raise ApiError(405, "the server does not allow this method on the requested resource")
        if verb == "list" and request.flag("watch"):
            return "watch"
        if verb == "create" and target.kind.namespaced and not target.namespace:
            raise ApiError(405, "the server does not allow this method on the requested resource")
        return verb

    def _review(self, request: Request) -> Answer:
        review = request.object()
        asked: Json = review.get("spec", {}).get("resourceAttributes") or {}
        resource = asked.get("resource", "") + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = self._access.allows(
            asked.get("verb", ""), asked.get("group", ""), resource, asked.get("namespace", ""), asked.get("name", "")
        )
        body = {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "metadata": {},
            "spec": review.get("spec", {}),
            "status": {"allowed": allowed},
        }
        return Answer(body, 201)

    def _discovery(self, group: str, version: str) -> Answer:
        kinds = [each for each in KINDS if (each.group, each.version) == (group, version)]
        kinds = [each for each in kinds if self._is_installed(each.plural, group)]
        if not kinds:
            raise ApiError(404, _NO_SUCH_PATH, reason="NotFound")
        listed = [
            {"name": each.plural, "singularName": each.name.lower(), "kind": each.name, "namespaced": each.namespaced}
            | {"verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]}
            for each in kinds
        ]
        group_version = kinds[0].api_version
        return Answer({"kind": "APIResourceList", "groupVersion": group_version, "resources": listed})


def _split(path: str) -> tuple[str, str, list[str]]:
    """Group, version and the rest of a path."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) >= 2:
        return "", parts[1], parts[2:]
    if parts[:1] == ["apis"] and len(parts) >= 3:
        return parts[1], parts[2], parts[3:]
    raise ApiError(404, _NO_SUCH_PATH, reason="NotFound")
