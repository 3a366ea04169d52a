"""The objects of the cluster, and the garbage collector."""

import copy
import itertools
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import Kind, kind_of

Key = tuple[Kind, str, str]
"""Kind, namespace (empty for kinds without one) and name."""
_COLLECT_S = 1.0
"""Time from the deletion of an object's last owner to its own."""


class Change(NamedTuple):
    """One write to the store."""

    type: str
    """ADDED, MODIFIED or DELETED."""
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

    def patch(self, key: Key, **parts: Any) -> None:
        """Set top-level parts of an object if it still exists, as controllers do."""
        document = self.get(*key)
        if document is not None:
            self.replace({**document, **parts})

    def delete(self, key: Key, *, foreground: bool) -> None:
        """Delete an object: after what it owns with the policy Foreground, at once otherwise."""
        document = self.get(*key)
        if document is None:
            return
        owned = [each for each in self._objects if document["metadata"]["uid"] in self._owners(each)]
        if not foreground or not owned:
            self.remove(key)
            return
        document["metadata"] |= {"finalizers": ["foregroundDeletion"], "deletionTimestamp": self.clock.stamp()}
        self.replace(document)
        for each in (*owned, key):
            self.clock.call_in(_COLLECT_S, partial(self._remove_if, each, self._objects[each]["metadata"]["uid"]))

    def remove(self, key: Key) -> None:
        """Remove an object, whatever its finalizers; what it owns is collected."""
        removed = self._objects.pop(key, None)
        if removed is not None:
            self._notify(Change("DELETED", key[0], removed, copy.deepcopy(removed)))
            self.clock.call_in(_COLLECT_S, self._collect)

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call a function with every later change."""
        self._listeners.append(listener)

    def _remove_if(self, key: Key, uid: str) -> None:
        """Remove an object unless it is another one of the same key."""
        if key in self._objects and self._objects[key]["metadata"]["uid"] == uid:
            self.remove(key)

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

    def _collect(self) -> None:
        """Remove objects that had owners and have none any more."""
        uids = {each["metadata"]["uid"] for each in self._objects.values()}
        for key in list(self._objects):
            if self._owners(key) and not self._owners(key) & uids:
                self.remove(key)
