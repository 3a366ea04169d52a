"""A copy of the project, and what a run in it leaves."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from components.shared.lineage import FILE_NAME, file_digests, read, value_digest
from pipelines.run.history import read_run
from tests.presets import ROOT

_FOLDERS = ("components", "pipelines", "params", "data")
_FILES = (".dvc/config", ".dvc/.gitignore", "params.yaml", "repro.yaml", "dvc.yaml", ".dvcignore", ".gitignore")


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
            "DVC_SITE_CACHE_DIR": str(self.folder / "site_cache"),
            # Several runs share the cores.
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy and return all it printed, whatever its exit code."""
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )

    def pipeline(self, *arguments: str) -> "FinishedRun":
        """Run `grpo-pipeline` of the copy to its end."""
        return FinishedRun.of(self, self.start(*arguments))

    def start(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `grpo-pipeline` of the copy, with more variables."""
        command = [sys.executable, "-c", "import sys; from pipelines.cli import main; sys.exit(main())", *arguments]
        environment, pipe = {**self.environment, **(variables or {})}, subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def processes(self, name: str = "") -> list[int]:
        """Python processes with `name` in their command that work in the copy."""
        listing = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 1) for line in listing.splitlines()]
        pythons = [pid for pid, args in rows if name in args and "python" in args.split()[0]]
        return [int(pid) for pid in pythons if self._works_here(pid)]

    def _works_here(self, pid: str) -> bool:
        try:
            return (Path("/proc") / pid / "cwd").readlink() == self.folder
        except FileNotFoundError:  # it has just ended
            return False


def copy_project(folder: Path) -> Project:
    """Copy what a run needs, without what earlier runs left."""
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    for name in _FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
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
    def outputs(self) -> dict[str, Mapping[str, Path]]:
        """The folders that its stages wrote down in the journal, by stage and name."""
        run = read_run(self.folder.resolve())
        assert run is not None
        return {name: stage.outputs for name, stage in run.stages.items()}


def unmoved(policy: Path, reference: Path) -> list[str]:
    """The tensors of a policy that are still those of the reference it was trained from."""
    after, before = (load_file(folder / "model.safetensors") for folder in (policy, reference))
    assert after.keys() == before.keys()
    return [name for name, tensor in after.items() if (tensor == before[name]).all()]


def bytes_in(folder: Path) -> dict[str, str]:
    """The digest of each file of an artifact; of its lineage without the runs, which tell who made it and when."""
    made_by = read(folder)
    lineage = {FILE_NAME: value_digest(made_by.model_dump(mode="json", exclude={"runs"}))} if made_by else {}
    return file_digests(folder) | lineage
