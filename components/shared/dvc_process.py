"""DVC in a separate process: `python dvc_process.py ARGUMENTS`, with the arguments of the command `dvc`.

A failure of a network or a server ends with exit code 75, since a retry may succeed. There are five more commands,
because DVC itself copies damaged objects out of a storage without notice, and needs several processes where one
suffices: `get-checked REPOSITORY PATH REVISION DESTINATION`, `list-storage`, `store FOLDERS`, `unpack MD5 FOLDER` and
`read MD5S [DESTINATION [PATHS]]`. All but the first use the default remote of `.dvc/config` in the working folder;
`store` and `read` take and print JSON. In DVC's terms an `odb` is an object database: a cache or the storage.
"""

import errno
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dvc.cli import main as dvc
from dvc.config import Config, NoRemoteError
from dvc.exceptions import DvcException
from dvc.fs import download, get_cloud_fs, localfs
from dvc_data.hashfile.build import build
from dvc_data.hashfile.hash import file_md5

_TRANSIENT = 75
"""Exit code of RetryableError, which cannot be imported: the project is not on this process's path."""
_DENIED = 77
"""Exit code if a server refuses the credentials."""
_TRANSIENT_ERRNOS = {errno.EIO, errno.ESTALE, errno.EHOSTUNREACH, errno.ENETUNREACH, getattr(errno, "EREMOTEIO", 5)}
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_TRANSIENT_ERRORS = {
    "ConnectionError",  # Python's, botocore's
    "TimeoutError",
    "HTTPClientError",  # botocore: no answer, or half of one
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ConnectionLost",  # asyncssh
}
_CREDENTIALS_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "PermissionDenied", "HostKeyNotVerifiable"}
"""Classes of botocore and asyncssh."""
_TRUSTED_SETTINGS = {"core": {"remote", "no_scm"}, "remote": {"url", "endpointurl", "region"}}
"""Settings that count in a repository's own config, by section. Whoever can push to the repository writes that config:
others could run commands (`profile`), read local files (`credentialpath`, `keyfile`) or write them (`cache.dir`)."""
_MAX_THREADS = 8
_BLOCK_BYTES = 1 << 20


class _Object(NamedTuple):
    """The object in the storage with the content of one file of a repository."""

    file: PurePosixPath
    md5: str
    hash_name: str
    odb: Any

    @property
    def path(self) -> str:
        return str(self.odb.oid_to_path(self.md5))


class _DamageError(DvcException):  # type: ignore[misc]
    """An object is missing, or its content does not have the MD5 in its name."""


class _ExitCode(logging.Handler):
    """Derives an exit code from the errors that DVC logs; 0 if they need no special one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.code = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take the exception of a log message into account."""
        if record.exc_info and record.exc_info[1]:
            self.add(record.exc_info[1])

    def add(self, error: BaseException) -> None:
        """Take an exception and its causes into account; a transient cause takes precedence over wrong credentials."""
        causes = list(_causes(error))
        if any(map(_is_transient, causes)):
            self.code = _TRANSIENT
        elif not self.code and any(map(_is_denied, causes)):
            self.code = _DENIED


def _load_trusted(config: Config, level: str) -> dict[str, Any]:
    """Return one level of DVC's config; of a repository's own levels only the address of its storage."""
    loaded: dict[str, Any] = _load_all(config, level)
    if level not in ("repo", "local"):
        return loaded
    remotes = {name: _trusted(remote, "remote") for name, remote in loaded.get("remote", {}).items()}
    return {"core": _trusted(loaded.get("core", {}), "core"), "remote": remotes}


def _trusted(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in _TRUSTED_SETTINGS[section]}


_load_all = Config._load_config
Config._load_config = _load_trusted


def main(arguments: list[str]) -> int:
    """Run a command of DVC or of this module and return its exit code."""
    special_code = _ExitCode()
    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).addHandler(special_code)
    commands: Sequence[Callable[..., None]] = (get_checked, list_storage, read, store, unpack)
    command = {each.__name__.replace("_", "-"): each for each in commands}.get(arguments[0])
    if command is None:
        code: int = dvc(arguments)
        return special_code.code or code if code else 0  # DVC can succeed after it has logged an error
    try:
        command(*arguments[1:])
    except Exception as error:  # as DVC does: any error is reported in one line
        reasons = [" ".join(str(cause).split()) or type(cause).__name__ for cause in _causes(error)]
        print(f"ERROR: {': '.join(dict.fromkeys(reasons))}", file=sys.stderr)
        special_code.add(error)
        return special_code.code or 1
    return 0


def get_checked(repository: str, path: str, revision: str, destination: str) -> None:
    """Copy a file or folder of a repository at one revision, and verify the MD5 of each file that DVC tracks."""
    from dvc.repo import Repo

    top = PurePosixPath(path)
    with Repo.open(url=repository, rev=revision, subrepos=True, uninitialized=True) as repo:
        objects = [each for each in _objects(repo, top) if each.file.is_relative_to(top)]
        try:
            download(repo.dvcfs, path, destination)
        except FileNotFoundError:
            for each in objects:
                if not each.odb.fs.exists(each.path):
                    message = f"{each.file}: its object {each.path} is missing from the storage"
                    raise DvcException(message) from None
            raise
        except Exception as error:
            if not objects:
                raise
            raise DvcException(f"{path} cannot be read from {_address(objects[0].odb)}") from error
    for each in objects:
        copy = Path(destination, each.file.relative_to(top))
        if not copy.is_file() or file_md5(str(copy), name=each.hash_name) != each.md5:
            raise DvcException(f"{each.file} is damaged: its object {each.path} has other content")


def store(folders: str) -> None:
    """Copy folders (JSON: path by name) into the storage and read everything back.

    Prints what `read` prints, and `pointers`: the fields of each folder's .dvc file. Objects that are damaged in the
    storage are replaced once. A fault that remains means that the storage does not return what is written to it.
    """
    odb = _storage()
    pointers: dict[str, dict[str, Any]] = {}
    objects: dict[str, Any] = {}
    for name, path in json.loads(folders).items():
        tree: Any
        staging, meta, tree = build(odb, str(Path(path)), localfs, "md5")  # a path without `//`, as DVC expects
        pointers[name] = {"md5": tree.oid, "size": meta.size, "nfiles": meta.nfiles, "hash": "md5"}
        objects |= {md5.value: staging.get(md5.value) for _, _, md5 in tree}
        objects[tree.oid] = staging.get(tree.oid)
    md5s = {name: pointer["md5"] for name, pointer in pointers.items()}
    existing = set(odb.oids_exist(list(objects)))
    _upload(odb, [each for md5, each in objects.items() if md5 not in existing])
    report, damaged = _read_folders(odb, md5s)
    if damaged:
        _upload(odb, [objects[md5] for md5 in damaged])
        report, _ = _read_folders(odb, md5s)
    print(json.dumps({"pointers": pointers, **report}))


def read(md5s: str, destination: str | None = None, paths: str = '["."]') -> None:
    """Read the files below one of `paths` in folders or files of the storage (JSON: MD5 by name).

    Verifies every file, and writes it below `destination` if there is one. Prints `files` (SHA-256 by path), `faults`
    (a message about the missing or damaged object by each file or folder that needs it) and `num_bytes`, as read.
    """
    odb = _storage()
    report, damaged = _read_folders(odb, json.loads(md5s), destination, json.loads(paths))
    if damaged and not odb.fs.exists(odb.path):
        raise DvcException(f"{_top(odb)}: the storage is missing or empty; restore or mount it")
    print(json.dumps(report))


def list_storage() -> None:
    """Check that the storage answers; an empty storage is fine, a missing bucket is an error."""
    odb = _storage()
    try:
        odb.fs.ls(odb.path, detail=False)
    except FileNotFoundError as error:
        if error.__cause__:  # the server's error about a missing bucket
            raise


def unpack(folder_md5: str, folder: str) -> None:
    """Copy a folder of the storage, given its MD5, to plain files in the storage's `folder`, for readers without DVC.

    Every copy is read back. A complete one is left alone, so that an interrupted call can be repeated.
    """
    odb = _storage()
    top = odb.fs.join(_top(odb), folder)

    def copy(entry: Mapping[str, str]) -> None:
        target = odb.fs.join(top, *PurePosixPath(entry["relpath"]).parts)
        with suppress(OSError):  # a target that is missing or cannot be read is copied again
            if _md5(odb, target) == entry["md5"]:
                return
        odb.fs.copy(odb.oid_to_path(entry["md5"]), target)
        if _md5(odb, target) != entry["md5"]:
            raise _DamageError(f"{target} does not have the content that was copied there")

    with ThreadPoolExecutor(min(_MAX_THREADS, odb.fs.jobs)) as pool:
        list(pool.map(copy, _entries([odb], folder_md5, PurePosixPath(folder))))


def _md5(odb: Any, path: str) -> str:
    with odb.fs.open(path, "rb") as source:
        return _copy(source, None)[0]


def _storage() -> Any:
    """Return the object database of the default remote in .dvc/config."""
    from dvc.data_cloud import Remote

    config = Config(".dvc")
    name = config["core"].get("remote")
    if not name:
        raise NoRemoteError("no default remote in .dvc/config")
    kind, options, path = get_cloud_fs(config, name=name)
    return Remote(name, path, kind(**options), **options).odb


def _upload(odb: Any, objects: Sequence[Any]) -> None:
    """Write objects into the storage; the lists of folders' files come last, so that a list's files are there."""
    failed: list[tuple[str, BaseException]] = []

    def on_error(oid: str, error: BaseException) -> None:
        failed.append((oid, error))

    for is_list in (False, True):
        batch = [each for each in objects if each.hash_info.isdir == is_list]
        if batch and not failed:
            paths, oids = [each.path for each in batch], [each.oid for each in batch]
            odb.add(paths, batch[0].fs, oids, check_exists=False, batch_size=odb.fs.jobs, on_error=on_error)
    if failed:
        oid, error = failed[0]
        raise DvcException(f"failed to transfer '{oid}' to {_address(odb)}") from error


def _read_folders(
    odb: Any, md5s: Mapping[str, str], destination: str | None = None, paths: Sequence[str] = (".",)
) -> tuple[dict[str, Any], list[str]]:
    """Read folders by name and MD5; return what `read` prints, and the MD5s of missing and damaged objects."""
    files_of: dict[str, list[PurePosixPath]] = {}
    faults: dict[str, str] = {}
    damaged: list[str] = []
    num_bytes = 0
    for name, md5 in md5s.items():
        try:
            entries = _entries([odb], md5, PurePosixPath(name))
        except _DamageError as error:
            faults[name] = str(error)
            damaged.append(md5)
            continue
        num_bytes += len(json.dumps(entries))
        for entry in entries:
            file = PurePosixPath(name, entry["relpath"])
            if ".." in file.parts or not file.is_relative_to(name):
                raise DvcException(f"{name}: its list of files has the path {file}, which is outside the folder")
            if any(file.is_relative_to(path) for path in paths):
                files_of.setdefault(entry["md5"], []).append(file)
    digests: dict[str, str] = {}
    folder = Path(destination) if destination else None
    with ThreadPoolExecutor(min(_MAX_THREADS, odb.fs.jobs)) as pool:
        jobs = {md5: pool.submit(_read_object, odb, md5, files, folder) for md5, files in files_of.items()}
        for md5, job in jobs.items():
            try:
                sha256, size = job.result()
            except _DamageError as error:
                faults |= {str(file): f"{file}: {error}" for file in files_of[md5]}
                damaged.append(md5)
                continue
            num_bytes += size
            digests |= {str(file): sha256 for file in files_of[md5]}
    return {"files": digests, "faults": faults, "num_bytes": num_bytes}, damaged


def _read_object(odb: Any, md5: str, files: Sequence[PurePosixPath], folder: Path | None) -> tuple[str, int]:
    """Verify an object, write it to each of the files with its content in a folder, and return its SHA-256 and size."""
    path = odb.oid_to_path(md5)
    copies = [folder / file for file in files] if folder else []
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        with odb.fs.open(path, "rb") as source, copies[0].open("wb") if copies else nullcontext() as target:
            actual, sha256, size = _copy(source, target)
    except FileNotFoundError:
        raise _DamageError(f"its object {path} is missing from the storage") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL_ERRNOS:
            raise DvcException(f"{copies[0]}: cannot be written: the disk is full") from None
        raise DvcException(f"{files[0]} cannot be read from {_address(odb)}") from error
    if actual != md5:
        raise _DamageError(f"its object {path} is damaged")
    for copy in copies[1:]:
        shutil.copyfile(copies[0], copy)
    return sha256, size


def _copy(source: Any, target: Any) -> tuple[str, str, int]:
    """Read a stream, copy it to the target, if any, and return its MD5, SHA-256 and size."""
    md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    while block := source.read(_BLOCK_BYTES):
        size += len(block)
        md5.update(block)
        sha256.update(block)
        if target:
            target.write(block)
    return md5.hexdigest(), sha256.hexdigest(), size


def _objects(repo: Any, path: PurePosixPath) -> Iterator[_Object]:
    """Yield the objects of each file or folder that DVC tracks as `path` or as a parent of it."""
    for out in repo.index.outs:
        top = PurePosixPath(*repo.fs.relparts(out.fs_path, repo.root_dir))
        if not path.is_relative_to(top) or not out.hash_info:
            continue
        hash_name, md5 = out.hash_info.name, out.hash_info.value
        odbs = [repo.cache.local if out.hash_name == "md5" else repo.cache.legacy]
        with suppress(NoRemoteError):
            odbs.append(repo.cloud.get_remote_odb(out.remote, hash_name=out.hash_name))
        for entry in _entries(odbs, md5, top):
            yield _Object(top / entry["relpath"], entry["md5"], hash_name, odbs[-1])


def _entries(odbs: list[Any], folder_md5: str, folder: PurePosixPath) -> Any:
    """Return the `relpath` and `md5` of each file in a folder, from the first undamaged list of its files in `odbs`.

    A single file is its only entry.
    """
    if not folder_md5.endswith(".dir"):
        return [{"relpath": "", "md5": folder_md5}]
    path = odbs[-1].oid_to_path(folder_md5)
    fault = f"its list of files {path} is missing from the storage"
    for odb in odbs:
        try:
            content = odb.fs.cat_file(odb.oid_to_path(folder_md5))
        except FileNotFoundError:
            continue
        except Exception as error:
            raise DvcException(f"{folder}: its list of files {path} cannot be read from {_address(odb)}") from error
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == folder_md5.removesuffix(".dir"):
            return json.loads(content)
        fault = f"its list of files {path} is damaged"
    raise _DamageError(f"{folder}: {fault}")


def _top(odb: Any) -> str:
    return str(odb.fs.parent(odb.fs.parent(odb.path)))  # DVC's objects are below files/md5


def _address(odb: Any) -> str:
    return str(odb.fs.unstrip_protocol(odb.path))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, as a traceback shows them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_transient(error: BaseException) -> bool:
    """Return whether a network or a server has failed, so that a retry may succeed."""
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    status = _status(error)
    if status is not None:
        return status >= 500 or status == 429
    return not _TRANSIENT_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def _is_denied(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return _status(error) in {401, 403} or not _CREDENTIALS_ERRORS.isdisjoint(names)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore or aiohttp, if any."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
