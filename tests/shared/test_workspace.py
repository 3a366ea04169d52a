"""How a failure of git is told from one that may pass."""

import subprocess
from pathlib import Path

import pytest

from components.shared.errors import PipelineError, RetryableError
from components.shared.versioning import Workspace


def test_a_server_that_is_not_there_may_come_back(tmp_path: Path) -> None:
    """What fails because of the network is retryable, and names the address."""
    with pytest.raises(RetryableError, match=r"git: unable to access 'http://127\.0\.0\.1:9/models\.git/': Failed to"):
        Workspace(tmp_path, tmp_path).git("clone", "http://127.0.0.1:9/models.git")


def test_a_repository_that_is_not_there_stays_away(tmp_path: Path) -> None:
    """Trying again would not help."""
    with pytest.raises(PipelineError, match="gone") as failed:
        Workspace(tmp_path, tmp_path).git("clone", str(tmp_path / "gone"))
    assert failed.value.exit_code == 2


def test_a_refused_push_is_told_in_the_words_of_the_server(tmp_path: Path) -> None:
    """What a hook prints is the reason, and which of the refs it refused."""
    shared, work = tmp_path / "shared.git", Workspace(tmp_path / "work", tmp_path)
    subprocess.run(["git", "init", "--quiet", "--bare", str(shared)], check=True)
    (shared / "hooks" / "update").write_text("#!/bin/sh\necho 'no releases on Friday' >&2\nexit 1\n")
    (shared / "hooks" / "update").chmod(0o755)
    work.folder.mkdir()
    work.git("init", "--quiet", "--initial-branch", "main")
    work.git("commit", "--quiet", "--allow-empty", "--message", "x")
    with pytest.raises(PipelineError, match=r"remote rejected\] HEAD -> main \(hook declined\); no releases on Friday"):
        work.git("push", "--quiet", str(shared), "HEAD:refs/heads/main")


def test_a_push_that_came_too_late_is_no_failure_of_the_network(tmp_path: Path) -> None:
    """Although the server hangs up on an atomic push that it does not take."""
    shared = f"file://{tmp_path}/shared.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "shared.git")], check=True)
    for name, refused in (("first", False), ("second", True)):
        work = Workspace(tmp_path / name, tmp_path)
        work.folder.mkdir()
        work.git("init", "--quiet", "--initial-branch", "main")
        work.git("commit", "--quiet", "--allow-empty", "--message", name)
        work.git("tag", name)
        push = ("push", "--quiet", "--atomic", shared, "HEAD:refs/heads/main", f"refs/tags/{name}")
        if not refused:
            work.git(*push)
            continue
        with pytest.raises(PipelineError, match=r"rejected\] +HEAD -> main \(fetch first\)") as failed:
            work.git(*push)
        assert failed.value.exit_code == 2
