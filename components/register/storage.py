"""The storage of a registry: a DVC remote, which `.dvc/config` of the registry's repository names.

A new registry keeps where an S3 server is, so that whoever reads it needs credentials only.
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
    """Return DVC's config for a storage; one at s3:// without an endpoint has that of the environment."""
    remote: dict[str, str | None] = {"url": url}
    if url.startswith("s3://"):
        remote |= {"endpointurl": endpoint or _first(S3_ENDPOINT_VARIABLES), "region": _first(S3_REGION_VARIABLES)}
    lines = ["[core]", "    analytics = false", "    check_update = false", f"    remote = {REMOTE}", f"[{_SECTION}]"]
    return "\n".join([*lines, *(f"    {key} = {value}" for key, value in remote.items() if value), ""])


def storage_url(config: str, location: str, origin: str) -> str:
    """Return the storage that DVC's config of a registry names: a URL, or an absolute path on this machine."""
    url = _parsed(config).get(_SECTION, "url", fallback=None)
    if url is None:
        raise PipelineError(f"{location}: its {CONFIG} has no remote named `{REMOTE}`")
    return url if is_url(url) else os.path.normpath(Path(origin) / ".dvc" / url)


def storage_endpoint(config: str) -> str | None:
    """Return the address of the S3 server in DVC's config of a registry; None where it is Amazon's."""
    return _parsed(config).get(_SECTION, "endpointurl", fallback=None)


def config_below(config: str, folder: str) -> str:
    """Return DVC's config for a folder within the storage that a config names."""
    parser = _parsed(config)
    remote = parser[_SECTION]
    remote["url"] = f"{remote['url'].rstrip('/')}/{folder}"
    below = io.StringIO()
    parser.write(below)
    return below.getvalue()


def write_dvc_config(folder: Path, config: str, url: str) -> None:
    """Let DVC read and write the storage of a registry, at `url`, in a folder."""
    (folder / CONFIG).parent.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(config, encoding="utf-8")
    if not (ignored := (folder / CONFIG).with_name(".gitignore")).exists():
        ignored.write_text("/config.local\n/tmp\n/cache\n", encoding="utf-8")
    # DVC prefers config.local, and git ignores it.
    (folder / ".dvc" / "config.local").write_text(f"[{_SECTION}]\n    url = {url}\n", encoding="utf-8")


def pointer_file(path: str, pointer: Mapping[str, Any]) -> str:
    """Return the text of the `.dvc` file of a folder, next to it; `pointer` is what the command `store` printed."""
    return yaml.safe_dump({"outs": [{**pointer, "path": path}]}, sort_keys=False)


def md5_in(pointer_file: str | bytes) -> str:
    """Return the MD5 by which the storage finds the folder of a `.dvc` file."""
    md5: str = yaml.safe_load(pointer_file)["outs"][0]["md5"]
    return md5


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Put a prefix before an error of DVC in the block."""
    try:
        yield
    except PipelineError as error:
        raise type(error)(f"{prefix}: {str(error).removeprefix('dvc: ')}") from None


def check_storage(config: str) -> None:
    """List a storage at a URL.

    Raises:
        PipelineError: There is no such storage, or it wants other credentials.
        RetryableError: It does not answer.
    """
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


def _first(variables: tuple[str, ...]) -> str | None:
    return next(filter(None, map(os.environ.get, variables)), None)
