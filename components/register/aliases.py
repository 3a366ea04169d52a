"""Aliases of versions, and the audit trail: which version is the champion, and who decided it, when and why.

An alias is a stage of GTO: an annotated tag `<name>#<alias>#<count>` on the commit of a version. The tag with the
highest count is in force. A change is one new tag, pushed atomically: a promotion that is killed has happened or not,
and if two people decide at the same time, the second gets an error. No tag is ever moved or removed, so the tags are
the audit trail.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, get_args

from components.register.registry import open_repository
from components.register.snapshot import Assignment, Snapshot, Version, read_registry
from components.shared.errors import PipelineError
from components.shared.execution import person

CANDIDATE, CHAMPION = "candidate", "champion"
_NAME = re.compile("[a-z0-9-]+")
Action = Literal["register", "assign", "remove", "promote", "rollback"]
"""`assign` and `remove` are changes made by hand with GTO."""


@dataclass(frozen=True)
class Change:
    """One line of the audit trail: a registration, or a change of an alias."""

    action: Action
    version: str
    """Tag of the version."""
    alias: str | None
    """None for a registration without an alias."""
    count: int
    """Number of this change among the changes of the alias, from 1; 0 without an alias."""
    at: datetime
    by: str
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)
    """Results of the checks before the change, by name."""


def history(snapshot: Snapshot, name: str) -> list[Change]:
    """Return all registrations of a model's versions and changes of its aliases, the oldest first.

    A registration that gave an alias is one entry, read from the alias; others are read from the tags of the versions.
    """
    changes = changes_of(snapshot, name)
    with_alias = {change.version for change in changes if change.action == "register"}
    registrations = [
        Change("register", version.tag, None, 0, datetime.fromisoformat(version.at), version.by, reason="")
        for version in snapshot.versions(name, withdrawn=True)
        if version.tag not in with_alias
    ]
    # At the same moment, a registration comes before changes of aliases: its count is 0.
    return sorted([*registrations, *changes], key=lambda change: (change.at, change.count))


def changes_of(snapshot: Snapshot, name: str, alias: str | None = None) -> list[Change]:
    """Return the changes of an alias of a model, or of all its aliases, sorted by count."""
    tags = {version.commit: version.tag for version in snapshot.versions(name, withdrawn=True)}
    return [_change(each, tags.get(each.commit, each.commit)) for each in snapshot.assignments(name, alias)]


def rollback_target(snapshot: Snapshot, name: str, alias: str) -> str | None:
    """Return the tag to which a rollback moves an alias, None without one; skip withdrawn and rolled back versions."""
    stack: list[str] = []  # versions that had the alias, the current one last
    for change in changes_of(snapshot, name, alias):
        if change.action == "remove":
            stack.clear()
        elif change.action == "rollback" and change.version in stack:
            while stack[-1] != change.version:
                stack.pop()
        else:
            stack.append(change.version)
    usable = {version.tag for version in snapshot.versions(name)}
    return next((tag for tag in reversed(stack[:-1]) if tag in usable and tag != stack[-1]), None)


def change_alias(
    location: str, version: Version, action: Action, alias: str, count: int, reason: str, facts: Mapping[str, str]
) -> None:
    """Give an alias to a version in a registry, atomically, as the `count`th change of the alias.

    PipelineError if somebody else has made that change in the meantime, or the registry refuses it.
    """
    change = Change(action, version.tag, alias, count, datetime.now(UTC), person(), reason, facts)
    with open_repository(location) as registry:
        is_next = next_count(registry, version.name, alias) == count
        tag, message = _tag(version.name, change)
        if not (is_next and registry.publish({tag: message}, version.commit)):
            with read_registry(location) as snapshot:
                last = changes_of(snapshot, version.name, alias)[-1]
            raise PipelineError(
                f"{location}: {version.name}@{alias} has become {last.version} in the meantime (by {last.by}: "
                f"{last.reason}); nothing was changed"
            )


def candidate(snapshot: Snapshot, name: str, version: str, reason: str) -> tuple[str, str]:
    """Return the tag that makes a version the candidate when it is registered, and the tag's message."""
    count = next_count(snapshot, name, CANDIDATE)
    return _tag(name, Change("register", version, CANDIDATE, count, datetime.now(UTC), person(), reason))


def check_alias(alias: str) -> None:
    """Raise PipelineError for an invalid alias."""
    if not _NAME.fullmatch(alias) or alias == "latest":
        raise PipelineError(
            f"alias {alias}: accepted are lowercase letters, digits and hyphens, but `latest` is the newest version"
        )


def next_count(snapshot: Snapshot, name: str, alias: str) -> int:
    """Return the count of the next change of an alias."""
    return max((each.count for each in snapshot.assignments(name, alias)), default=0) + 1


def _tag(name: str, change: Change) -> tuple[str, str]:
    """Return the tag of a change, and its message: a title, the reason, and the facts as trailers `key: value`."""
    trailers = {"Action": change.action, "By": change.by, **change.facts}
    lines = (f"{key}: {_one_line(value)}" for key, value in trailers.items())
    title = f"{change.action.capitalize()} {change.alias}: {change.version}"
    message = "\n\n".join([title, _one_line(change.reason), "\n".join(lines)]) + "\n"
    return f"{name}#{change.alias}#{change.count}", message


def _change(assignment: Assignment, version: str) -> Change:
    """Return the change that a tag records; a tag made by hand with GTO has a message without trailers."""
    paragraphs = assignment.message.split("\n\n")
    reason, trailers = " ".join(paragraphs[1:-1]), paragraphs[-1].splitlines()
    facts = {key: value for key, _, value in (line.partition(": ") for line in trailers)}
    recorded, by = facts.pop("Action", None), facts.pop("By", assignment.by)
    action: Action | None = next((each for each in get_args(Action) if each == recorded), None)
    if action is None:  # made by hand
        action = "remove" if assignment.withdrawn else "assign"
        reason, facts = assignment.message, {}
    at = datetime.fromisoformat(assignment.at)
    return Change(action, version, assignment.alias, assignment.count, at, by, _one_line(reason), facts)


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
