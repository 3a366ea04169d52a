"""Uses of a test set: each policy that a gate judged on it, recorded in the registry's git, whether it passed or not.

A use is a file `<test set>/<policy>.json`, named by digests, on a separate branch. It is added by one push: a policy
counts once, however often and by whomever it is judged, and a killed process has recorded it completely or not at all.
"""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.register.registry import Registry, open_repository
from components.register.snapshot import Snapshot
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.versioning import Workspace

BRANCH = "looks"
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Name that git gives to a tree without files."""
_ATTEMPTS = 10
_PAUSE_S = 0.2
"""Added to the pause after each push that collides with another one."""


def policies_seen(snapshot: Snapshot, test_set: str) -> set[str]:
    """Return the digests of the policies that were judged on a test set, which is named by its digest."""
    listed = snapshot.repository.try_git("ls-tree", "--name-only", f"refs/heads/{BRANCH}:{test_set}") or ""
    return {Path(name).stem for name in listed.split()}


def count_test_set_use(location: str, name: str, policy_digest: str, verdict: Mapping[str, Any]) -> None:
    """Record in a registry, which is created on first use, that a policy was judged on test problems.

    If the registry does not accept the record, a warning is printed. RetryableError if it cannot be reached.
    """
    if verdict["looks"] is None:  # judged on another split, whose uses are not counted
        return
    at = datetime.now(UTC).isoformat(timespec="seconds")
    use = {"test_set": verdict["looks"]["test_set"], "policy_digest": policy_digest}
    use |= {"name": name, "passed": verdict["passed"], "at": at}
    try:
        with open_repository(location) as registry:
            _record(registry, use)
    except RetryableError:
        raise
    except PipelineError as error:
        say("register", f"warning: this use of the test problems is not counted: {error}")


def _record(registry: Registry, use: Mapping[str, Any]) -> None:
    """Record a use unless the policy was judged on this test set before.

    RetryableError if others have pushed before each attempt; PipelineError if the registry does not accept the branch.
    """
    path = f"{use['test_set']}/{use['policy_digest']}.json"
    for attempt in range(_ATTEMPTS):
        base = registry.newest_commit(BRANCH)
        if base and registry.repository.try_git("cat-file", "-e", f"{base}:{path}") is not None:
            return
        commit = _commit(registry.repository, base, path, json.dumps(use, indent=2) + "\n")
        try:
            registry.repository.git("push", "--quiet", "origin", f"{commit}:refs/heads/{BRANCH}")
        except PipelineError as error:
            registry.repository.git("fetch", "--quiet", "origin")
            if registry.newest_commit(BRANCH) == base:  # nobody else has pushed: the registry refuses the branch
                raise type(error)(f"{registry.location}: does not accept the branch `{BRANCH}`: {error}") from None
            time.sleep(_PAUSE_S * attempt)
        else:
            return
    raise RetryableError(f"{registry.location}: its branch `{BRANCH}` changed before each of {_ATTEMPTS} pushes")


def _commit(clone: Workspace, base: str | None, path: str, content: str) -> str:
    """Commit a new file on the commit `base`, or on an empty first commit without one; return the commit."""
    parent = base or clone.git("commit-tree", _EMPTY_TREE, "-m", "Count the looks at test sets").strip()
    clone.git("checkout", "--quiet", "--force", "--detach", parent)
    file = clone.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content, encoding="utf-8")
    clone.git("add", path)
    clone.git("commit", "--quiet", "--message", f"Look at {path.removesuffix('.json')}")
    return clone.git("rev-parse", "HEAD").strip()
