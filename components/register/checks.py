"""Checks before a run: can the registry, the storage and the catalogue be used, and has anything changed?

Functions `unusable_*` yield a line for each problem, or raise PipelineError.
"""

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from components.register.catalogue import Catalogue, incomplete_steps
from components.register.config import RegisterConfig
from components.register.registry import ASK_OWNER, is_new_folder
from components.register.snapshot import read_registry
from components.register.storage import CONFIG, check_storage, new_config, storage_url, wrong_storage
from components.shared import lineage
from components.shared.config import Config, without_operational
from components.shared.errors import PipelineError
from components.shared.versioning import Workspace, is_url, references

_PACKAGES = {"s3": "dvc_s3", "gs": "dvc_gs", "azure": "dvc_azure", "ssh": "dvc_ssh"}
"""Package that DVC needs for a kind of remote."""
_LISTED = ("s3", "ssh")
"""Kinds of remotes that `list_storage` lists, with the credentials of the tasks."""


def unusable_folder(location: str) -> Iterator[str]:
    """Yield a line if a folder, which need not exist yet, cannot be written on this machine, or is no registry."""
    if is_url(location):
        return
    path = Path(location).resolve()
    if reason := unwritable(location):
        yield f"register.registry: {reason}"
    elif path.exists():
        try:
            is_new_folder(path, Workspace(path, path))
        except PipelineError as error:
            yield f"register.registry: {error}"


def unwritable(location: str) -> str:
    """Return why a folder, which need not exist yet, cannot be written on this machine; empty if it can."""
    path = Path(location).resolve()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        return f"{location} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{location}: {existing} cannot be written to by this user; {ASK_OWNER}"
    if existing != path:
        try:
            # Some folders, such as /proc, seem to be writable, and only an attempt shows that they are not.
            tempfile.TemporaryDirectory(dir=existing).cleanup()
        except OSError as error:
            return f"{location}: cannot be made in {existing} ({error.strerror})"
    return ""


def unusable_registry(location: str, mount: str) -> Iterator[str]:
    """Yield a line if a registry's folder is not on the volume at `mount`; PipelineError if its URL does not answer."""
    if is_url(location):
        references(location)
    yield from _not_shared("register.registry", location, mount)


def unusable_storage(remote: str, mount: str) -> Iterator[str]:
    """Yield a line if DVC cannot write to a remote; `remote` is empty for a storage next to the registry's folder."""
    scheme = remote.partition("://")[0]
    package = _PACKAGES.get(scheme)
    if package and importlib.util.find_spec(package) is None:
        yield f"register.storage: {scheme}:// needs the package {package.replace('_', '-')} in the light image"
    elif remote:
        yield from _not_shared("register.storage", remote, mount)


def list_storage(config: RegisterConfig, *, has_folders: bool = True) -> list[str]:
    """Return a line if the registry has another storage or cannot write to it; PipelineError unless it can be listed.

    It is listed at the S3 server that registry or config name. A folder is checked if this machine `has_folders`.
    """
    registry_config, url = None, config.storage
    # A registry that does not answer, or a folder with something else, is reported by the check of the registry itself.
    with suppress(PipelineError), read_registry(config.registry) as snapshot:
        if is_url(snapshot.origin) or not is_new_folder(Path(snapshot.origin), snapshot.repository):
            registry_config = snapshot.repository.try_git("show", f"HEAD:{CONFIG}")
    if registry_config:
        location, origin = snapshot.location, snapshot.origin
        if lines := [*wrong_storage(registry_config, location, origin, config.storage, config.storage_endpoint)]:
            return lines
        url = storage_url(registry_config, location, origin)
    # The default, a folder beside a new registry, can be made if the registry can.
    if has_folders and url and not is_url(url) and (reason := unwritable(url)):
        return [f"register.storage: {reason}"]
    scheme = (config.storage or "").partition("://")[0]
    if scheme in _LISTED and importlib.util.find_spec(_PACKAGES[scheme]):
        check_storage(registry_config or new_config(str(config.storage), config.storage_endpoint))
    return []


def _not_shared(key: str, location: str, mount: str) -> Iterator[str]:
    """Yield a line if a location is a folder outside the shared volume at `mount`."""
    if not is_url(location) and not location.startswith(f"{mount}/"):
        yield (
            f"{key}: {location} would be lost with the pod; accepted: a URL, or a folder of the shared volume, "
            f"{mount}/..."
        )


def unusable_model_registry(url: str, remote: str) -> Iterator[str]:
    """Yield a line if the storage is a folder, out of reach of others; PipelineError if `url` does not answer."""
    Catalogue(url)
    if not is_url(remote):
        yield "register.storage: is not a URL, so the weights cannot be found from Kubeflow Model Registry"


def changes_since_newest(config: RegisterConfig, configs: Mapping[str, Config]) -> tuple[str, list[str], list[str]]:
    """Return the tag of a model's newest version (empty without one), `changes_since` it, and `incomplete_steps`."""
    with read_registry(config.registry) as snapshot:
        versions = snapshot.versions(config.name)
        if not versions:
            return "", [], []
        made_by = snapshot.lineage(versions[-1].tag)
        incomplete = list(incomplete_steps(snapshot, config.name, config.model_registry))
    return versions[-1].tag, changes_since(made_by, configs, lineage.code_digest()), incomplete


def changes_since(made_by: lineage.Lineage, configs: Mapping[str, Config], code: str) -> list[str]:
    """Return what has changed since a version: "the code", and config keys; empty if a run would reproduce the version.

    `configs` are the sections of the stages that make a policy; a data repository in them is at a commit.
    """
    changes = [] if made_by.work.code == code else ["the code"]
    recorded = {work.stage: work.config for work in made_by.works}
    for stage, config in configs.items():
        try:
            before = without_operational(type(config).model_validate(recorded.get(stage, {})))
        except ValidationError:  # written by an older version of the code, with other keys
            before = {}
        now = without_operational(config)
        changes += [f"{stage}.{key}" for key in now if key not in before or now[key] != before[key]]
    return changes
