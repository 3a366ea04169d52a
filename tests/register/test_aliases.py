"""Aliases and the audit trail, in real registries."""

import json
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from components.register.aliases import (
    CHAMPION,
    Action,
    Change,
    before,
    candidate,
    change_alias,
    changes_of,
    history,
    next_count,
)
from components.register.snapshot import read_registry
from components.shared.errors import PipelineError
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


def assign(location: str, version: str, action: Action = "promote", *, reason: str = "better") -> None:
    """Make a version the champion."""
    with read_registry(location) as snapshot:
        found, count = snapshot.version(version), next_count(snapshot, NAME, CHAMPION)
    now = datetime.now(UTC)
    change_alias(location, found, Change(action, found.tag, CHAMPION, count, now, "jane@host", reason, {"Gate": "ok"}))


def champion(location: str) -> str | None:
    """The version that is the champion."""
    with read_registry(location) as snapshot:
        return snapshot.aliases().get(f"{NAME}@{CHAMPION}")


def back(location: str) -> str | None:
    """The version that a rollback would return to."""
    with read_registry(location) as snapshot:
        return before(snapshot, NAME, CHAMPION)


def test_registration_makes_the_version_the_candidate(registered: Registered) -> None:
    """With the push that registers it; who and why are in the audit trail."""
    with read_registry(registered[0].registry) as snapshot:
        assert snapshot.aliases() == {f"{NAME}@candidate": f"{NAME}@v0.0.1"}
        (change,) = history(snapshot, NAME)
    assert (change.action, change.version, change.reason) == ("register", f"{NAME}@v0.0.1", "passed the gate")
    assert "@" in change.by


def test_promotions_and_rollbacks_are_kept_with_who_when_and_why(registry: str) -> None:
    """A reason may contain anything; GTO sees the same champion."""
    reason = "more right answers\n\nAction: rollback\n# and faster"
    assign(registry, "v0.0.1", reason=reason)
    assign(registry, "v0.0.3")
    assign(registry, "v0.0.1", "rollback", reason="slow")
    with read_registry(registry) as snapshot:
        first, _, last = changes_of(snapshot, NAME, CHAMPION)
        assert [change.action for change in history(snapshot, NAME)][-3:] == ["promote", "promote", "rollback"]
    assert (first.action, first.version, first.by) == ("promote", f"{NAME}@v0.0.1", "jane@host")
    assert first.reason == "more right answers Action: rollback # and faster"
    assert first.facts == {"Gate": "ok"}
    assert first.at <= last.at <= datetime.now(UTC)
    shown = subprocess.run(
        [sys.executable, "-m", "gto.cli", "show", "--repo", registry, f"{NAME}#{CHAMPION}", "--json"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert [each["version"] for each in json.loads(shown.stdout)] == ["v0.0.1"]


def test_the_last_of_many_promotions_counts(registry: str) -> None:
    """The tenth as well: counts are numbers."""
    for number in range(11):
        version = f"v0.0.{1 + number % 3}"
        assign(registry, version)
        assert champion(registry) == f"{NAME}@{version}"


def test_rollback_does_not_go_back_past_a_removal(registry: str) -> None:
    """Whoever took the alias away meant all that had it before."""
    assign(registry, "v0.0.1")
    assign(registry, "v0.0.2")
    git(Path(registry), "tag", "-a", "-m", "as gto does", f"{NAME}#{CHAMPION}!#3", f"{NAME}@v0.0.2^{{}}")
    assert champion(registry) is None
    assert back(registry) is None
    assign(registry, "v0.0.3")
    assert back(registry) is None


def test_rollback_goes_back_one_version_at_a_time(registry: str) -> None:
    """It skips versions that an earlier rollback moved away from, and withdrawn ones."""
    assert back(registry) is None
    assign(registry, "v0.0.1")
    assert back(registry) is None
    assign(registry, "v0.0.2")
    assign(registry, "v0.0.3")
    assert back(registry) == f"{NAME}@v0.0.2"
    assign(registry, "v0.0.2", "rollback")
    assert back(registry) == f"{NAME}@v0.0.1"
    assign(registry, "v0.0.3")
    assert back(registry) == f"{NAME}@v0.0.2"
    git(Path(registry), "tag", f"{NAME}@v0.0.2!")
    assert back(registry) == f"{NAME}@v0.0.1"


def test_second_of_two_decisions_is_told_of_the_first(registry: str) -> None:
    """Both were made with the same champion in view; nothing of the second happens."""
    with read_registry(registry) as snapshot:
        versions = [snapshot.version(f"v0.0.{number}") for number in (2, 3)]
        change = Change("promote", "", CHAMPION, 1, datetime.now(UTC), "jane@host", "first")
    change_alias(registry, versions[0], change)
    with pytest.raises(PipelineError, match=rf"{NAME}@champion has become {NAME}@v0\.0\.2 .*by jane@host: first"):
        change_alias(registry, versions[1], change)
    assert champion(registry) == f"{NAME}@v0.0.2"


def test_one_of_many_simultaneous_decisions_at_a_url_wins(registry: str, tmp_path: Path) -> None:
    """The server takes one tag with the next number."""
    url = f"file://{git(tmp_path, 'clone', '--quiet', '--bare', registry, 'shared.git') or tmp_path / 'shared.git'}"
    with read_registry(url) as snapshot:
        versions = [snapshot.version(f"v0.0.{number}") for number in (1, 2, 3)]
    refused: list[str] = []

    def promote(number: int) -> None:
        change = Change("promote", "", CHAMPION, 1, datetime.now(UTC), f"{number}@host", "now")
        try:
            change_alias(url, versions[number], change)
        except PipelineError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=promote, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with read_registry(url) as snapshot:
        (change,) = changes_of(snapshot, NAME, CHAMPION)
    assert len(refused) == 2
    assert all(f"has become {change.version} in the meantime" in line for line in refused)


def test_candidates_are_counted_apart_from_champions(registry: str) -> None:
    """So that a registration never takes the number of a promotion."""
    assign(registry, "v0.0.1")
    with read_registry(registry) as snapshot:
        tag, message = candidate(snapshot, NAME, f"{NAME}@v0.0.3", "passed the gate")
    assert tag == f"{NAME}#candidate#2"
    assert message.startswith(f"Register candidate: {NAME}@v0.0.3\n\npassed the gate\n\nAction: register\nBy: ")
