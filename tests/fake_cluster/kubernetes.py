"""Kubernetes' API: objects by the paths of their kind, RBAC, and the logs of pods."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.fake_cluster.admission import admit
from tests.fake_cluster.cluster import ScriptedCluster
from tests.fake_cluster.http import Answer, ApiError, Json, Request
from tests.fake_cluster.kinds import KINDS, NAMESPACES, PODS, POSITIONS, TRAIN_JOBS, WORKLOADS
from tests.fake_cluster.pods import Output
from tests.fake_cluster.store import Key

_ON_ONE = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}
_ON_ALL = {"GET": "list", "POST": "create"}
_SUBRESOURCES = {(PODS, "log", "get"), (POSITIONS, "pendingworkloads", "get")}
_NO_SUCH_PATH = "404 page not found"
"""In plain text, and not as a Status."""
_SET_BY_SERVER = ("resourceVersion", "uid", "creationTimestamp", "generation", "deletionTimestamp")


@dataclass
class Access:
    """What the one user of the server may do."""

    rules: list[Json] | None = None
    """PolicyRules as in a Role; with None everything is allowed."""
    cluster_rules: list[Json] = field(default_factory=list)
    token: str = "token-1"

    def authorize(self, verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        """Refuse what no rule allows; a resource is named with its subresource, as in `pods/log`."""
        if not self.allows(verb, group, resource, namespace, name):
            scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            action = f'cannot {verb} resource "{resource}" in API group "{group}" {scope}'
            raise ApiError(403, f'{resource} "{name}" is forbidden: User "runner" {action}')

    def allows(self, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
        """Tell whether some rule allows it; a Role allows nothing outside its namespace."""
        wanted = {"verbs": verb, "apiGroups": group, "resources": resource}
        return self.rules is None or any(
            all({value, "*"} & set(rule.get(key, [])) for key, value in wanted.items())
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in [*(self.rules if namespace else []), *self.cluster_rules]
        )


class KubernetesApi:
    """All paths that are not those of another API."""

    prefixes = ("/",)

    def __init__(self, cluster: ScriptedCluster) -> None:
        self._cluster, self._store = cluster, cluster.store
        self.access = Access()

    def refusal(self, _: Request, error: ApiError) -> Json | str:
        """Return a refusal as this API writes it."""
        return error.message if error.message == _NO_SUCH_PATH else error.status()

    def answer(self, request: Request) -> Answer:
        """Answer a request, or raise ApiError."""
        if request.headers.get("authorization") != f"Bearer {self.access.token}":
            raise ApiError(401, "Unauthorized")
        root, *parts = request.path.strip("/").split("/")
        if root not in ("api", "apis"):
            raise NotImplementedError(request.path)
        group, version, *rest = ["", *parts] if root == "api" else parts
        if (group, rest) == ("authorization.k8s.io", ["selfsubjectaccessreviews"]):
            return self._review(request)
        if not rest:
            return self._discovery(group, version)
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        kind = next((each for each in KINDS if each[:3] == (group, version, plural)), None)
        verb = (_ON_ONE if name else _ON_ALL).get(request.method)
        read = {"": self._get, "log": self._log, "pendingworkloads": self._pending_workloads}
        is_known = (kind, subresource, verb) in _SUBRESOURCES or not (subresource or kind == POSITIONS)
        if not kind or not verb or bool(namespace) != kind.namespaced or not is_known:
            raise NotImplementedError(f"{request.method} {request.path}")
        if kind in self._cluster.uninstalled:
            raise ApiError(404, _NO_SUCH_PATH)
        resource = f"{plural}/{subresource}" if subresource else plural
        # A namespace's own name counts as its namespace, too.
        self.access.authorize(verb, group, resource, name if kind == NAMESPACES else namespace, name)
        verbs: dict[str, Callable[[Key, Request], Answer]] = {
            "get": read.get(subresource, self._get),
            "list": self._list,
            "create": self._create,
            "patch": self._patch,
            "delete": self._delete,
        }
        with self._store.clock.changed:
            return verbs[verb]((kind, namespace, name), request)

    def _pending_workloads(self, key: Key, request: Request) -> Answer:
        request.check_query()
        kind, namespace, queue = key
        every = sorted(self._store.all(WORKLOADS), key=lambda each: str(each["metadata"]["creationTimestamp"]))
        waiting = [each for each in every if not _is_reserved(each)]
        items: list[Json] = []
        for position, each in enumerate(waiting):
            if (each["metadata"]["namespace"], each["spec"]["queueName"]) == (namespace, queue):
                items.append({"metadata": {"name": each["metadata"]["name"]}, "positionInClusterQueue": position})
        return Answer(
            {"kind": "PendingWorkloadsSummary", "apiVersion": kind.api_version, "metadata": {}, "items": items}
        )

    def _review(self, request: Request) -> Answer:
        spec = request.object()["spec"]
        wanted = spec["resourceAttributes"]
        resource = wanted["resource"] + (f"/{wanted['subresource']}" if wanted.get("subresource") else "")
        names = (wanted.get("namespace", ""), wanted.get("name", ""))
        allowed = self.access.allows(wanted["verb"], wanted.get("group", ""), resource, *names)
        return Answer({"spec": spec, "status": {"allowed": allowed}}, 201)

    def _discovery(self, group: str, version: str) -> Answer:
        kinds = [each for each in KINDS if each[:2] == (group, version) and each not in self._cluster.uninstalled]
        if not kinds:
            raise ApiError(404, _NO_SUCH_PATH)
        return Answer({"kind": "APIResourceList", "groupVersion": f"{group}/{version}", "resources": []})

    def _existing(self, key: Key) -> Json:
        document = self._store.get(*key)
        if document is None:
            raise ApiError(404, f'{key[0].resource} "{key[2]}" not found')
        return document

    def _get(self, key: Key, request: Request) -> Answer:
        request.check_query()
        return Answer(self._existing(key))

    def _list(self, key: Key, request: Request) -> Answer:
        request.check_query("labelSelector", "fieldSelector")
        kind, namespace, _ = key
        labels, fields = (request.query.get(name, "").split(",") for name in ("labelSelector", "fieldSelector"))
        items = [
            each
            for each in self._store.all(kind, namespace)
            if all(_has(each["metadata"].get("labels", {}), label) for label in filter(None, labels))
            and all(_has(_fields(each), field) for field in filter(None, fields))
        ]
        return Answer({"kind": f"{kind.name}List", "apiVersion": kind.api_version, "items": items})

    def _create(self, key: Key, request: Request) -> Answer:
        request.check_query("fieldValidation", "dryRun")
        kind, namespace, _ = key
        if kind != TRAIN_JOBS:
            raise NotImplementedError(f"{request.method} {request.path}")
        job = request.object()
        metadata = job["metadata"]
        metadata["namespace"] = namespace
        self._existing((NAMESPACES, "", namespace))
        for name in _SET_BY_SERVER:
            metadata.pop(name, None)
        job.pop("status", None)
        admit(self._store, job)
        if self._store.get(kind, namespace, metadata["name"]) is not None:
            raise ApiError(409, f'{kind.resource} "{metadata["name"]}" already exists')
        return Answer(job if "dryRun" in request.query else self._store.create(job), 201)

    def _patch(self, key: Key, request: Request) -> Answer:
        request.check_query()
        if request.headers.get("content-type") != "application/merge-patch+json" or key[0] != TRAIN_JOBS:
            raise NotImplementedError(f"{request.method} {request.path} by {request.headers.get('content-type')}")
        before = self._existing(key)
        after = _merged(before, request.object())
        for name in ("uid", "resourceVersion"):
            if after["metadata"].get(name) != before["metadata"][name]:
                raise _conflict(key, "the object has been modified; please apply your changes to the latest version")
        after |= {"status": before["status"]} if "status" in before else {}
        admit(self._store, after, before)
        return Answer(self._store.replace(after))

    def _delete(self, key: Key, request: Request) -> Answer:
        request.check_query()
        metadata, options = self._existing(key)["metadata"], request.object()
        for name, wanted in (options.get("preconditions") or {}).items():
            if metadata[name] != wanted:
                raise _conflict(key, f"Precondition failed: {name}: {wanted}, in object meta: {metadata[name]}")
        is_foreground = {"Background": False, "Foreground": True}[options.get("propagationPolicy", "Background")]
        self._store.delete(key, foreground=is_foreground)
        return Answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def _log(self, key: Key, request: Request) -> Answer:
        request.check_query("container", "follow", "timestamps", "sinceTime")
        pod, query = self._existing(key), request.query
        container = query["container"]
        output = self._cluster.outputs.get((pod["metadata"]["uid"], container))
        if output is None:
            raise ApiError(400, f'container "{container}" in pod "{key[2]}" is waiting to start')
        first = 0
        if "sinceTime" in query:
            first = sum(moment < datetime.fromisoformat(query["sinceTime"]) for moment, _ in output.lines)
        if query.get("follow") != "true":
            output = Output(list(output.lines), is_over=True)
        return Answer(stream=self._chunks(output, first, query.get("timestamps") == "true", key))

    def _chunks(self, output: Output, first: int, stamp: bool, key: Key) -> Iterator[bytes]:
        clock, is_over = self._store.clock, False
        while not is_over:
            with clock.changed:
                while not (is_over or len(output.lines) > first):
                    is_over = output.is_over or clock.is_closed or self._store.get(*key) is None
                    if not is_over:
                        clock.changed.wait()
                lines = output.lines[first:]
            first += len(lines)
            for moment, line in lines:
                prefix = moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ") if stamp else ""
                yield f"{prefix}{line}\n".encode()


def _is_reserved(workload: Json) -> bool:
    conditions = workload.get("status", {}).get("conditions", [])
    return any(each["type"] == "QuotaReserved" and each["status"] == "True" for each in conditions)


def _conflict(key: Key, why: str) -> ApiError:
    return ApiError(409, f'Operation cannot be fulfilled on {key[0].resource} "{key[2]}": {why}')


def _has(values: Json, requirement: str) -> bool:
    """Tell whether one part of a selector, `a=b`, `a!=b` or `a`, is met."""
    name, operator, value = requirement.partition("=")
    if name.endswith("!"):
        return bool(values.get(name[:-1]) != value)
    return values.get(name) == value if operator else name in values


def _fields(document: Json) -> Json:
    """Return the fields of an object that selectors may name."""
    about = {f"involvedObject.{key}": value for key, value in document.get("involvedObject", {}).items()}
    return {"metadata.name": document["metadata"]["name"], **about}


def _merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7386): null removes, mappings are merged, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        merged[key] = _merged(merged.get(key), value)
    return {key: value for key, value in merged.items() if patch.get(key, "") is not None}
