"""DVC in a process of its own: `python dvc_process.py ARGUMENTS`, as for the command `dvc`.

What fails because of a network or a server ends with exit code 75, since it may work the next time. One command is
added, `get-checked REPOSITORY PATH REVISION DESTINATION`: DVC itself copies damaged objects out of a storage.
"""

import errno
import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dvc.cli import main as dvc
from dvc.config import NoRemoteError
from dvc.exceptions import DvcException
from dvc.fs import download
from dvc.repo import Repo
from dvc_data.hashfile.hash import file_md5

_TRANSIENT = 75
"""Exit code of RetryableError, which cannot be imported: the project is not on this process's path."""
_TRANSIENT_ERRNOS = {errno.EIO, errno.ESTALE, errno.EHOSTUNREACH, errno.ENETUNREACH, getattr(errno, "EREMOTEIO", 5)}
_TRANSIENT_ERRORS = {
    "ConnectionError",  # Python's, botocore's
    "TimeoutError",
    "HTTPClientError",  # botocore: no answer, or half of one
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
}


class _Object(NamedTuple):
    """The content of one file of the repository in the storage."""

    file: PurePosixPath
    md5: str
    hash_name: str
    odb: Any

    @property
    def path(self) -> str:
        path: str = self.odb.oid_to_path(self.md5)
        return path


class _Failures(logging.Handler):
    """Remembers whether an error that DVC has logged is transient."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.transient = False

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the exception behind a message."""
        if record.exc_info and record.exc_info[1]:
            self.transient |= any(map(_is_transient, _causes(record.exc_info[1])))


def main(arguments: list[str]) -> int:
    """Run DVC and return its exit code."""
    failures = _Failures()
    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).addHandler(failures)
    code = 0
    if arguments[0] != "get-checked":
        code = dvc(arguments) or 0
    else:
        try:
            get_checked(*arguments[1:])
        except Exception as error:  # as DVC does: any error is reported in one line
            causes = list(_causes(error))
            reasons = dict.fromkeys(" ".join(str(cause).split()) or type(cause).__name__ for cause in causes)
            print(f"ERROR: {': '.join(reasons)}", file=sys.stderr)
            failures.transient |= any(map(_is_transient, causes))
            code = 1
    return _TRANSIENT if code and failures.transient else code


def get_checked(repository: str, path: str, revision: str, destination: str) -> None:
    """Copy a file or folder of one revision of a repository; the content of each file is verified."""
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


def _objects(repo: Repo, path: PurePosixPath) -> Iterator[_Object]:
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
    raise DvcException(f"{top}: {fault}")


def _address(odb: Any) -> str:
    address: str = odb.fs.unstrip_protocol(odb.path)
    return address


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    answer = getattr(error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    status = status or getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status == 429
    return not _TRANSIENT_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
