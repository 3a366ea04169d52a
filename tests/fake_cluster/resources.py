"""Kubernetes' verbs on objects: get, list, watch, create, update, patch and delete."""

import copy
import secrets
from dataclasses import dataclass

from tests.fake_cluster import patches
from tests.fake_cluster.admission import Admitted, admit, decode, keep_server_fields
from tests.fake_cluster.errors import ApiError, Json, conflict, not_found
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kinds import NAMESPACES, Kind
from tests.fake_cluster.listing import Listing
from tests.fake_cluster.selectors import selector
from tests.fake_cluster.store import FOREGROUND, Key, Store, rfc3339
from tests.fake_cluster.watching import Watch

_POLICIES = ("", "Background", "Foreground", "Orphan")
_STALE = "the object has been modified; please apply your changes to the latest version and try again"


@dataclass(frozen=True)
class Target:
    """What a path names."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Where the object is kept."""
        return self.kind, self.namespace, self.name


class Resources:
    """The verbs. Each holds the lock that guards time and objects."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listing = Listing(store)

    def get(self, target: Target, request: Request) -> Answer:
        """One object."""
        return Answer(self._existing(target))

    def list(self, target: Target, request: Request) -> Answer:
        """All objects of a kind, or a page of them, or a watch."""
        query = request.query
        selected = selector(target.kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if request.flag("watch"):
            watch = Watch(
                self._store,
                target.kind,
                target.namespace,
                selected,
                since=query.get("resourceVersion", ""),
                timeout_s=float(query.get("timeoutSeconds") or 0),
                bookmarks=request.flag("allowWatchBookmarks"),
            )
            return Answer(stream=watch.lines(), headers={"Content-Type": "application/json"})
        limit = int(query.get("limit") or 0)
        return Answer(
            self._listing.page(target.kind, target.namespace, selected, limit=limit, token=query.get("continue", ""))
        )

    def create(self, target: Target, request: Request) -> Answer:
        """Make an object."""
        kind = target.kind
        admitted = decode(kind, request.object(), request.query.get("fieldValidation", ""))
        document = admitted.document
        metadata = document["metadata"]
        if kind.namespaced:
            self._check_namespace(target.namespace, metadata)
        if metadata.get("resourceVersion"):
            raise ApiError(500, "resourceVersion should not be set on objects to be created")
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        for name in ("uid", "creationTimestamp", "generation", "deletionTimestamp", "managedFields", "selfLink"):
            metadata.pop(name, None)
        if kind.status:
            document.pop("status", None)
        admit(self._store, kind, document, None)
        if self._store.get(kind, target.namespace, metadata["name"]) is not None:
            raise ApiError(
                409,
                f'{kind.resource} "{metadata["name"]}" already exists',
                reason="AlreadyExists",
                details={"name": metadata["name"], "group": kind.group, "kind": kind.plural},
            )
        made = document if _dry_run(request) else self._store.create(document)
        return Answer(made, 201, _warnings(admitted))

    def update(self, target: Target, request: Request) -> Answer:
        """Replace an object."""
        before = self._existing(target)
        return self._write(target, request, before, request.object())

    def patch(self, target: Target, request: Request) -> Answer:
        """Change parts of an object."""
        before = self._existing(target)
        sent = request.headers.get("content-type", "").partition(";")[0]
        accepted = patches.ACCEPTED if target.kind.custom else (*patches.ACCEPTED, patches.STRATEGIC)
        if sent not in accepted:
            raise ApiError(
                415,
                "the body of the request was in an unknown format - accepted media types include: "
                f"{', '.join(accepted)}",
            )
        patch = request.json()
        after = patches.edited(before, patch) if sent == patches.LIST else patches.merged(before, patch)
        return self._write(target, request, before, after)

    def delete(self, target: Target, request: Request) -> Answer:
        """Delete an object; what it owns follows as the propagation policy says."""
        before = self._existing(target)
        options = request.json() or {}
        policy = request.query.get("propagationPolicy") or options.get("propagationPolicy") or ""
        if policy not in _POLICIES:
            raise ApiError(
                422, f'DeleteOptions.meta.k8s.io "" is invalid: propagationPolicy: Invalid value: "{policy}"'
            )
        _check_preconditions(target, before, options.get("preconditions") or {})
        metadata = before["metadata"]
        if not _dry_run(request) and not options.get("dryRun"):
            self._delete(target, before, policy)
        details = {"name": target.name, "group": target.kind.group, "kind": target.kind.plural, "uid": metadata["uid"]}
        return Answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})

    def delete_all(self, target: Target, request: Request) -> Answer:
        """Delete what a selector names."""
        page = self.list(target, request)
        assert isinstance(page.body, dict)
        for document in page.body["items"]:
            metadata = document["metadata"]
            each = Target(target.kind, metadata.get("namespace", ""), metadata["name"])
            self.delete(each, request)
        return Answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def _existing(self, target: Target) -> Json:
        document = self._store.get(*target.key)
        if document is None:
            raise not_found(target.kind.resource, target.name)
        return document

    def _check_namespace(self, namespace: str, metadata: Json) -> None:
        if metadata.setdefault("namespace", namespace) != namespace:
            raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")
        if self._store.get(NAMESPACES, "", namespace) is None:
            raise not_found("namespaces", namespace)

    def _write(self, target: Target, request: Request, before: Json, after: Json) -> Answer:
        kind = target.kind
        admitted = decode(kind, copy.deepcopy(after), request.query.get("fieldValidation", ""))
        document = admitted.document
        metadata = document["metadata"]
        if metadata.get("name", target.name) != target.name:
            raise ApiError(400, f"the name of the object ({metadata['name']}) does not match the name on the URL")
        version = metadata.get("resourceVersion")
        if version and version != before["metadata"]["resourceVersion"]:
            raise conflict(kind.resource, target.name, _STALE)
        if target.subresource == "status":
            document = {**before, "status": document.get("status", {})}
        elif kind.status:
            document.pop("status", None)
            document.update({"status": before["status"]} if "status" in before else {})
        keep_server_fields(document, before)
        admit(self._store, kind, document, before)
        return Answer(document if _dry_run(request) else self._store.replace(document), headers=_warnings(admitted))

    def _delete(self, target: Target, before: Json, policy: str) -> None:
        metadata = before["metadata"]
        if policy == "Orphan":
            self._store.release(metadata["uid"])
        if policy == "Foreground" and any(True for _ in self._store.owned_by(metadata["uid"])):
            metadata["finalizers"] = [*metadata.get("finalizers", []), FOREGROUND]
        if not metadata.get("finalizers"):
            self._store.remove(target.key)
        elif "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = rfc3339(self._store.clock.now())
            self._store.replace(before)
            self._store.collect_soon()


def _dry_run(request: Request) -> bool:
    value = request.query.get("dryRun", "")
    if value not in ("", "All"):
        raise ApiError(422, f'dryRun: Unsupported value: "{value}": supported values: "All"')
    return value == "All"


def _warnings(admitted: Admitted) -> dict[str, str]:
    said = ['299 - "' + warning.replace('"', '\\"') + '"' for warning in admitted.warnings]
    return {"Warning": ", ".join(said)} if said else {}


def _check_preconditions(target: Target, before: Json, wanted: Json) -> None:
    for field, name in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        found = before["metadata"][field]
        if wanted.get(field, found) != found:
            why = f"Precondition failed: {name} in precondition: {wanted[field]}, {name} in object meta: {found}"
            raise conflict(target.kind.resource, target.name, why)
