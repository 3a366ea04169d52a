"""Reports and a registry with one version, made once per session."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.register.config import RegisterConfig
from components.shared import jsonl
from tests.register.registrations import git, make_config, make_policy, make_report, run_register
from tests.report.synthetic import SKILL

Registered = tuple[RegisterConfig, Path, dict[str, Any]]


@pytest.fixture(scope="session")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a policy that passed the gate."""
    return make_report(tmp_path_factory.mktemp("passed"), enforce=True)["report"]


@pytest.fixture(scope="session")
def unenforced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a policy that missed a gate that is not enforced."""
    return make_report(tmp_path_factory.mktemp("unenforced"), enforce=False, grpo=SKILL["sft"])["report"]


@pytest.fixture(scope="session")
def first_registration(tmp_path_factory: pytest.TempPathFactory, passed: Path) -> Path:
    """A folder with a policy, its registry and storage; to be copied."""
    folder = tmp_path_factory.mktemp("first")
    with contextlib.chdir(folder):
        run_register(make_config(Path()), make_policy(folder / "policy"), passed, folder / "registration")
    return folder


@pytest.fixture
def registered(first_registration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registered:
    """A registry with one version, the policy in it, and its version.json; paths are relative to `tmp_path`."""
    shutil.copytree(first_registration, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return make_config(Path()), tmp_path / "policy", jsonl.read_json(tmp_path / "registration" / "version.json")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """An empty bare repository, for a registry at a URL."""
    folder = tmp_path / "shared.git"
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch", "main", str(folder))
    return folder
