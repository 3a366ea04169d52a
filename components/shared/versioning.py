"""Git, DVC and GTO as they are run here, and the newest version in a registry."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.shared.config import Config, without_operational
from components.shared.errors import PipelineError, RetryableError

_GIT_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.autocrlf=false",
    "commit.gpgSign=false",
    "tag.gpgSign=false",
    "gc.auto=0",
    "advice.detachedHead=false",
)
_ERROR_MARKS = ("fatal: ", "error: ", "ERROR: unexpected error - ", "ERROR: ")
_DVC = Path(__file__).with_name("dvc_process.py")
_PASSING = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Failed to connect"
    r"|Connection (refused|timed out|reset|closed)|Operation (timed out|too slow)"
    r"|hung up unexpectedly|early EOF|Empty reply from server|returned error: (429|5\d\d)|HTTP (429|5\d\d)"
)
"""What git says where a network or a server has failed, which may work the next time."""
_REFUSED = "! ["
"""Begins git's line on a ref that the other side did not take."""


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
        # -P: the modules beside the script are none of DVC's.
        return self._run("dvc", [sys.executable, "-P", str(_DVC), *arguments])

    def dvc_get(self, repository: str, path: str, revision: str, destination: Path) -> None:
        """Copy a file or folder that DVC keeps, as it was at one revision of a repository.

        PipelineError with the file and the object of the storage where one is missing or damaged.
        """
        self.dvc("get-checked", repository, path, revision, str(destination.absolute()))

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
            kind = RetryableError if _may_pass(tool, done) else PipelineError
            raise kind(f"{tool}: {_reason(done.stderr or done.stdout)}")
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


def _may_pass(tool: str, done: "subprocess.CompletedProcess[str]") -> bool:
    """Whether a network or a server has failed; one that refuses a push hangs up as well, but says so."""
    if tool == "git":
        return _REFUSED not in done.stderr and _PASSING.search(done.stderr) is not None
    return done.returncode == RetryableError.exit_code


def _reason(output: str) -> str:
    """What a tool says is wrong: its first line that is marked as an error, and why a server refuses a push."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    refused = [" ".join(line.removeprefix("! ").split()) for line in lines if line.startswith(_REFUSED)]
    if refused:
        said = [line.removeprefix("remote:").strip() for line in lines if line.startswith("remote:")]
        return "; ".join([refused[0], *filter(None, said)])
    for line in lines:
        for mark in _ERROR_MARKS:
            if line.startswith(mark):
                return line.removeprefix(mark)
    return lines[-1] if lines else "failed without a word"


_LINEAGE = "lineage.json"


@dataclass(frozen=True)
class ModelVersion:
    """A registered version, and what its policy was made from."""

    tag: str
    lineage: Mapping[str, Any]


def newest_version(registry: str, name: str) -> ModelVersion | None:
    """Return the newest version of a model that was not withdrawn; None where none tells what it was made from.

    `registry` is a folder or a URL, as for `register`. PipelineError where it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-registry-") as scratch:
        outside = Workspace(Path(scratch), Path(scratch))
        outside.git("clone", "--quiet", "--bare", registry, "registry")
        clone = Workspace(Path(scratch) / "registry", Path(scratch))
        tags = clone.git("tag", "--list", f"{name}@v*").split()
        for tag in sorted((each for each in tags if _number(each)), key=_number, reverse=True):
            text = clone.try_git("show", f"refs/tags/{tag}:{_LINEAGE}")
            if f"{tag}!" not in {each.partition("#")[0] for each in tags} and text is not None:
                return ModelVersion(tag, json.loads(text))
    return None


def _number(tag: str) -> tuple[int, ...]:
    match = re.fullmatch(r".*@v(\d+)\.(\d+)\.(\d+)", tag)
    return tuple(int(part) for part in match.groups()) if match else ()


def changes_since(promoted: ModelVersion, configs: Mapping[str, Config], code: str) -> list[str]:
    """Return what differs from what a version was made from, in words; empty where a run would make it again.

    Args:
        promoted: The version.
        configs: The section of each stage that a policy is made by; data are named by commit, or are none.
        code: Digest of the code that would run.
    """
    found = [] if promoted.lineage["code"] == code else ["the code"]
    recorded = dict(_configs(promoted.lineage))
    for stage, config in configs.items():
        found += [f"{stage}.{key}" for key in _differing(config, recorded.get(stage, {}))]
    return found


def _configs(lineage: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config of each stage in a lineage."""
    yield lineage["stage"], lineage["config"]
    for made in lineage["inputs"].values():
        if made["lineage"]:
            yield from _configs(made["lineage"])


def _differing(config: Config, recorded: Mapping[str, Any]) -> list[str]:
    """The keys by which two configs would not give the same."""
    try:
        before = without_operational(type(config).model_validate(recorded))
    except ValidationError:  # of an older version of the code, which had other keys
        before = {}
    now = without_operational(config)
    return [key for key in now if key not in before or now[key] != before[key]]
