"""Watches: the changes of some objects as they happen."""

import json
from collections.abc import Iterator

from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.kinds import Kind
from tests.fake_cluster.selectors import Matches
from tests.fake_cluster.store import Change, Store

_BOOKMARK_S = 60.0
_LONGEST_S = 1800.0
"""A watch without a timeout is closed by the server after half an hour to an hour."""


class Watch:
    """One client's view of the changes of a kind.

    Args:
        since: The version after which changes are told; empty or 0 for all objects first.
        timeout_s: When the server closes it.
    """

    def __init__(
        self,
        store: Store,
        kind: Kind,
        namespace: str,
        selected: Matches,
        *,
        since: str,
        timeout_s: float,
        bookmarks: bool,
    ) -> None:
        self._store, self._kind, self._namespace, self._selected = store, kind, namespace, selected
        self._bookmarks = bookmarks
        now = store.clock.monotonic()
        self._ends = now + (timeout_s or _LONGEST_S)
        self._next_bookmark = now + _BOOKMARK_S
        if since and not since.isdigit():
            raise ApiError(400, f"Invalid value: {since!r}: resource version must be an integer")
        self._initial = since in ("", "0")
        self._version = store.version if self._initial else int(since)

    def lines(self) -> Iterator[bytes]:
        """The events, each a line of JSON, until the time is over or the history is lost."""
        changed = self._store.clock.changed
        with changed:
            first = self._existing() if self._initial else []
        yield from first
        while True:
            with changed:
                until = min(self._ends, self._next_bookmark) if self._bookmarks else self._ends
                self._store.clock.wait_for(self._is_behind, until)
                lines, over = self._next_lines()
            yield from lines
            if over:
                return

    def _existing(self) -> list[bytes]:
        documents = self._store.all(self._kind, self._namespace)
        return [_line("ADDED", each) for each in documents if self._selected(each)]

    def _is_behind(self) -> bool:
        return self._store.version > self._version

    def _next_lines(self) -> tuple[list[bytes], bool]:
        """What there is to tell, and whether it is the last."""
        if self._version < self._store.oldest:
            return [self._gone()], True
        over = self._store.clock.monotonic() >= self._ends or self._store.clock.is_closed
        return [*self._new_lines(), *self._bookmark()], over

    def _new_lines(self) -> list[bytes]:
        changes = [each for each in self._store.history if each.version > self._version]
        self._version = self._store.version
        return [line for change in changes for line in self._line_of(change)]

    def _line_of(self, change: Change) -> Iterator[bytes]:
        if change.kind != self._kind or self._namespace not in ("", change.after["metadata"].get("namespace", "")):
            return
        was = change.before is not None and self._selected(change.before)
        is_ = change.type != "DELETED" and self._selected(change.after)
        if was or is_:
            yield _line("MODIFIED" if was and is_ else "ADDED" if is_ else "DELETED", change.after)

    def _bookmark(self) -> Iterator[bytes]:
        if self._bookmarks and self._store.clock.monotonic() >= self._next_bookmark:
            self._next_bookmark += _BOOKMARK_S
            metadata = {"resourceVersion": str(self._version), "creationTimestamp": None}
            yield _line(
                "BOOKMARK", {"kind": self._kind.name, "apiVersion": self._kind.api_version, "metadata": metadata}
            )

    def _gone(self) -> bytes:
        error = ApiError(410, f"too old resource version: {self._version} ({self._store.oldest + 1})")
        return _line("ERROR", error.status())


def _line(type_: str, document: Json) -> bytes:
    return json.dumps({"type": type_, "object": document}).encode() + b"\n"
