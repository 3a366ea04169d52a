"""Kubernetes' API: objects by the paths of their kind, RBAC, and the logs of pods."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from tests.fake_cluster.admission import admit
from tests.fake_cluster.cluster import ScriptedCluster
from tests.fake_cluster.http import Answer, ApiError, Json, Request
from tests.fake_cluster.kinds import KINDS, NAMESPACES, PODS, Kind, kind_at
from tests.fake_cluster.pods import Output
from tests.fake_cluster.store import Key

_ON_ONE = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}
_ON_ALL = {"GET": "list", "POST": "create"}
_MERGE_PATCH = "application/merge-patch+json"
_NO_SUCH_PATH = "the server could not find the requested resource"
_LABEL = re.compile(r"([^!=\s]+)(?:(==|=|!=)(\S*))?")
_SET_BY_SERVER = ("resourceVersion", "uid", "creationTimestamp", "generation", "deletionTimestamp")


@dataclass
class Access:
    """The one user of the server.

    Attributes:
        rules: PolicyRules as in a Role; with None everything is allowed.
        token: The token that the client must present; with None none is needed.
    """

    user: str
    rules: list[Json] | None = None
    token: str | None = "token-1"

    def rotate(self) -> str:
        """Make the token invalid and return the next one, as the kubelet does with the file in a pod."""
        self.token = f"token-{int((self.token or 'token-0').rpartition('-')[2]) + 1}"
        return self.token

    def authenticate(self, request: Request) -> None:
        """Refuse a request without the valid token."""
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized")

    def authorize(self, verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        """Refuse what no rule allows; a resource is named with its subresource, as in `pods/log`."""
        if self.allows(verb, group, resource, namespace, name):
            return
        plural = resource.partition("/")[0]
        qualified = f"{plural}.{group}" if group else plural
        subject = f'{qualified} "{name}"' if name else qualified
        scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        action = f'cannot {verb} resource "{resource}" in API group "{group}" {scope}'
        details = {"name": name, "group": group, "kind": plural}
        raise ApiError(403, f'{subject} is forbidden: User "{self.user}" {action}', details=details)

    def allows(self, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
        """Tell whether some rule allows it; a Role allows nothing outside its namespace."""
        if self.rules is None:
            return True

        def has(rule: Json, key: str, value: str) -> bool:
            return value in rule.get(key, []) or "*" in rule.get(key, [])

        wanted = {"verbs": verb, "apiGroups": group, "resources": resource}
        return bool(namespace) and any(
            all(has(rule, key, value) for key, value in wanted.items())
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self.rules
        )


class Target(NamedTuple):
    """What a path names."""

    kind: Kind
    namespace: str
    name: str
    subresource: str

    @property
    def key(self) -> Key:
        """The key of the object."""
        return self.kind, self.namespace, self.name


class KubernetesApi:
    """All paths that are not those of another API."""

    prefixes = ("/",)

    def __init__(self, cluster: ScriptedCluster, namespace: str) -> None:
        self._cluster, self._store = cluster, cluster.store
        self.access = Access(f"system:serviceaccount:{namespace}:pipeline-runner")

    def refusal(self, _: Request, error: ApiError) -> Json:
        """Return a refusal as this API writes it."""
        return error.status()

    def answer(self, request: Request) -> Answer:
        """Answer a request, or raise ApiError."""
        self.access.authenticate(request)
        group, version, rest = _split(request.path)
        if (group, rest) == ("authorization.k8s.io", ["selfsubjectaccessreviews"]):
            return self._review(request)
        if not rest:
            return self._discovery(group, version)
        target, verb = self._target(request, group, version, rest)
        resource = target.kind.plural + (f"/{target.subresource}" if target.subresource else "")
        # A namespace's own name counts as its namespace, too.
        namespace = target.namespace or (target.name if target.kind == NAMESPACES else "")
        self.access.authorize(verb, group, resource, namespace, target.name)
        verbs: dict[str, Callable[[Target, Request], Answer]] = {
            "get": self._log if target.subresource else self._get,
            "list": self._list,
            "create": self._create,
            "patch": self._patch,
            "delete": self._delete,
        }
        with self._store.clock.changed:
            return verbs[verb](target, request)

    def _target(self, request: Request, group: str, version: str, rest: list[str]) -> tuple[Target, str]:
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = kind_at(group, version, rest[0])
        name, subresource = (*rest[1:3], "", "")[:2]
        is_log = (kind, subresource, request.method) == (PODS, "log", "GET")
        verb = (_ON_ONE if name else _ON_ALL).get(request.method)
        if verb is None or (subresource and not is_log) or (not namespace and (verb == "create" or kind.namespaced)):
            raise NotImplementedError(f"{request.method} {request.path}")
        if kind in self._cluster.uninstalled:
            raise ApiError(404, _NO_SUCH_PATH)
        return Target(kind, namespace, name, subresource), verb

    def _review(self, request: Request) -> Answer:
        spec = request.object()["spec"]
        wanted = spec["resourceAttributes"]
        resource = wanted["resource"] + (f"/{wanted['subresource']}" if wanted.get("subresource") else "")
        names = (wanted.get("namespace", ""), wanted.get("name", ""))
        allowed = self.access.allows(wanted["verb"], wanted.get("group", ""), resource, *names)
        body = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "metadata": {}}
        return Answer({**body, "spec": spec, "status": {"allowed": allowed}}, 201)

    def _discovery(self, group: str, version: str) -> Answer:
        installed = [kind for kind in KINDS if kind not in self._cluster.uninstalled]
        kinds = [kind for kind in installed if (kind.group, kind.version) == (group, version)]
        if not kinds:
            raise ApiError(404, _NO_SUCH_PATH)
        verbs = [*_ON_ONE.values(), *_ON_ALL.values()]
        listed = [
            {"name": kind.plural, "singularName": kind.name.lower(), "kind": kind.name, "namespaced": kind.namespaced}
            | {"verbs": verbs}
            for kind in kinds
        ]
        return Answer({"kind": "APIResourceList", "groupVersion": kinds[0].api_version, "resources": listed})

    def _existing(self, target: Target) -> Json:
        document = self._store.get(*target.key)
        if document is None:
            raise _not_found(target.kind, target.name)
        return document

    def _get(self, target: Target, request: Request) -> Answer:
        request.check_query()
        return Answer(self._existing(target))

    def _list(self, target: Target, request: Request) -> Answer:
        request.check_query("labelSelector", "fieldSelector")
        tests = [*_label_tests(request), *_field_tests(request, target.kind)]
        items = [each for each in self._store.all(target.kind, target.namespace) if all(test(each) for test in tests)]
        return Answer({"kind": f"{target.kind.name}List", "apiVersion": target.kind.api_version, "items": items})

    def _create(self, target: Target, request: Request) -> Answer:
        request.check_query("fieldValidation", "dryRun")
        kind, document = target.kind, request.object()
        metadata = document.setdefault("metadata", {})
        if metadata.setdefault("namespace", target.namespace) != target.namespace:
            raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")
        if self._store.get(NAMESPACES, "", target.namespace) is None:
            raise _not_found(NAMESPACES, target.namespace)
        for key in _SET_BY_SERVER:
            metadata.pop(key, None)
        document.pop("status", None)
        admit(self._store, kind, document)
        if self._store.get(kind, target.namespace, metadata["name"]) is not None:
            message = f'{kind.resource} "{metadata["name"]}" already exists'
            raise ApiError(409, message, reason="AlreadyExists", details={"name": metadata["name"]})
        return Answer(document if "dryRun" in request.query else self._store.create(document), 201)

    def _patch(self, target: Target, request: Request) -> Answer:
        request.check_query()
        if request.headers.get("content-type") != _MERGE_PATCH or not target.kind.custom:
            raise NotImplementedError(f"a patch of {target.kind.plural} by {request.headers.get('content-type')}")
        before = self._existing(target)
        after = _merged(before, request.object())
        for key in ("uid", "resourceVersion"):
            if after["metadata"].get(key, "") != before["metadata"][key]:
                why = "the object has been modified; please apply your changes to the latest version and try again"
                raise _conflict(target, why)
        after |= {"status": before["status"]} if "status" in before else {}
        admit(self._store, target.kind, after, before)
        return Answer(self._store.replace(after))

    def _delete(self, target: Target, request: Request) -> Answer:
        request.check_query()
        metadata, options = self._existing(target)["metadata"], request.object()
        for key, wanted in (options.get("preconditions") or {}).items():
            if metadata[key] != wanted:
                raise _conflict(target, f"Precondition failed: {key}: {wanted}, in object meta: {metadata[key]}")
        policy = options.get("propagationPolicy", "Background")
        if policy not in ("Background", "Foreground"):
            raise NotImplementedError(f"propagationPolicy {policy}")
        if "deletionTimestamp" not in metadata:
            self._store.delete(target.key, policy)
        return Answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def _log(self, target: Target, request: Request) -> Answer:
        request.check_query("container", "follow", "timestamps", "sinceTime", "tailLines")
        pod, query = self._existing(target), request.query
        containers = [each["name"] for each in pod["spec"]["containers"]]
        container = query.get("container", containers[0])
        if container not in containers or ("container" not in query and len(containers) > 1):
            raise ApiError(400, f"container {container} is not valid for pod {target.name}")
        output = self._cluster.outputs.get((pod["metadata"]["uid"], container))
        if output is None:
            raise ApiError(400, _why_no_log(pod, container))
        first = 0
        if "sinceTime" in query:
            first = sum(moment < datetime.fromisoformat(query["sinceTime"]) for moment, _ in output.lines)
        if "tailLines" in query:
            first = max(first, len(output.lines) - int(query["tailLines"]))
        if query.get("follow") != "true":
            output = Output(list(output.lines), is_over=True)
        return Answer(stream=self._chunks(output, first, query.get("timestamps") == "true", target))

    def _chunks(self, output: Output, first: int, stamp: bool, target: Target) -> Iterator[bytes]:
        clock, is_over = self._store.clock, False
        while not is_over:
            with clock.changed:
                while not (is_over or len(output.lines) > first):
                    is_over = output.is_over or clock.is_closed or self._store.get(*target.key) is None
                    if not is_over:
                        clock.changed.wait()
                lines = output.lines[first:]
            first += len(lines)
            for moment, line in lines:
                prefix = moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ") if stamp else ""
                yield f"{prefix}{line}\n".encode()


def _split(path: str) -> tuple[str, str, list[str]]:
    """Return group, version and the rest of a path."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 1:
        return "", parts[1], parts[2:]
    if parts[:1] == ["apis"] and len(parts) > 2:
        return parts[1], parts[2], parts[3:]
    raise NotImplementedError(path)


def _not_found(kind: Kind, name: str) -> ApiError:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    return ApiError(404, f'{kind.resource} "{name}" not found', details=details)


def _conflict(target: Target, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {target.kind.resource} "{target.name}": {why}'
    return ApiError(409, message, details={"name": target.name})


def _label_tests(request: Request) -> Iterator[Callable[[Json], bool]]:
    """Read a label selector: `a=b`, `a==b`, `a!=b` and `a`."""
    for part in filter(None, request.query.get("labelSelector", "").split(",")):
        match = _LABEL.fullmatch(part.strip())
        if match is None:
            raise NotImplementedError(f"the label selector {part}")
        yield partial(_has_label, match)


def _has_label(requirement: re.Match[str], document: Json) -> bool:
    key, operator, value = requirement.groups()
    labels = document["metadata"].get("labels", {})
    return key in labels if operator is None else (labels.get(key) == value) == (operator != "!=")


def _field_tests(request: Request, kind: Kind) -> Iterator[Callable[[Json], bool]]:
    for part in filter(None, request.query.get("fieldSelector", "").split(",")):
        path, _, value = part.partition("=")
        if path not in ("metadata.name", *kind.fields):
            raise ApiError(400, f"field label not supported: {path}")
        yield partial(_has_field, path, value)


def _has_field(path: str, value: str, document: Json) -> bool:
    part, key = path.split(".")
    return bool(document.get(part, {}).get(key) == value)


def _merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7386): null removes, mappings are merged, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        merged[key] = _merged(merged.get(key), value)
    return {key: value for key, value in merged.items() if patch.get(key, "") is not None}


def _why_no_log(pod: Json, container: str) -> str:
    name = pod["metadata"]["name"]
    if not pod["spec"].get("nodeName"):
        return f"pod {name} does not have a host assigned"
    states = {each["name"]: each["state"] for each in pod.get("status", {}).get("containerStatuses", [])}
    reason = states.get(container, {}).get("waiting", {}).get("reason", "ContainerCreating")
    how = "trying and failing to pull image" if reason == "ImagePullBackOff" else reason
    return f'container "{container}" in pod "{name}" is waiting to start: {how}'
