"""How images are named, and what is refused before anything is built."""

import subprocess
import sys
from pathlib import Path

import pytest

from images.build import BuildError, main, mounts, pinned, revision, source

DIGEST = "a" * 64


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of code."""
    (tmp_path / "components").mkdir()
    for name in ("components/code.py", "README.md"):
        (tmp_path / name).write_text("one\n")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "one"]):
        _git(tmp_path, *command)
    return tmp_path


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_base_is_named_by_its_digest() -> None:
    """Or by the id of a local image; a tag, or half of a digest, could mean another image tomorrow."""
    for base in (f"docker.io/library/python@sha256:{DIGEST}", f"sha256:{DIGEST}", DIGEST):
        assert pinned(base) == base
    for base in ("python:3.11", f"python@sha256:{DIGEST[1:]}", "a" * 12):
        with pytest.raises(BuildError, match="digest"):
            pinned(base)


def test_a_missing_base_or_engine_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what is needed; exit code 2."""
    for options, message in (([], "BASE=docker.io/library/python@sha256:..."), (["--base", DIGEST], "no-such-engine")):
        monkeypatch.setenv("CONTAINER_ENGINE", "no-such-engine" if options else "true")
        monkeypatch.setattr(sys, "argv", ["build", *options])
        assert main() == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_images_are_pushed_once_they_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    """Both of them, and not what one is built from; one that cannot be pushed is one line."""
    engine, log = tmp_path / "engine", tmp_path / "log"
    engine.write_text(f'#!/bin/sh\necho "$@" >> {log}\ntest "$1" != push -o "{fails}" = False\n')
    engine.chmod(0o755)
    monkeypatch.setenv("CONTAINER_ENGINE", str(engine))
    monkeypatch.setattr(sys, "argv", ["build", "--base", DIGEST, "--registry", "registry.example.com/ml", "--push"])
    assert main() == (2 if fails else 0)
    out, error = capfd.readouterr()
    pushed = [line.removeprefix("push ") for line in log.read_text().splitlines() if line.startswith("push ")]
    light = "registry.example.com/ml/grpo-pipeline/python-light:"
    assert [name.startswith(light) for name in pushed] == ([True] if fails else [True, False])
    assert out.splitlines()[:-1] == ([] if fails else pushed)
    assert ("python-light" in error and "could not be pushed" in error and error.count("\n") == 1) == fails


def test_the_folder_with_a_wheel_of_torch_reaches_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folders that pip is told of, the first that holds one; otherwise none."""
    for name in ("SSL_CERT_FILE", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    folders = [tmp_path / name for name in ("empty", "wheels", "others")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", f"https://example.org/wheels {' '.join(map(str, folders))}")
    assert mounts() == []
    for folder in folders[1:]:
        (folder / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert mounts() == ["--build-context", f"wheels={folders[1]}"]


def test_images_are_named_after_what_is_in_them(repository: Path) -> None:
    """The tag is the revision where that is committed; other contents have names of their own."""
    (repository / "README.md").write_text("other text\n")
    head = _git(repository, "rev-parse", "HEAD")
    assert revision(repository) == head
    for name in ("components/code.py", "components/new.py", "requirements.lock"):
        names = []
        for content in ("two = 2\n", "three = 3\n", "two = 2\n"):
            (repository / name).write_text(content)
            names.append(revision(repository))
        assert names[0].startswith(f"{head}-dirty-")
        assert names[0] == names[2] != names[1]
    with pytest.raises(BuildError, match="git"):
        revision(repository.parent)


def test_the_label_of_the_source_holds_no_secret(repository: Path) -> None:
    """Where the code is published, without credentials; a folder of this machine is no source for anybody."""
    public = "https://example.org/team/code.git"
    _git(repository, "remote", "add", "origin", public)
    for remote, published in ((public.replace("://", "://user:secret@"), public), (public, public), ("/home/me", "")):
        _git(repository, "remote", "set-url", "origin", remote)
        assert source(repository) == published
