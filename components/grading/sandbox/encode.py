"""Values on their way out of the sandbox: plain data of Python's built-in types, as JSON in ASCII.

It imports nothing that takes time: every run starts an interpreter that has to load it.
"""

from components.grading.sandbox.limits import VALUE_DEPTH


class NotPlainDataError(ValueError):
    """A value that is no plain data, or nested too deeply."""


def encode(value: object, depth: int = VALUE_DEPTH) -> str:
    """Return a value as JSON, in which every number, text and container stands behind the name of its type.

    An instance of a subclass, such as a Counter or a named tuple, is sent as what it is an extension of.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    for scalar in (int, float, complex, str, bytes):
        if isinstance(value, scalar):
            return f'["{scalar.__name__}","{_written(value)}"]'
    for container in (list, tuple, set, frozenset, dict):
        if isinstance(value, container):
            parts = [*value.items()] if isinstance(value, dict) else [*value]
            return f'["{container.__name__}",[{_joined(parts, depth)}]]'
    raise NotPlainDataError(f"a {type(value).__name__}, which is no plain data")


def _written(value: object) -> str:
    """A number or text as digits that need no escaping, in time that is linear in its length."""
    match value:
        case int():
            return int.__format__(value, "x")
        case float():
            return float.hex(value)
        case complex():
            return f"{float.hex(value.real)} {float.hex(value.imag)}"
        case bytes():
            return bytes.hex(value)
    assert isinstance(value, str)
    return str.encode(value, "utf-8", "surrogatepass").hex()


def _joined(parts: list[object], depth: int) -> str:
    if depth == 0:
        raise NotPlainDataError("a value that is nested too deeply")
    return ",".join(encode(part, depth - 1) for part in parts)
