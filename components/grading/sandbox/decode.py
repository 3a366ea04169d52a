"""Values as they come out of the sandbox, from a process that may send anything."""

from collections.abc import Callable
from typing import Any

from components.grading.sandbox.encode import NotPlainDataError
from components.grading.sandbox.limits import HASHED_PARTS, VALUE_DEPTH

_SCALARS: dict[str, Callable[[str], object]] = {
    "int": lambda digits: int(digits, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts.split())),
    "str": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
}
_SEQUENCES: dict[str, Callable[[list[Any]], object]] = {"list": list, "tuple": tuple}
_HASHED: dict[str, Callable[[list[Any]], object]] = {"set": set, "frozenset": frozenset, "dict": dict}


def decode(sent: object) -> object:
    """Return the value that parsed JSON stands for; NotPlainDataError where it stands for none.

    Exact instances of built-in types, nothing else: comparing them runs no code but Python's own.
    """
    try:
        return _decode(sent, VALUE_DEPTH)
    except (ValueError, TypeError, LookupError, OverflowError):
        raise NotPlainDataError("nothing that can be read") from None


def _decode(sent: object, depth: int) -> object:
    match sent:
        case None | bool():
            return sent
        case [str(kind), str(content)]:
            return _SCALARS[kind](content)
        case [str(kind), list(parts)] if depth > 0 and (kind in _SEQUENCES or len(parts) <= HASHED_PARTS):
            return (_SEQUENCES | _HASHED)[kind]([_decode(part, depth - 1) for part in parts])
    raise ValueError
