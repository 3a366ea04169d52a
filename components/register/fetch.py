"""Bring the weights of a registered version back, from the registry and its storage alone."""

import json
import shutil
from pathlib import Path
from typing import Any

from components.register.registry import POLICY, VERSION_FILE, is_url
from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.workspace import Workspace


def fetch(registry: str, version: str, destination: Path) -> dict[str, Any]:
    """Fill the folder `destination` with the weights of a version (`v0.0.1` or `grpo-policy@v0.0.1`).

    Returns the version's version.json. The folder appears when its content is complete and has the digest that was
    registered.
    """
    destination = destination.resolve()  # DVC runs elsewhere
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise PipelineError(f"{destination}: is not empty; name a new folder for the weights")
    if not is_url(registry) and not Path(registry).is_dir():
        raise PipelineError(f"{registry}: no such registry; nothing has been registered there")
    source = registry if is_url(registry) else str(Path(registry).resolve())
    aside = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        outside = Workspace(aside, aside)
        outside.git("clone", "--quiet", "--bare", source, "registry")
        tags = Workspace(aside / "registry", aside)
        tag = _tag(registry, tags.git("tag", "--list", "*@v*").split(), version)
        registered: dict[str, Any] = json.loads(tags.git("show", f"refs/tags/{tag}:{VERSION_FILE}"))
        download(outside, source, tag, aside / POLICY, tag)
        check(aside / POLICY, registered["policy_digest"], tag)
        (aside / POLICY).rename(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return registered


def download(workspace: Workspace, repository: str, revision: str, destination: Path, name: str) -> None:
    """Copy the weights of one revision of a repository out of its storage; `name` is the version's, for messages."""
    try:
        workspace.dvc_get(repository, POLICY, revision, destination)
    except PipelineError as error:
        raise type(error)(f"{name}: the weights cannot be had: {str(error).removeprefix('dvc: ')}") from None


def check(folder: Path, policy_digest: str, name: str) -> None:
    """Raise unless a folder holds the weights that were registered."""
    found = lineage.digest(folder)
    if found != policy_digest:
        raise PipelineError(
            f"{name}: the storage gives weights with digest {found[:12]}, registered were {policy_digest[:12]}; "
            "its content was changed or is damaged"
        )


def _tag(registry: str, tags: list[str], version: str) -> str:
    known = sorted(tag for tag in tags if not tag.endswith("!"))
    found = [tag for tag in known if version in (tag, tag.partition("@")[2])]
    if not found:
        raise PipelineError(f"{registry}: no version {version}; there are {', '.join(known) or 'none yet'}")
    if len(found) > 1:
        raise PipelineError(f"{registry}: {version} may be {' or '.join(found)}; give the whole name")
    return found[0]
