"""DVC as it is run here, in a process of its own: `python dvc_process.py ARGUMENTS`, as for the command `dvc`.

What fails because of a network or a server ends with exit code 75, for it may work the next time. And one command is
added, `get-checked REPOSITORY PATH REVISION DESTINATION`: DVC itself copies damaged objects out of a storage.
"""

import errno
import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dvc.cli import main as dvc
from dvc.config import NoRemoteError
from dvc.fs import download
from dvc.repo import Repo
from dvc_data.hashfile.hash import file_md5

_MAY_PASS = 75
_PASSING_NUMBERS = {
    errno.EIO,
    errno.ESTALE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    getattr(errno, "EREMOTEIO", errno.EIO),
}
_PASSING_KINDS = {
    "ConnectionError",  # Python's, botocore's
    "TimeoutError",
    "HTTPClientError",  # botocore: an answer that never came, or half of one
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
}
_LOGGERS = ("dvc", "dvc_data", "dvc_objects")


class StorageError(Exception):
    """The storage does not hold what was put into it."""


@dataclass(frozen=True)
class _Stored:
    """One file and the object that has its content."""

    name: str
    """Relative to what was asked for; `.` for a single file."""
    md5: str
    hash_name: str
    odb: Any
    """The storage that is to have it."""

    @property
    def place(self) -> str:
        """Of its object in the storage."""
        place: str = self.odb.oid_to_path(self.md5)
        return place


class _Failures(logging.Handler):
    """Remembers whether any of what DVC reports may pass by itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.may_pass = False

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the exception behind a message."""
        if record.exc_info and record.exc_info[1]:
            self.may_pass |= any(map(_may_pass, _causes(record.exc_info[1])))


def main(arguments: list[str]) -> int:
    """Run DVC and return its exit code."""
    failures = _Failures()
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(failures)
    if arguments[0] != "get-checked":
        code = dvc(arguments) or 0
        return _MAY_PASS if code and failures.may_pass else code
    try:
        get_checked(*arguments[1:])
    except Exception as error:  # as DVC does: whatever it is, it is reported in one line
        causes = list(_causes(error))
        reasons = dict.fromkeys(" ".join(str(cause).split()) or type(cause).__name__ for cause in causes)
        print(f"ERROR: {': '.join(reasons)}", file=sys.stderr)
        return _MAY_PASS if failures.may_pass or any(map(_may_pass, causes)) else 1
    return 0


def get_checked(repository: str, path: str, revision: str, destination: str) -> None:
    """Copy a file or folder of one revision of a repository; each file is what its pointer says."""
    with Repo.open(url=repository, rev=revision, subrepos=True, uninitialized=True) as repo:
        files = list(_stored(repo, PurePosixPath(path)))
        try:
            download(repo.dvcfs, path, destination)
        except FileNotFoundError:
            for file in files:
                if not file.odb.fs.exists(file.place):
                    missing = f"{_shown(path, file)}: its object {file.place} is missing from the storage"
                    raise StorageError(missing) from None
            raise
        except Exception as error:
            if not files:
                raise
            raise StorageError(f"{path} cannot be read from {_address(files[0].odb)}") from error
    for file in files:
        found = Path(destination, file.name)
        if not found.is_file() or file_md5(str(found), name=file.hash_name) != file.md5:
            raise StorageError(f"{_shown(path, file)} is damaged: its object {file.place} has other content")


def _stored(repo: Repo, path: PurePosixPath) -> Iterator[_Stored]:
    """Each file of `path` that DVC keeps, from the list of a folder's files, which is checked as well."""
    for out in repo.index.outs:
        top = PurePosixPath(*repo.fs.relparts(out.fs_path, repo.root_dir))
        if not path.is_relative_to(top) or not out.hash_info:
            continue
        name, value = out.hash_info.name, out.hash_info.value
        odbs = _odbs(repo, out)
        if not out.hash_info.isdir:
            yield _Stored(".", value, name, odbs[-1])
            continue
        for entry in _entries(odbs, value, top):
            file = top / entry["relpath"]
            if file.is_relative_to(path):
                relative = file.relative_to(path).as_posix()
                yield _Stored(relative, entry["md5"], name, odbs[-1])


def _odbs(repo: Repo, out: Any) -> list[Any]:
    """Where the content of an output may be: the cache and, last, the storage."""
    odbs = [repo.cache.local if out.hash_name == "md5" else repo.cache.legacy]
    with suppress(NoRemoteError):
        odbs.append(repo.cloud.get_remote_odb(out.remote, hash_name=out.hash_name))
    return odbs


def _entries(odbs: list[Any], value: str, top: PurePosixPath) -> Any:
    """The files of a folder, as the first whole list of them says."""
    place = odbs[-1].oid_to_path(value)
    fault = f"its list of files {place} is missing from the storage"
    for odb in odbs:
        try:
            content = odb.fs.cat_file(odb.oid_to_path(value))
        except FileNotFoundError:
            continue
        except Exception as error:
            raise StorageError(f"{top}: its list of files {place} cannot be read from {_address(odb)}") from error
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == value.removesuffix(".dir"):
            return json.loads(content)
        fault = f"its list of files {place} is damaged"
    raise StorageError(f"{top}: {fault}")


def _address(odb: Any) -> str:
    address: str = odb.fs.unstrip_protocol(odb.path)
    return address


def _shown(path: str, file: _Stored) -> PurePosixPath:
    return PurePosixPath(path, file.name)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _PASSING_NUMBERS:
        return True
    answer = getattr(error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    status = status or getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status == 429
    return not _PASSING_KINDS.isdisjoint(kind.__name__ for kind in type(error).__mro__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
