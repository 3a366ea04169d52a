"""What the Makefile does before any Python of this project runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from components.register.config import RegisterConfig

ROOT = Path(__file__).parents[1]
PYTHON = """\
#!/bin/sh
# Stands in for Python, which would fetch gigabytes: makes an environment with itself in it, and writes down the rest.
case "$*" in
  "-m venv"*) echo venv >> calls; rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "images/packages.py setup"*) echo "$*" >> calls; exit "$SETUP_ENDS_WITH" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder in which `make` can be called, with a Python that fetches nothing."""
    for name in ("Makefile", "requirements.lock", "requirements-cuda.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "params", tmp_path / "params")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "calls").touch()
    return tmp_path


def _make(clone: Path, *arguments: str, setup_ends_with: int = 0) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH_"))}
    command = ["make", f"PYTHON={clone}/python", *arguments]
    environment = {**inherited, "SETUP_ENDS_WITH": str(setup_ends_with)}
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)


def _calls(clone: Path) -> list[str]:
    calls = (clone / "calls").read_text().splitlines()
    (clone / "calls").write_text("")
    return calls


def test_a_preset_that_does_not_exist_is_refused_before_anything_is_set_up(clone: Path) -> None:
    """One line names the presets there are, and nothing has been installed."""
    ended = _make(clone, "run", "PRESET=nosuch")
    assert ended.returncode == 2
    message = ended.stderr.splitlines()[0]
    assert "PRESET=nosuch" in message
    assert {"laptop", *(path.stem for path in (ROOT / "params").glob("*.yaml"))} <= set(message.split())
    assert _calls(clone) == []


def test_set_up_is_done_when_it_has_proven_itself(clone: Path) -> None:
    """An environment in which set-up failed is not taken for a ready one: the next command makes it anew.

    So does TORCH_BACKEND with another build, which need not be said again afterwards; a new lock makes nothing anew.
    """
    assert _make(clone, "setup", setup_ends_with=1).returncode == 2
    assert _make(clone, "setup").returncode == 0
    assert _calls(clone) == ["venv", "images/packages.py setup --backend cpu"] * 2
    assert _make(clone, "setup", "TORCH_BACKEND=cu130").returncode == 0
    assert _calls(clone) == ["venv", "images/packages.py setup --backend cu130"]
    assert _make(clone, "setup").returncode == 0
    assert _calls(clone) == []
    later = (clone / ".venv/.ready").stat().st_mtime + 5
    os.utime(clone / "requirements.lock", (later, later))
    assert _make(clone, "setup").returncode == 0
    assert _calls(clone) == ["images/packages.py setup --backend cu130"]


def test_an_environment_behind_a_link_is_left_alone(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Such as that of another work tree, which `venv --clear` would empty."""
    (clone / ".venv").symlink_to(tmp_path_factory.mktemp("shared"))
    refused = _make(clone, "setup")
    assert refused.returncode == 2
    assert ".venv is a link" in refused.stderr
    assert _calls(clone) == []


def test_clean_up_keeps_what_lasts(clone: Path) -> None:
    """Versions, their weights and DVC's remote, at their default places, are in no folder that is removed."""
    remote = re.search(r"url = (.*)", (ROOT / ".dvc/config").read_text())
    assert remote
    registry = Path(RegisterConfig().registry)
    lasting = {registry, registry.with_name(f"{registry.name}-storage"), Path(os.path.normpath(f".dvc/{remote[1]}"))}
    for folder in (*lasting, Path("outputs/runs"), Path("outputs/stages")):
        (clone / folder).mkdir(parents=True)
        (clone / folder / "file").touch()
    assert _make(clone, "clean").returncode == 0
    assert _make(clone, "distclean").returncode == 0
    left = {path.parent.relative_to(clone) for path in clone.rglob("file")}
    assert left == lasting
    command = ["git", "check-ignore", *(f"{folder}/" for folder in lasting)]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert len(ignored.stdout.splitlines()) == len(lasting)
