"""A registry at a URL, to which others push at the same time: a real bare repository with hooks."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from components.register import register as module
from components.register import registry
from components.register.config import RegisterConfig
from components.register.register import ProposedError
from components.register.registry import Registry, fetch
from components.register.snapshot import read_registry
from components.shared import lineage
from components.shared.errors import PipelineError, RetryableError
from tests.register.registrations import git, make_config, make_policy, run_register, set_hook, subjects, tags

REFUSE = """#!/bin/sh
case "$1" in %s) echo "main is protected" >&2; exit 1 ;; esac
"""


def _config_of(shared: Path) -> RegisterConfig:
    return make_config(shared.parent, registry=f"file://{shared}", storage=str(shared.parent / "store"))


def commit_of_another(shared: Path, number: int) -> None:
    """Somebody else changes the README, and a file that every version has."""
    work = shared.parent / f"another-{number}"
    git(shared.parent, "clone", "--quiet", str(shared), str(work))
    (work / "README.md").write_text(f"Ours, {number}\n")
    (work / "version.json").write_text('{"policy_digest": "another"}')
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "-m", f"Another {number}")
    git(work, "push", "--quiet", "origin", "HEAD:main")


def before_each_push(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> list[str]:
    """Let somebody act just before each push; returns the versions that were pushed."""
    pushed: list[str] = []
    original = Registry.publish

    def publish(self: Registry, tags: Mapping[str, str], commit: str | None = None) -> bool:
        pushed.append(next(iter(tags)).partition("@")[2])
        act(len(pushed))
        return original(self, tags, commit)

    monkeypatch.setattr(Registry, "publish", publish)
    return pushed


@pytest.mark.slow
def test_others_changes_are_kept(passed: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit before one push and a version before the next: the third push succeeds, with the next number."""

    def act(attempt: int) -> None:
        if attempt == 1:
            commit_of_another(shared, 1)
        if attempt == 2:
            git(shared, "tag", "grpo-policy@v0.0.1", "main")

    pushed = before_each_push(monkeypatch, act)
    policy = make_policy(tmp_path / "policy")
    version = run_register(_config_of(shared), policy, passed, tmp_path / "out")
    assert pushed == ["v0.0.1", "v0.0.1", "v0.0.2"]
    assert version["tag"] == "grpo-policy@v0.0.2"
    assert git(shared, "log", "--format=%s", "main").splitlines() == ["Register grpo-policy@v0.0.2", "Another 1"]
    assert git(shared, "show", "main:README.md") == "Ours, 1\n"
    assert fetch(f"file://{shared}", "v0.0.2", tmp_path / "fetched").tag == version["tag"]
    assert run_register(_config_of(shared), policy, passed, tmp_path / "again") == version


@pytest.mark.slow
def test_ever_changing_is_retryable(
    passed: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempts are limited, and the run may be repeated."""
    monkeypatch.setattr(module, "_ATTEMPTS", 2)
    pushed = before_each_push(monkeypatch, lambda attempt: commit_of_another(shared, attempt))
    with pytest.raises(RetryableError, match="changed before each of 2 pushes"):
        run_register(_config_of(shared), make_policy(tmp_path / "policy"), passed, tmp_path / "out")
    assert len(pushed) == 2
    assert tags(shared) == []


@pytest.mark.slow
def test_stale_lock_is_retryable(passed: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has changed anything: it may be gone the next time, and git's words name the file."""
    monkeypatch.setattr(registry, "_PUSH_PAUSES_S", (0.0,))
    (shared / "refs/heads").mkdir(parents=True, exist_ok=True)
    (shared / "refs/heads/main.lock").touch()
    with pytest.raises(RetryableError, match=r"does not accept grpo-policy@v0\.0\.1: .*main\.lock"):
        run_register(_config_of(shared), make_policy(tmp_path / "policy"), passed, tmp_path / "out")
    assert tags(shared) == []


@pytest.mark.parametrize("protects_tags", [False, True])
def test_version_for_a_protected_branch_goes_to_a_new_branch(
    passed: Path, shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], protects_tags: bool
) -> None:
    """With the text of a pull request; registered at once by its tag, or once somebody has pushed that as it says."""
    set_hook(shared, "update", REFUSE % ("refs/heads/main|refs/tags/*" if protects_tags else "refs/heads/main"))
    policy, tag = make_policy(tmp_path / "policy"), "grpo-policy@v0.0.1"
    refused = "accepts neither grpo-policy@v0.0.1 nor a push to its branch"
    for name in ("out", "again") if protects_tags else ("out",):
        with pytest.raises(ProposedError, match=refused) if protects_tags else contextlib.nullcontext():
            run_register(_config_of(shared), policy, passed, tmp_path / name)
    text = (tmp_path / "out/pull_request.md").read_text()
    assert text.startswith(f"Register {tag}\n\nThe registry did not accept a push to its branch: ")
    assert "main is protected" in text
    assert text in capfd.readouterr().out
    assert git(shared, "branch", "--list", "--format=%(refname:short)").split() == ["looks", f"register/{tag}"]
    assert len(subjects(shared)) == 1
    assert tags(shared) == ([] if protects_tags else [tag])
    if protects_tags:
        with pytest.raises(PipelineError, match="main is protected") as error:  # the number is taken
            run_register(_config_of(shared), make_policy(tmp_path / "other", b"others"), passed, tmp_path / "next")
        assert not isinstance(error.value, ProposedError)
    (shared / "hooks/update").unlink()
    git(shared, "branch", "main", f"register/{tag}")
    if protects_tags:
        git(tmp_path, "clone", "--quiet", str(shared), "maintainer")
        commands = text.partition("```bash\n")[2].partition("```")[0]
        environment = {**os.environ, "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "b"}
        subprocess.run(["bash", "-ec", commands], cwd=tmp_path / "maintainer", env=environment, check=True)
    fetch(f"file://{shared}", tag, tmp_path / "fetched")
    assert lineage.digest(tmp_path / "fetched") == lineage.digest(policy)
    with read_registry(f"file://{shared}") as snapshot:
        assert snapshot.verify(snapshot.versions()).faults == []
        assert snapshot.aliases() == {"grpo-policy@candidate": tag}


def test_refusal_is_final(passed: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A protected branch is not pushed to again; the tag, which the server would accept, is not pushed without it."""
    set_hook(shared, "update", REFUSE % "refs/heads/*")
    pushed = before_each_push(monkeypatch, lambda _: None)
    with pytest.raises(PipelineError, match="main is protected") as refused:
        run_register(_config_of(shared), make_policy(tmp_path / "policy"), passed, tmp_path / "out")
    assert refused.value.exit_code == 2
    assert f"file://{shared}: does not accept grpo-policy@v0.0.1" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(pushed) == 1
    assert tags(shared) == []
    assert git(shared, "branch", "--list") == ""
