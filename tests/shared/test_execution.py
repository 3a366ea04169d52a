"""How a stage was run: the state of the code, and the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.shared import execution
from components.shared.environment import REVISION_VARIABLE
from components.shared.errors import PipelineError
from components.shared.execution import Revision, current_environment, current_revision, environment_differences
from components.shared.lineage import file_digests
from tests.lineages import environment
from tests.register.registrations import git


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with code."""
    folder = tmp_path / "project"
    (folder / "components").mkdir(parents=True)
    (folder / "components/old.py").write_text("one\n")
    (folder / "components/removed.py").write_text("gone\n")
    (folder / "notes.txt").write_text("")
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        git(folder, *arguments)
    return folder


def _revision(project: Path) -> Revision:
    current_revision.cache_clear()
    return current_revision(project)


def test_uncommitted_changes_can_be_applied_to_the_commit(project: Path, tmp_path: Path) -> None:
    """Changed, new and removed files of code come back byte for byte; other files do not matter."""
    (project / "notes.txt").write_text("changed")
    commit = git(project, "rev-parse", "HEAD").strip()
    assert _revision(project) == Revision(commit=commit)
    (project / "components/old.py").write_text("one\n\ntwo: \u00e4 \x0c three")
    (project / "components/removed.py").unlink()
    (project / "components/new").mkdir()
    for name, text in (("a.py", "first\n\nlast"), ("b c.py", "only\n"), ("__init__.py", "")):
        (project / "components/new" / name).write_text(text)
    dirty = _revision(project)
    assert str(dirty) == f"{commit} with uncommitted changes"
    git(tmp_path, "clone", "--quiet", str(project), "again")
    (tmp_path / "patch").write_text(str(dirty.patch))
    git(tmp_path / "again", "apply", "../patch")
    assert file_digests(tmp_path / "again/components") == file_digests(project / "components")


def test_keys_in_uncommitted_changes_are_found(project: Path) -> None:
    """Well-known formats, and random-looking values of variables named like a secret; plain words are not reported."""
    lines = [
        "one",
        'prefix = "AKIAIOSFODNN7EXAMPLE"',
        'api_key = "q8Zr2LxV0bTn5KpW"',
        'password = os.environ["PASSWORD"]',
        'token = "passwordpassword"',
        "-----BEGIN RSA PRIVATE KEY-----",
    ]
    (project / "components/old.py").write_text("\n".join(lines) + "\n")
    (project / "components/local_secrets.yaml").write_text("password: q8Zr2LxV0bTn5KpW\n")
    patch = _revision(project).patch
    assert patch is not None
    assert "q8Zr2LxV0bTn5KpW\n" not in patch, "a new file that is no code"
    assert list(execution.find_secrets(patch)) == [f"components/old.py:{number}" for number in (2, 3, 6)]
    assert execution.uncommitted_files(patch) == ["components/old.py"]


def test_a_git_that_fails_is_an_error(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lineage without a commit would say that there is no repository. The name of a person is no such loss."""
    monkeypatch.chdir(project)
    git(project, "config", "user.name", "Anna")
    assert (person := execution.person()).startswith("Anna (")
    (tmp_path / "git").write_text("#!/bin/sh\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert f"Anna ({execution.person()})" == person
    with pytest.raises(PipelineError, match=r"^git: failed"):
        _revision(project)


def test_without_repository_the_revision_is_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image names the commit that it was built from."""
    monkeypatch.setenv(REVISION_VARIABLE, "c0ffee")
    assert str(_revision(tmp_path)) == "c0ffee"


def test_the_environment_is_that_of_the_process() -> None:
    """Every installed package, no secret, and nothing heavy imported to find out."""
    code = """
import sys
from importlib import metadata
from components.shared.execution import current_environment
environment = current_environment()
assert not {"torch", "numpy", "dvc"} & set(sys.modules)
installed = {each.name.lower().replace("_", "-").replace(".", "-"): each.version for each in metadata.distributions()}
assert environment.packages == installed, set(environment.packages.items()) ^ set(installed.items())
assert environment.variables["OMP_NUM_THREADS"] == "3"
assert "GOMP_SPINCOUNT" not in environment.variables
assert not any("KEY" in name for name in environment.variables)
assert environment.lock and environment.cpu and environment.num_cores
"""
    variables = {**os.environ, "OMP_NUM_THREADS": "3", "VLLM_API_KEY": "secret", "GOMP_SPINCOUNT": "7"}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)


def test_hardware_is_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the NVIDIA driver, which need no library."""
    for number in (0, 1):
        (tmp_path / f"gpus/{number}").mkdir(parents=True)
        (tmp_path / f"gpus/{number}/information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 100\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC: 13\n")
    monkeypatch.setattr(execution, "_NVIDIA", tmp_path)
    current_environment.cache_clear()
    found = current_environment()
    current_environment.cache_clear()
    assert (found.gpus, found.gpu_driver) == (("NVIDIA H200", "NVIDIA H200"), "570.86.15")
    assert str(found).startswith("2 x NVIDIA H200; ")


def test_differences_between_environments_are_told_in_words() -> None:
    """Packages, variables, software and hardware, with both values."""
    one = environment(packages={"numpy": "2", "torch": "2.13.0"}, variables={"OMP_NUM_THREADS": "2"})
    other = environment(packages={"numpy": "2", "torch": "2.12.0"}, num_cores=8, gpus=("H200", "H200"))
    assert environment_differences(one, one) == []
    software = ["torch 2.13.0 -> 2.12.0", "OMP_NUM_THREADS 2 -> (absent)"]
    assert environment_differences(one, other) == [*software, "num cores: 2 -> 8", "gpus: none -> H200, H200"]
