"""Aliases and the audit trail, in real registries."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from components.register.aliases import (
    CHAMPION,
    Action,
    candidate,
    change_alias,
    changes_of,
    history,
    next_count,
    rollback_target,
)
from components.register.snapshot import Version, read_registry
from components.shared.errors import PipelineError
from components.shared.execution import person
from tests.register.conftest import Registered
from tests.register.registrations import git

NAME = "grpo-policy"


@pytest.fixture
def registry(registered: Registered) -> str:
    """A registry with three versions; the last two add no files."""
    location = registered[0].registry
    for number in (2, 3):
        git(Path(location), "commit", "--quiet", "--allow-empty", "-m", f"Version {number}")
        git(Path(location), "tag", "-a", "-m", "as gto does", f"{NAME}@v0.0.{number}")
    return location


def _tag(location: str, number: int, version: str, *, removed: bool = False) -> None:
    name = f"{NAME}#{CHAMPION}{'!' if removed else ''}#{number}"
    git(Path(location), "tag", "-a", "-m", "as gto does", name, f"{NAME}@{version}^{{}}")


def _assign(location: str, version: str, action: Action = "promote", *, reason: str = "better") -> None:
    with read_registry(location) as snapshot:
        found, count = snapshot.version(version), next_count(snapshot, NAME, CHAMPION)
    change_alias(location, found, action, CHAMPION, count, reason, {"Gate": "ok"})


def state(location: str) -> tuple[str | None, str | None]:
    """The numbers of the champion, and of the version to which a rollback would return."""
    with read_registry(location) as snapshot:
        tags = snapshot.aliases().get(f"{NAME}@{CHAMPION}"), rollback_target(snapshot, NAME, CHAMPION)
    champion, back = (each and each.removeprefix(f"{NAME}@") for each in tags)
    return champion, back


def test_registrations_promotions_and_rollbacks_are_kept_with_who_when_and_why(registry: str) -> None:
    """A reason may contain anything; candidates are counted apart; GTO sees the same champion."""
    reason = "more right answers\n\nAction: rollback\n#\x1b and faster"
    _assign(registry, "v0.0.1", reason=reason)
    _assign(registry, "v0.0.3")
    _assign(registry, "v0.0.1", "rollback", reason="slow")
    with read_registry(registry) as snapshot:
        first, _, last = changes_of(snapshot, NAME, CHAMPION)
        assert [change.action for change in history(snapshot, NAME)][-3:] == ["promote", "promote", "rollback"]
        (registered,) = (each for each in history(snapshot, NAME) if each.alias == "candidate")
        name, message = candidate(snapshot, NAME, f"{NAME}@v0.0.3", "passed the gate")
    assert (registered.action, registered.version) == ("register", f"{NAME}@v0.0.1")
    assert name == f"{NAME}#candidate#2"
    assert message.startswith(f"Register candidate: {NAME}@v0.0.3\n\npassed the gate\n\nAction: register\nBy: ")
    assert (first.action, first.version, first.by) == ("promote", f"{NAME}@v0.0.1", person())
    assert (first.reason, first.facts) == ("more right answers Action: rollback # and faster", {"Gate": "ok"})
    assert first.at <= last.at <= datetime.now(UTC)
    command = [sys.executable, "-m", "gto.cli", "show", "--repo", registry, f"{NAME}#{CHAMPION}", "--json"]
    shown = subprocess.run(command, capture_output=True, check=True)
    assert [each["version"] for each in json.loads(shown.stdout)] == ["v0.0.1"]


def test_the_last_of_many_promotions_counts_and_a_removal_ends_them(registry: str) -> None:
    """The tenth as well: counts are numbers."""
    for number in range(1, 12):
        _tag(registry, number, f"v0.0.{1 + number % 3}")
    assert state(registry) == ("v0.0.3", "v0.0.2")
    _tag(registry, 12, "v0.0.3", removed=True)
    assert state(registry) == (None, None)
    _tag(registry, 13, "v0.0.1")
    assert state(registry) == ("v0.0.1", None)


def test_rollback_goes_back_one_version_at_a_time(registry: str) -> None:
    """It skips versions that an earlier rollback moved away from, and withdrawn ones."""
    assert state(registry) == (None, None)
    for version in ("v0.0.1", "v0.0.2", "v0.0.3"):
        _assign(registry, version)
    assert state(registry) == ("v0.0.3", "v0.0.2")
    _assign(registry, "v0.0.2", "rollback")
    assert state(registry) == ("v0.0.2", "v0.0.1")
    _assign(registry, "v0.0.3")
    git(Path(registry), "tag", f"{NAME}@v0.0.2!")
    assert state(registry) == ("v0.0.3", "v0.0.1")


def test_one_of_many_simultaneous_decisions_at_a_url_wins(registry: str, tmp_path: Path) -> None:
    """The server takes one tag with the next number; the others are told of it."""
    git(tmp_path, "clone", "--quiet", "--bare", registry, "shared.git")
    url = f"file://{tmp_path}/shared.git"
    with read_registry(url) as snapshot:
        versions = [snapshot.version(f"v0.0.{number}") for number in (1, 2, 3)]

    def promote(version: Version) -> str:
        try:
            change_alias(url, version, "promote", CHAMPION, 1, f"for {version.version}", {})
        except PipelineError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        refused = [*filter(None, pool.map(promote, versions)), promote(versions[0])]  # the last after the others
    with read_registry(url) as snapshot:
        (change,) = changes_of(snapshot, NAME, CHAMPION)
    message = f"{NAME}@champion has become {change.version} in the meantime (by {change.by}: {change.reason}); nothing"
    assert [message in line for line in refused] == [True] * 3


def test_versions_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """v0.0.10 comes after v0.0.9; what was withdrawn, or is of another model, is not among them."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "x")
    for name in (*(f"{NAME}@v0.0.{number}" for number in (9, 10, 11)), f"{NAME}@v0.0.11!#1", "grpo@v0.0.1"):
        git(tmp_path, "tag", name)
    with read_registry(str(tmp_path)) as snapshot:
        assert [version.version for version in snapshot.versions(NAME)] == ["v0.0.9", "v0.0.10"]
        assert snapshot.versions(NAME, withdrawn=True)[-1].version == "v0.0.11"
        assert snapshot.version("grpo@latest").tag == "grpo@v0.0.1"
        assert snapshot.version(f"{NAME}@latest").tag == f"{NAME}@v0.0.10"
