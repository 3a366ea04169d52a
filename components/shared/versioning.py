"""Git and DVC in one folder, with a fixed identity and one-line errors."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared.errors import PipelineError, RetryableError

_GIT_OPTIONS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-c", "gc.auto=0"),
    *("-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false", "-c", "advice.detachedHead=false"),
)
_REPOSITORY_VARIABLES = re.compile(
    "GIT_(DIR|WORK_TREE|INDEX_FILE|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|COMMON_DIR|NAMESPACE|PREFIX)"
)
"""Variables that git sets for hooks; they would direct every command to the repository of the hook."""
_ERROR = re.compile(r"(?:fatal: |error: |ERROR: (?:unexpected error - )?)(.*)")
REGISTRY, MODEL_NAME = "registry", "grpo-policy"
"""Default registry and name of registered versions."""
_OBJECT = re.compile(r"\b[0-9a-f]{40}\b")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_REFERENCES_SHOWN = 5
_DVC = Path(__file__).with_name("dvc_process.py")
_TRANSIENT = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Failed to connect"
    r"|Connection (refused|timed out|reset|closed)|Operation (timed out|too slow)"
    r"|hung up unexpectedly|early EOF|Empty reply from server|returned error: (429|5\d\d)|HTTP (429|5\d\d)"
)
"""git's messages when a network or a server has failed."""
_DENIED = 77
"""Exit code of dvc_process.py if a server refuses the credentials."""
_UNREADABLE = "Could not read from remote repository."
_REFUSED = "! ["
"""Beginning of git's line about a rejected ref."""
_TRUST = "git config --global --add safe.directory "
"""Beginning of git's line that lets it read a repository of another user."""


@dataclass(frozen=True)
class Workspace:
    """A folder in which git and DVC are run."""

    folder: Path
    scratch: Path
    """Folder for temporary files of the tools, and their home if the process has none."""
    locks: tuple[int, ...] = ()
    """File descriptors of locks that the tools inherit: if this process is killed, they keep the locks."""

    def git(self, *arguments: str) -> str:
        """Run git and return its output."""
        return self.git_bytes(*arguments).decode(errors="replace")

    def git_bytes(self, *arguments: str, data: bytes = b"") -> bytes:
        """Run git with `data` as its input and return its output."""
        return self._run("git", ["git", *_GIT_OPTIONS, *arguments], data)

    def try_git(self, *arguments: str) -> str | None:
        """Run git and return its output; None if it fails."""
        try:
            return self.git(*arguments)
        except PipelineError:
            return None

    def dvc(self, *arguments: str) -> str:
        """Run DVC and return its output."""
        # -P keeps the modules next to the script out of DVC's imports.
        return self._run("dvc", [sys.executable, "-P", str(_DVC), *arguments]).decode(errors="replace")

    def dvc_get(self, repository: str, path: str, revision: str, destination: Path) -> None:
        """Copy what DVC tracks at a revision; PipelineError with file and object if one is missing or damaged."""
        self.dvc("get-checked", repository, path, revision, str(destination.absolute()))

    def dvc_json(self, command: str, *arguments: Any) -> Any:
        """Run one of the commands of dvc_process.py and return its output."""
        words = [each if isinstance(each, str) else json.dumps(each) for each in arguments]
        return json.loads(self.dvc(command, *words))

    def _run(self, tool: str, command: Sequence[str], data: bytes = b"") -> bytes:
        env = environment(self.scratch)
        try:
            process = subprocess.run(
                command, cwd=self.folder, env=env, pass_fds=self.locks, input=data, capture_output=True, check=False
            )
        except FileNotFoundError:
            raise PipelineError(f"{tool}: no such program; install it to work with versions") from None
        if process.returncode != 0:
            errors = (process.stderr or process.stdout).decode(errors="replace")
            # A server that rejects a push hangs up as well.
            has_network_failed = _TRANSIENT.search(errors) is not None and _REFUSED not in errors
            is_transient = has_network_failed if tool == "git" else process.returncode == RetryableError.exit_code
            kind = RetryableError if is_transient else PipelineError
            hint = "; set the credentials of the storage" if process.returncode == _DENIED else ""
            raise kind(f"{tool}: {_reason(errors)}{hint}")
        return process.stdout


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables for git and DVC: with a home and an identity, without another repository."""
    variables = {name: value for name, value in os.environ.items() if not _REPOSITORY_VARIABLES.fullmatch(name)}
    variables.setdefault("HOME", str(scratch))
    variables.setdefault("DVC_SITE_CACHE_DIR", str(scratch / "dvc"))
    for role in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{role}_NAME": "grpo-pipeline", f"GIT_{role}_EMAIL": "grpo-pipeline@localhost"}
    return {**variables, "DVC_NO_ANALYTICS": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}


def _reason(output: str) -> str:
    """Return the first error line in a tool's output, preferably one with a git object; reasons of a rejected push."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    refused = [" ".join(line.removeprefix("! ").split()) for line in lines if line.startswith(_REFUSED)]
    if refused:
        reasons = [line.removeprefix("remote:").strip() for line in lines if line.startswith("remote:")]
        return "; ".join([refused[0], *filter(None, reasons)])
    errors = [match[1] for match in map(_ERROR.match, lines) if match]
    if errors[:1] == [_UNREADABLE]:  # ssh's line before it has the reason
        errors = lines[: lines.index(f"fatal: {_UNREADABLE}")][-1:] or errors
    about_objects = [line for line in errors if _OBJECT.search(line)]
    trust = [f"; if you trust its owner, run: {line}" for line in lines if line.startswith(_TRUST)][:1]
    return "".join([*about_objects, *errors, *lines[-1:], "failed without any output"][:1] + trust)


def is_url(location: str) -> bool:
    """Return whether a location is a URL, such as `user@host:path`, not a folder."""
    return "://" in location or re.match(r"[\w.-]+@[\w.-]+:", location) is not None


def references(url: str) -> dict[str, str]:
    """Return the commit of each ref in a repository, by its name; PipelineError if the repository does not answer."""
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-git-") as scratch:
        listing = Workspace(Path(scratch), Path(scratch)).git("ls-remote", "--", url)
    pairs = [line.split("\t") for line in listing.splitlines()]
    return {name: commit for commit, name in pairs}


def commit_of(url: str, revision: str) -> str:
    """Return the commit of a branch, tag or commit in a repository; a tag takes precedence over a branch, as in git.

    PipelineError if the repository does not answer, or has no such branch or tag.
    """
    if not revision:
        raise PipelineError("is empty; accepted: a branch, a tag or a commit")
    refs = references(url)
    # `^{}` has the commit of an annotated tag, which is an object itself.
    for name in (f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}", revision):
        if name in refs:
            return refs[name]
    if _COMMIT.fullmatch(revision):  # a server lists only commits with refs
        return revision
    known = [name.split("/", 2)[2] for name in refs if name.startswith(("refs/heads/", "refs/tags/"))]
    names = [name for name in known if not name.endswith("^{}")][:_NUM_REFERENCES_SHOWN]
    raise PipelineError(
        f"{url} has no branch or tag `{revision}`; accepted: {', '.join(['a commit of 40 digits', *names])}"
    )
