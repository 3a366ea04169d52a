"""The storage of a registry: a DVC remote, which `.dvc/config` of the registry's repository names.

That config also has the address and region of an S3 server, so a reader of the registry needs credentials only.
"""

import configparser
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from components.shared.environment import S3_ENDPOINT_VARIABLES, S3_REGION_VARIABLES
from components.shared.errors import PipelineError
from components.shared.versioning import Workspace, is_url

REMOTE = "storage"
"""Name of the storage among DVC's remotes."""
CONFIG = ".dvc/config"
"""DVC's config in the registry's repository."""
_SECTION = f"'remote \"{REMOTE}\"'"


def new_config(url: str, endpoint: str | None) -> str:
    """Return DVC's config for a storage; without an `endpoint`, s3:// takes the environment's."""
    remote: dict[str, str | None] = {"url": url}
    if url.startswith("s3://"):
        remote["endpointurl"] = endpoint or _first_set(S3_ENDPOINT_VARIABLES)
        remote["region"] = _first_set(S3_REGION_VARIABLES)
    lines = ["[core]", "    analytics = false", "    check_update = false", f"    remote = {REMOTE}", f"[{_SECTION}]"]
    return "\n".join([*lines, *(f"    {key} = {value}" for key, value in remote.items() if value), ""])


def storage_url(config: str, location: str, origin: str) -> str:
    """Return the storage in a DVC config: a URL or an absolute path; the config has paths relative to `origin`/.dvc."""
    url = _parsed(config).get(_SECTION, "url", fallback=None)
    if url is None:
        raise PipelineError(f"{location}: its {CONFIG} has no remote named `{REMOTE}`")
    return url if is_url(url) else os.path.normpath(Path(origin) / ".dvc" / url)


def storage_endpoint(config: str) -> str | None:
    """Return the address of the S3 server in a registry's DVC config; None if it is Amazon's."""
    return _parsed(config).get(_SECTION, "endpointurl", fallback=None)


def resolved(storage: str | None) -> str | None:
    """Return a configured storage with the absolute path of a folder."""
    return storage if storage is None or is_url(storage) else str(Path(storage).resolve())


def wrong_storage(config: str, location: str, origin: str, storage: str | None, endpoint: str | None) -> Iterator[str]:
    """Yield a line for each of the configured `storage` and `endpoint` that is not the one in a DVC config."""
    pairs = {
        "storage": (resolved(storage), storage_url(config, location, origin)),
        "storage_endpoint": (endpoint, storage_endpoint(config)),
    }
    for key, (wanted, actual) in pairs.items():
        if wanted is not None and wanted != actual:
            yield f"register.{key}: the versions in {location} are stored in {actual or 'Amazon S3'}, not in {wanted}"


def config_below(config: str, folder: str) -> str:
    """Return a copy of a DVC config whose storage is a folder within that of `config`."""
    parser = _parsed(config)
    url = parser[_SECTION]["url"].rstrip("/")
    parser[_SECTION]["url"] = f"{url}/{folder}"
    below = io.StringIO()
    parser.write(below)
    return below.getvalue()


def write_dvc_config(folder: Path, config: str, url: str) -> None:
    """Write a registry's DVC config into a working folder, so that DVC there uses the storage at `url`."""
    dvc_folder = (folder / CONFIG).parent
    dvc_folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(config, encoding="utf-8")
    gitignore = dvc_folder / ".gitignore"
    if not gitignore.exists():
        gitignore.write_text("/config.local\n/tmp\n/cache\n", encoding="utf-8")
    # The URL in the config may be relative to another folder. DVC prefers config.local, and git ignores it.
    (dvc_folder / "config.local").write_text(f"[{_SECTION}]\n    url = {url}\n", encoding="utf-8")


def pointer_file(path: str, pointer: Mapping[str, Any]) -> str:
    """Return the text of the `.dvc` file of a folder; `pointer` has the fields that dvc_process.py prints."""
    return yaml.safe_dump({"outs": [{**pointer, "path": path}]}, sort_keys=False)


def md5_in(pointer_file: str | bytes) -> str:
    """Return the MD5 in a `.dvc` file, by which the storage finds its folder."""
    return str(yaml.safe_load(pointer_file)["outs"][0]["md5"])


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Put a prefix before the message of a PipelineError in the block; it replaces the prefix `dvc: `."""
    try:
        yield
    except PipelineError as error:
        raise type(error)(f"{prefix}: {str(error).removeprefix('dvc: ')}") from None


def check_storage(config: str) -> None:
    """Raise PipelineError unless the storage of a DVC config can be listed; RetryableError if it does not answer."""
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-storage-") as scratch:
        workspace = Workspace(Path(scratch), Path(scratch))
        url = storage_url(config, "", "")
        write_dvc_config(workspace.folder, config, url)
        with error_prefix(f"{url}: cannot be listed"):
            workspace.dvc("list-storage")


def _parsed(config: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(config)
    return parser


def _first_set(variables: tuple[str, ...]) -> str | None:
    """Return the value of the first of these environment variables that is set."""
    return next(filter(None, map(os.environ.get, variables)), None)
