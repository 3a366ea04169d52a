"""The objects of the cluster, each change of them, and what they leave to the garbage collector."""

import copy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.errors import Json
from tests.fake_cluster.kinds import Kind, kind_of

Key = tuple[Kind, str, str]
"""Kind, namespace (empty for kinds without one) and name."""
FOREGROUND = "foregroundDeletion"
"""The finalizer of an object that goes after what it owns."""
COLLECT_S = 1.0
"""How long after its last owner an object is removed."""


@dataclass(frozen=True)
class Change:
    """One write, as watches tell it."""

    version: int
    type: str
    kind: Kind
    before: Json | None
    after: Json


def rfc3339(moment: datetime) -> str:
    """Seconds are all that Kubernetes keeps in metadata."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def key_of(document: Json) -> Key:
    """Where an object is kept."""
    metadata = document["metadata"]
    return kind_of(document["apiVersion"], document["kind"]), metadata.get("namespace", ""), metadata["name"]


class Store:
    """Objects by key, and the history of their changes as far as it is kept. Callers hold the clock's lock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.version = 1
        self.oldest = 0
        """Changes up to this version are forgotten: a watch from an older one gets 410 Gone."""
        self.history: list[Change] = []
        self._objects: dict[Key, Json] = {}
        self._num_uids = 0
        self._listeners: list[Callable[[Change], None]] = []

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        """A copy of an object."""
        return copy.deepcopy(self._objects.get((kind, namespace, name)))

    def all(self, kind: Kind, namespace: str = "") -> list[Json]:
        """Copies of all objects of a kind, of one namespace or of all, in the order of their keys."""
        found = sorted((key[1:], key) for key in self._objects if key[0] == kind and namespace in ("", key[1]))
        return [copy.deepcopy(self._objects[key]) for _, key in found]

    def create(self, document: Json) -> Json:
        """Keep a new object; gives it its uid, version and time."""
        made = copy.deepcopy(document)
        metadata = made["metadata"]
        self._num_uids += 1
        metadata.setdefault("uid", str(uuid.UUID(int=self._num_uids, version=4)))
        metadata["creationTimestamp"] = rfc3339(self.clock.now())
        metadata["generation"] = 1
        self._write("ADDED", None, made)
        if metadata.get("ownerReferences"):
            self.collect_soon()
        return copy.deepcopy(made)

    def replace(self, document: Json) -> Json:
        """Keep a new state of an object; equal states are no change and get no version."""
        before = self._objects[key_of(document)]
        made = copy.deepcopy(document)
        made["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if made == before:
            return made
        if _desired(made) != _desired(before):
            made["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        self._write("MODIFIED", before, made)
        if "deletionTimestamp" in made["metadata"] and not made["metadata"].get("finalizers"):
            self.remove(key_of(made))
        return copy.deepcopy(made)

    def patch(self, kind: Kind, namespace: str, name: str, **parts: Any) -> None:
        """Set top-level parts of an object, if it is still there: what the cluster's own controllers write."""
        document = self.get(kind, namespace, name)
        if document is not None:
            self.replace({**document, **parts})

    def remove(self, key: Key) -> None:
        """Forget an object, and have the garbage collector look at what it owned."""
        gone = self._objects.pop(key, None)
        if gone is None:
            return
        self.version += 1
        last = copy.deepcopy(gone)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._tell(Change(self.version, "DELETED", key[0], gone, last))
        self.collect_soon()

    def owned_by(self, uid: str) -> Iterator[Json]:
        """The objects that name an owner."""
        for document in list(self._objects.values()):
            if any(owner["uid"] == uid for owner in document["metadata"].get("ownerReferences", [])):
                yield copy.deepcopy(document)

    def release(self, uid: str) -> None:
        """Take an owner off what it owns, as deletion with the policy Orphan does."""
        for document in self.owned_by(uid):
            owners = [owner for owner in document["metadata"]["ownerReferences"] if owner["uid"] != uid]
            document["metadata"]["ownerReferences"] = owners
            self.replace(document)

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Have every later change told."""
        self._listeners.append(listener)

    def compact(self) -> None:
        """Forget all history, as a busy server does after some minutes."""
        self.oldest = self.version
        self.history.clear()
        self.clock.changed.notify_all()

    def collect_soon(self) -> None:
        """Have the garbage collector look."""
        self.clock.call_in(COLLECT_S, self._collect)

    def _collect(self) -> None:
        """Remove what has owners of which none stays, then those that waited for it (foreground deletion)."""
        there = self._by_uid()
        staying = {uid for uid, document in there.items() if not _waits_for_owned(document)}
        for key, document in list(self._objects.items()):
            owners = document["metadata"].get("ownerReferences")
            if owners and not any(owner["uid"] in staying for owner in owners):
                self._collect_one(key, document, is_awaited=any(owner["uid"] in there for owner in owners))
        for uid, document in self._by_uid().items():
            if _waits_for_owned(document) and not any(True for _ in self.owned_by(uid)):
                done = copy.deepcopy(document)
                done["metadata"]["finalizers"].remove(FOREGROUND)
                self.replace(done)

    def _collect_one(self, key: Key, document: Json, *, is_awaited: bool) -> None:
        """Remove an object; one whose owner waits for it goes after what it owns itself."""
        if not is_awaited or not any(True for _ in self.owned_by(document["metadata"]["uid"])):
            self.remove(key)
        elif not _waits_for_owned(document):
            waiting = copy.deepcopy(document)
            waiting["metadata"]["finalizers"] = [*waiting["metadata"].get("finalizers", []), FOREGROUND]
            waiting["metadata"]["deletionTimestamp"] = rfc3339(self.clock.now())
            self.replace(waiting)
            self.collect_soon()

    def _by_uid(self) -> dict[str, Json]:
        return {document["metadata"]["uid"]: document for document in self._objects.values()}

    def _write(self, type_: str, before: Json | None, document: Json) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self._objects[key_of(document)] = document
        self._tell(Change(self.version, type_, key_of(document)[0], before, copy.deepcopy(document)))

    def _tell(self, change: Change) -> None:
        self.history.append(change)
        for listener in self._listeners:
            listener(change)
        self.clock.changed.notify_all()


def _desired(document: Json) -> Json:
    """What an object wants, without what is known about it."""
    return {name: part for name, part in document.items() if name not in ("metadata", "status")}


def _waits_for_owned(document: Json) -> bool:
    return FOREGROUND in document["metadata"].get("finalizers", [])
