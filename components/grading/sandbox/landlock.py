"""Landlock: the files that this process may go on reading; nothing else of the file system is open to it."""

import ctypes
import os
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NUM_FILE_RIGHTS_SINCE_5 = 16
_TCP = 0b11
_SCOPES = 0b11
"""Abstract Unix sockets and signals."""
_DO_NOT_LOG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def allow_reading(files: list[str], folders: list[str]) -> None:
    """Leave this process nothing but reading `files`, all below them, and the names in `folders`; for good.

    Later versions of Landlock know more kinds of access; all that this one knows are denied. OSError where it is
    missing.
    """
    version = _call(_CREATE_RULESET, None, 0, _GET_VERSION)
    file_rights = (1 << _NUM_FILE_RIGHTS.get(version, _NUM_FILE_RIGHTS_SINCE_5)) - 1
    handled = struct.pack("QQQ", file_rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = _call(_CREATE_RULESET, handled, len(handled), 0)
    for paths, right in ((files, _READ_FILE), (folders, _READ_DIR)):
        for path in paths:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", right, beneath), 0)
            os.close(beneath)
    _call(_RESTRICT_SELF, ruleset, _DO_NOT_LOG if version >= 7 else 0)
    os.close(ruleset)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(f"Landlock is not available ({os.strerror(ctypes.get_errno())})")
    return result
