"""Git repositories that a run needs: whether they answer, and which commit a revision is there."""

import re
import tempfile
from pathlib import Path

from components.shared.errors import PipelineError
from components.shared.versioning import Workspace

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN = 5


def commit_of(url: str, revision: str) -> str:
    """Return the commit that a branch, tag or commit is in a repository; tags go before branches, as git has it.

    Raises:
        PipelineError: The repository does not answer, or has no such branch or tag.
    """
    refs = references(url)
    for name in (f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}", revision):
        if name in refs:
            return refs[name]
    if _COMMIT.fullmatch(revision):  # a server lists no commits but those that have names
        return revision
    known = [name.split("/", 2)[2] for name in refs if name.startswith(("refs/heads/", "refs/tags/"))]
    accepted = ["a commit of 40 digits", *(name for name in known if not name.endswith("^{}"))][: 1 + _SHOWN]
    raise PipelineError(f"{url} has no branch or tag `{revision}`; accepted: {', '.join(accepted)}")


def references(url: str) -> dict[str, str]:
    """Return the commit behind each name in a repository.

    Raises:
        PipelineError: The repository does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-git-") as scratch:
        here = Workspace(Path(scratch), Path(scratch))
        listed = here.git("ls-remote", url)
    return {name: commit for commit, name in (line.split("\t") for line in listed.splitlines())}
