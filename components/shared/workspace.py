"""Git, DVC and GTO as they are run here: in one folder, with an identity of their own, errors in one line."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.shared.errors import PipelineError

_GIT_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.autocrlf=false",
    "commit.gpgSign=false",
    "tag.gpgSign=false",
    "gc.auto=0",
    "advice.detachedHead=false",
)
_ERROR_MARKS = ("fatal: ", "error: ", "ERROR: ")


@dataclass(frozen=True)
class Workspace:
    """A folder in which git, DVC and GTO are run."""

    folder: Path
    scratch: Path
    """Where the tools may keep what they do not need again; their home where the process has none."""
    held: tuple[int, ...] = ()
    """Descriptors of locks. The tools inherit them: should this process be killed, the lock lasts until they end."""

    def git(self, *arguments: str) -> str:
        """Run git and return what it printed."""
        options = [part for option in _GIT_OPTIONS for part in ("-c", option)]
        return self._run("git", ["git", *options, *arguments])

    def try_git(self, *arguments: str) -> str | None:
        """Run git and return what it printed; None where it says no."""
        try:
            return self.git(*arguments)
        except PipelineError:
            return None

    def dvc(self, *arguments: str) -> str:
        """Run DVC and return what it printed."""
        return self._run("dvc", [sys.executable, "-m", "dvc", *arguments])

    def gto(self, *arguments: str) -> str:
        """Run GTO and return what it printed."""
        return self._run("gto", [sys.executable, "-m", "gto.cli", *arguments])

    def _run(self, tool: str, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environment(self.scratch),
                pass_fds=self.held,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except FileNotFoundError:
            raise PipelineError(f"{tool}: no such program; it is needed to work with versions") from None
        if done.returncode != 0:
            raise PipelineError(f"{tool}: {_reason(done.stderr or done.stdout)}")
        return done.stdout


def environment(scratch: Path) -> dict[str, str]:
    """The environment for the tools: no repository but the folder's own, and no need of a home or an identity."""
    kept = {name: value for name, value in os.environ.items() if not _points_to_a_repository(name)}
    kept.setdefault("HOME", str(scratch))
    kept.setdefault("DVC_SITE_CACHE_DIR", str(scratch / "dvc"))
    identity = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", "grpo-pipeline"), ("EMAIL", "grpo-pipeline@localhost"))
    }
    return {**kept, **identity, "DVC_NO_ANALYTICS": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}


def _points_to_a_repository(variable: str) -> bool:
    """Set by git around its hooks: left in place, every command would work on that other repository."""
    return variable.startswith("GIT_") and variable.removeprefix("GIT_") in {
        "DIR",
        "WORK_TREE",
        "INDEX_FILE",
        "OBJECT_DIRECTORY",
        "ALTERNATE_OBJECT_DIRECTORIES",
        "COMMON_DIR",
        "NAMESPACE",
        "PREFIX",
    }


def _reason(output: str) -> str:
    """The line of a tool's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        for mark in _ERROR_MARKS:
            if line.startswith(mark):
                return line.removeprefix(mark)
    return lines[-1] if lines else "failed without a word"
