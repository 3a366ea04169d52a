"""DVC in a separate process: `python dvc_process.py ARGUMENTS`, as for the command `dvc`.

A failure of a network or a server ends with exit code 75, since a retry may succeed. There are five more commands,
because DVC itself copies damaged objects out of a storage, and needs several processes where one suffices:
`get-checked REPOSITORY PATH REVISION DESTINATION`, `list-storage`, `store FOLDERS`, `unpack POINTER FOLDER` and
`read POINTERS [DESTINATION [PATHS]]`. All but the first work with the default remote of `.dvc/config` in the working
folder; `store` and `read` take and print JSON.
"""

import errno
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
"""Exit code where a server wants other credentials."""
_TRANSIENT_ERRNOS = {errno.EIO, errno.ESTALE, errno.EHOSTUNREACH, errno.ENETUNREACH, getattr(errno, "EREMOTEIO", 5)}
_TRANSIENT_ERRORS = {
    "ConnectionError",  # Python's, botocore's
    "TimeoutError",
    "HTTPClientError",  # botocore: no answer, or half of one
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ConnectionLost",  # asyncssh
}
_CREDENTIALS_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "PermissionDenied", "HostKeyNotVerifiable"}
"""Of botocore and asyncssh."""
_SETTINGS = {"core": {"remote", "no_scm"}, "remote": {"url", "endpointurl", "region"}}
"""What a repository's own config may say, by section. Others can run commands (`profile`), read files of this machine
(`credentialpath`, `keyfile`) or write them (`cache.dir`), and whoever may push to the repository writes them."""
_MAX_THREADS = 8
_BLOCK_BYTES = 1 << 20


class _Object(NamedTuple):
    """The content of one file of the repository in the storage."""

    file: PurePosixPath
    md5: str
    hash_name: str
    odb: Any

    @property
    def path(self) -> str:
        return str(self.odb.oid_to_path(self.md5))


class _DamageError(DvcException):  # type: ignore[misc]
    """An object that is missing, or has other content than its name says."""


class _Failures(logging.Handler):
    """Remembers the exit code for the errors that DVC has logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.code = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the exception behind a message."""
        if record.exc_info and record.exc_info[1]:
            self.add(record.exc_info[1])

    def add(self, error: BaseException) -> None:
        """Look at an exception and its causes; a transient cause takes precedence over wrong credentials."""
        causes = list(_causes(error))
        if any(map(_is_transient, causes)):
            self.code = _TRANSIENT
        elif any(map(_is_denied, causes)):
            self.code = self.code or _DENIED


def _trusted(config: dict[str, Any]) -> dict[str, Any]:
    """Return the trusted part of a repository's config: the address of its storage."""
    core = {key: value for key, value in config.get("core", {}).items() if key in _SETTINGS["core"]}
    remotes = {
        name: {key: value for key, value in settings.items() if key in _SETTINGS["remote"]}
        for name, settings in config.get("remote", {}).items()
    }
    return {"core": core, "remote": remotes}


def _load_config(config: Config, level: str) -> dict[str, Any]:
    loaded: dict[str, Any] = _load_all(config, level)
    return _trusted(loaded) if level in ("repo", "local") else loaded


_load_all, Config._load_config = Config._load_config, _load_config


def main(arguments: list[str]) -> int:
    """Run DVC and return its exit code."""
    failures = _Failures()
    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).addHandler(failures)
    code = 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        code = dvc(arguments) or 0
    else:
        try:
            command(*arguments[1:])
        except Exception as error:  # as DVC does: any error is reported in one line
            causes = list(_causes(error))
            reasons = dict.fromkeys(" ".join(str(cause).split()) or type(cause).__name__ for cause in causes)
            print(f"ERROR: {': '.join(reasons)}", file=sys.stderr)
            failures.add(error)
            code = 1
    return failures.code or code if code else 0


def get_checked(repository: str, path: str, revision: str, destination: str) -> None:
    """Copy a file or folder of one revision of a repository; the content of each file is verified."""
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
    """Copy folders, by their names, into the storage, read everything back and print what `read` prints.

    To that is added `pointers`, the fields of each folder's .dvc file. An object that is damaged in the storage is
    replaced. A fault that remains means that the storage does not return what is written to it.
    """
    odb, pointers = _storage(), {}
    objects: dict[str, Any] = {}
    for name, path in json.loads(folders).items():
        tree: Any
        staging, meta, tree = build(odb, str(Path(path)), localfs, "md5")  # DVC does not expect `//`
        pointers[name] = {"md5": tree.oid, "size": meta.size, "nfiles": meta.nfiles, "hash": "md5"}
        objects |= {md5.value: staging.get(md5.value) for _, _, md5 in tree}
        objects[tree.oid] = staging.get(tree.oid)
    missing: Collection[str] = objects.keys() - odb.oids_exist(list(objects))
    content: dict[str, Any] = {}
    for _ in range(2):
        _upload(odb, [each for md5, each in objects.items() if md5 in missing])
        content = _content(odb, {name: pointer["md5"] for name, pointer in pointers.items()})
        missing = content.pop("damaged")
        if not missing:
            break
    print(json.dumps({"pointers": pointers, **content}))


def read(pointers: str, destination: str | None = None, paths: str = '["."]') -> None:
    """Read folders from the storage, by the name and the MD5 of each, or what of them is below one of `paths`.

    Every file is verified, and written below `destination` if there is one. Printed are `files`, the SHA-256 of each by
    its path; `faults`, a line for each object that is missing or damaged, with the files or the folder that need it;
    and `num_bytes`, what was read.
    """
    content = _content(_storage(), json.loads(pointers), destination, json.loads(paths))
    del content["damaged"]
    print(json.dumps(content))


def list_storage() -> None:
    """List the storage; an empty storage is fine, a missing bucket is an error."""
    odb = _storage()
    try:
        odb.fs.ls(odb.path, detail=False)
    except FileNotFoundError as error:
        if error.__cause__:
            raise


def unpack(pointer: str, folder: str) -> None:
    """Copy a folder of the storage, by its MD5, to plain files in `folder` of the storage, for those without DVC.

    Every copy is read back. One that is complete already is left alone, so that an interrupted call can be repeated.
    """
    odb = _storage()
    top = odb.fs.join(odb.fs.parent(odb.fs.parent(odb.path)), folder)

    def copy(entry: Mapping[str, str]) -> None:
        target = odb.fs.join(top, *PurePosixPath(entry["relpath"]).parts)
        with suppress(OSError):  # it is not there, or cannot be read: either way it is copied again
            if _md5(odb, target) == entry["md5"]:
                return
        odb.fs.copy(odb.oid_to_path(entry["md5"]), target)
        if _md5(odb, target) != entry["md5"]:
            raise _DamageError(f"{target} does not have what was copied there")

    with ThreadPoolExecutor(min(_MAX_THREADS, odb.fs.jobs)) as pool:
        list(pool.map(copy, _entries([odb], pointer, PurePosixPath(folder))))


def _md5(odb: Any, path: str) -> str:
    with odb.fs.open(path, "rb") as source:
        return _copy(source, None)[0]


_COMMANDS: dict[str, Callable[..., None]] = {
    "get-checked": get_checked,
    "list-storage": list_storage,
    "read": read,
    "store": store,
    "unpack": unpack,
}


def _storage() -> Any:
    from dvc.data_cloud import Remote

    config = Config(".dvc")
    name = config["core"].get("remote")
    if not name:
        raise NoRemoteError("no default remote in .dvc/config")
    kind, options, path = get_cloud_fs(config, name=name)
    return Remote(name, path, kind(**options), **options).odb


def _upload(odb: Any, objects: Sequence[Any]) -> None:
    """Write objects into the storage; the lists of folders' files come last."""
    failed: list[tuple[str, BaseException]] = []
    for is_list in (False, True):
        batch = [each for each in objects if each.hash_info.isdir == is_list]
        if batch and not failed:
            paths, oids = [each.path for each in batch], [each.oid for each in batch]
            fail: Callable[[str, BaseException], None] = lambda oid, error: failed.append((oid, error))  # noqa: E731
            odb.add(paths, batch[0].fs, oids, check_exists=False, batch_size=odb.fs.jobs, on_error=fail)
    if failed:
        raise DvcException(f"failed to transfer '{failed[0][0]}' to {_address(odb)}") from failed[0][1]


def _content(
    odb: Any, pointers: Mapping[str, str], destination: str | None = None, paths: Sequence[str] = (".",)
) -> dict[str, Any]:
    """What `read` prints, and as `damaged` the names of the objects with a fault."""
    by_object: dict[str, list[PurePosixPath]] = {}
    faults: dict[str, list[str]] = {}
    damaged: list[str] = []
    num_bytes = 0
    for name, md5 in pointers.items():
        try:
            entries = _entries([odb], md5, PurePosixPath(name))
        except _DamageError as error:
            faults[str(error)] = [name]
            damaged.append(md5)
            continue
        num_bytes += len(json.dumps(entries))
        for entry in entries:
            file = PurePosixPath(name, entry["relpath"])
            if ".." in file.parts or not file.is_relative_to(name):
                raise DvcException(f"{name}: its list of files has the path {file}, which is outside the folder")
            if any(file.is_relative_to(path) for path in paths):
                by_object.setdefault(entry["md5"], []).append(file)
    files: dict[str, str] = {}
    folder = Path(destination) if destination else None
    with ThreadPoolExecutor(min(_MAX_THREADS, odb.fs.jobs)) as pool:
        jobs = {md5: pool.submit(_read_object, odb, md5, copies, folder) for md5, copies in by_object.items()}
        for md5, job in jobs.items():
            try:
                sha256, size = job.result()
            except _DamageError as error:
                faults[str(error)] = [str(file) for file in by_object[md5]]
                damaged.append(md5)
                continue
            num_bytes += size
            files |= {str(file): sha256 for file in by_object[md5]}
    return {"files": files, "faults": faults, "num_bytes": num_bytes, "damaged": damaged}


def _read_object(odb: Any, md5: str, files: Sequence[PurePosixPath], folder: Path | None) -> tuple[str, int]:
    """Verify an object, write it to each of its files in a folder, and return its SHA-256 and size."""
    path = odb.oid_to_path(md5)
    named = f"{files[0]} (and {len(files) - 1} others)" if len(files) > 1 else files[0]
    copies = [folder / file for file in files] if folder else []
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        with odb.fs.open(path, "rb") as source, copies[0].open("wb") if copies else nullcontext() as target:
            actual, sha256, size = _copy(source, target)
    except FileNotFoundError:
        raise _DamageError(f"{named}: its object {path} is missing from the storage") from None
    except Exception as error:
        raise DvcException(f"{named} cannot be read from {_address(odb)}") from error
    if actual != md5:
        raise _DamageError(f"{named} is damaged: its object {path} has other content")
    for copy in copies[1:]:
        shutil.copyfile(copies[0], copy)
    return sha256, size


def _copy(source: Any, target: Any) -> tuple[str, str, int]:
    """Copy a stream, if there is a target, and return its MD5, SHA-256 and size."""
    md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    while block := source.read(_BLOCK_BYTES):
        size += len(block)
        md5.update(block)
        sha256.update(block)
        if target:
            target.write(block)
    return md5.hexdigest(), sha256.hexdigest(), size


def _objects(repo: Any, path: PurePosixPath) -> Iterator[_Object]:
    """The objects of each tracked file or folder that `path` is, or is in."""
    for out in repo.index.outs:
        top = PurePosixPath(*repo.fs.relparts(out.fs_path, repo.root_dir))
        if not path.is_relative_to(top) or not out.hash_info:
            continue
        name, value = out.hash_info.name, out.hash_info.value
        odbs = [repo.cache.local if out.hash_name == "md5" else repo.cache.legacy]
        with suppress(NoRemoteError):
            odbs.append(repo.cloud.get_remote_odb(out.remote, hash_name=out.hash_name))
        if not out.hash_info.isdir:
            yield _Object(top, value, name, odbs[-1])
            continue
        for entry in _entries(odbs, value, top):
            yield _Object(top / entry["relpath"], entry["md5"], name, odbs[-1])


def _entries(odbs: list[Any], value: str, top: PurePosixPath) -> Any:
    """The files of a folder, from the first undamaged listing in the cache or the storage."""
    path = odbs[-1].oid_to_path(value)
    fault = f"its list of files {path} is missing from the storage"
    for odb in odbs:
        try:
            content = odb.fs.cat_file(odb.oid_to_path(value))
        except FileNotFoundError:
            continue
        except Exception as error:
            raise DvcException(f"{top}: its list of files {path} cannot be read from {_address(odb)}") from error
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == value.removesuffix(".dir"):
            return json.loads(content)
        fault = f"its list of files {path} is damaged"
    raise _DamageError(f"{top}: {fault}")


def _address(odb: Any) -> str:
    return str(odb.fs.unstrip_protocol(odb.path))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_transient(error: BaseException) -> bool:
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
    answer = getattr(error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    status = status or getattr(error, "status", None)
    return status if isinstance(status, int) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
