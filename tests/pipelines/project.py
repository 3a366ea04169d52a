"""A copy of the project, and what a run in it leaves."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from safetensors.numpy import load_file

from components.shared.lineage import file_digest
from tests.presets import preset

ROOT = Path(__file__).parents[2]
_COPIED = (
    "components",
    "pipelines",
    "params",
    "data",
    ".dvc/config",
    "params.yaml",
    "dvc.yaml",
    ".dvcignore",
    ".gitignore",
)


@dataclass(frozen=True)
class Project:
    """A copy of the project, in which runs leave the checked out one alone."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The copy's code before the installed one, and the commands of this environment."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(self.folder / "site_cache"),
            # Several runs share the cores.
            "OMP_NUM_THREADS": "1",
            "GX_ANALYTICS_ENABLED": "false",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy and return all it printed, whatever its exit code."""
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )

    def pipeline(self, *arguments: str) -> "FinishedRun":
        """Run `grpo-pipeline` of the copy to its end."""
        return FinishedRun.of(self, self.start(*arguments))

    def start(
        self, *arguments: str, variables: Mapping[str, str] = MappingProxyType({}), umask: int = -1
    ) -> subprocess.Popen[str]:
        """Start `grpo-pipeline` of the copy, with more variables and, if it is not -1, another umask."""
        code = "import sys; from pipelines.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            umask=umask,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self, name: str) -> list[int]:
        """Python processes with `name` in their command that work in the copy."""
        listing = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 1) for line in listing.splitlines()]
        return [
            int(pid) for pid, args in rows if name in args and "python" in args.split()[0] and self._works_here(pid)
        ]

    def _works_here(self, pid: str) -> bool:
        try:
            return (Path("/proc") / pid / "cwd").readlink() == self.folder
        except FileNotFoundError:  # it has just ended
            return False

    def use(self, params: Mapping[str, Any], name: str = "params.yaml") -> None:
        """Make `params` a params file of the copy."""
        (self.folder / name).write_text(yaml.safe_dump(dict(params), sort_keys=False))


def smoke() -> dict[str, Any]:
    """The params of the smoke preset."""
    return preset("smoke")


def copy_project(folder: Path) -> Project:
    """Copy what a run needs, without what earlier runs left."""
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
        else:
            shutil.copyfile(source, target)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    return Project(folder)


@dataclass(frozen=True)
class FinishedRun:
    """A local run that has ended, with what it printed."""

    project: Project
    exit_code: int
    printed: str
    errors: str

    @classmethod
    def of(cls, project: Project, process: subprocess.Popen[str], *, timeout_s: float = 400) -> "FinishedRun":
        """Wait for a run to end."""
        printed, errors = process.communicate(timeout=timeout_s)
        return cls(project, process.returncode, printed, errors)

    @property
    def folder(self) -> Path:
        """Where it left what it made."""
        return self.project.folder / "outputs/latest"

    @property
    def outputs(self) -> dict[str, dict[str, Path]]:
        """The folders that its stages wrote down in the journal, by task and name."""
        events = [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]
        titles = events[0]["tasks"]
        started = [event["outputs"] for event in events if event["event"] == "started"]
        return {
            title: {name: Path(path) for name, path in folders.items()}
            for title, folders in zip(titles, started, strict=True)
        }


def unmoved(policy: Path, reference: Path) -> list[str]:
    """The tensors of a policy that are still those of the reference it was trained from."""
    after, before = (load_file(folder / "model.safetensors") for folder in (policy, reference))
    assert after.keys() == before.keys()
    return [name for name, tensor in after.items() if (tensor == before[name]).all()]


def bytes_in(folder: Path) -> dict[str, str]:
    """The digest of each file of an artifact, its lineage among them."""
    return {str(path.relative_to(folder)): file_digest(path) for path in folder.rglob("*") if path.is_file()}
