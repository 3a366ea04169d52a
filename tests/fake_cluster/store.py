"""The objects of the cluster, and the garbage collector."""

import copy
import itertools
import uuid
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import PODS, Kind, kind_of

Key = tuple[Kind, str, str]
"""Kind, namespace (empty for kinds without one) and name."""
Condition = tuple[str, str, str, str]
"""Type, status, reason and message."""
_COLLECT_S, _ENDS_S = 1.0, 2.0
"""Time from the deletion of an object's last owner to its own, and from that of a running pod to its end."""


class Change(NamedTuple):
    """One write to the store: ADDED, MODIFIED or DELETED."""

    type: str
    kind: Kind
    before: Json | None
    after: Json


def key_of(document: Json) -> Key:
    """Return the key of an object."""
    metadata = document["metadata"]
    return kind_of(document["apiVersion"], document["kind"]), metadata.get("namespace", ""), metadata["name"]


def reference_to(owner: Json) -> Json:
    """Return an owner reference, as controllers write it."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
    return {**reference, "controller": True, "blockOwnerDeletion": True}


class Store:
    """Objects by key. Callers hold the clock's lock; what they get are copies."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._objects: dict[Key, Json] = {}
        self._numbers = itertools.count(1)
        self._listeners: list[Callable[[Change], None]] = []

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        """Return an object, or None."""
        return copy.deepcopy(self._objects.get((kind, namespace, name)))

    def all(self, kind: Kind, namespace: str = "") -> list[Json]:
        """Return the objects of a kind, of one namespace or of all, by name."""
        keys = [key for key in self._objects if key[0] == kind and namespace in ("", key[1])]
        return [copy.deepcopy(self._objects[key]) for key in sorted(keys)]

    def create(self, document: Json) -> Json:
        """Add an object, and return it with its uid, version and time."""
        created = copy.deepcopy(document)
        metadata = created["metadata"]
        metadata.setdefault("uid", str(uuid.UUID(int=next(self._numbers), version=4)))
        metadata["creationTimestamp"] = self.clock.stamp()
        self._write("ADDED", None, created)
        if metadata.get("ownerReferences"):
            self.clock.call_in(_COLLECT_S, self._collect)
        return copy.deepcopy(created)

    def replace(self, document: Json) -> Json:
        """Write a new state of an object; an equal state is no change and gets no version."""
        before, after = self._objects[key_of(document)], copy.deepcopy(document)
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if after == before:
            return after
        self._write("MODIFIED", before, after)
        return copy.deepcopy(after)

    def set_conditions(self, key: Key, *new: Condition) -> None:
        """Write conditions into the status of an object, all at once, if it still exists."""
        document = self.get(*key)
        if document is None:
            return
        current = document.get("status", {})
        others = [each for each in current.get("conditions", []) if each["type"] not in {type_ for type_, *_ in new}]
        names, time = ("type", "status", "reason", "message"), {"lastTransitionTime": self.clock.stamp()}
        added = [{**dict(zip(names, each, strict=True)), **time} for each in new]
        self.replace({**document, "status": {**current, "conditions": [*others, *added]}})

    def delete(self, key: Key, *, foreground: bool = False) -> None:
        """Delete an object: after what it owns with the policy Foreground, a running pod once its containers end."""
        document = self.get(*key)
        if document is None or "deletionTimestamp" in document["metadata"]:
            return
        owned = self._owned_by(document["metadata"]["uid"]) if foreground else []
        is_running = key[0] == PODS and document.get("status", {}).get("phase") == "Running"
        if not owned and not is_running:
            self.remove(key)
            return
        document["metadata"]["deletionTimestamp"] = self.clock.stamp()
        if owned:
            document["metadata"]["finalizers"] = ["foregroundDeletion"]
        self.replace(document)
        for each in owned:
            self.clock.call_in(_COLLECT_S, partial(self.delete, each, foreground=True))
        if is_running:
            self.clock.call_in(_ENDS_S, partial(self.remove, key))

    def remove(self, key: Key) -> None:
        """Remove an object at once, whatever its finalizers; what it owns is collected, what waits for it goes on."""
        removed = self._objects.pop(key, None)
        if removed is None:
            return
        self._notify(Change("DELETED", key[0], removed, copy.deepcopy(removed)))
        self.clock.call_in(_COLLECT_S, self._collect)
        uids = {owner["uid"] for owner in removed["metadata"].get("ownerReferences", [])}
        for other, document in list(self._objects.items()):
            metadata = document["metadata"]
            if metadata["uid"] in uids and "finalizers" in metadata and not self._owned_by(metadata["uid"]):
                self.clock.call_in(_COLLECT_S, partial(self.remove, other))

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call a function with every later change."""
        self._listeners.append(listener)

    def _write(self, type_: str, before: Json | None, document: Json) -> None:
        document["metadata"]["resourceVersion"] = str(next(self._numbers))
        self._objects[key_of(document)] = document
        self._notify(Change(type_, key_of(document)[0], before, copy.deepcopy(document)))

    def _notify(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)
        self.clock.changed.notify_all()

    def _owners(self, key: Key) -> set[str]:
        return {owner["uid"] for owner in self._objects[key]["metadata"].get("ownerReferences", [])}

    def _owned_by(self, uid: str) -> list[Key]:
        return [key for key in self._objects if uid in self._owners(key)]

    def _collect(self) -> None:
        """Remove objects that had owners and have none any more."""
        uids = {each["metadata"]["uid"] for each in self._objects.values()}
        for key in list(self._objects):
            if key in self._objects and self._owners(key) and not self._owners(key) & uids:
                self.delete(key)
