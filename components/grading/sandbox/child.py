"""The process in the sandbox: runs untrusted code, and sends the values of calls as JSON.

Nothing here can be trusted once the code runs: the code may change every object of this process and write to every
descriptor. Imports must be fast, since every run starts a new interpreter.
"""

import marshal
import os
import sys

from components.grading.sandbox.confinement import confine

MAX_DEPTH = 50
"""Maximum nesting of lists and other containers in a result."""
_MAX_MESSAGE_CHARACTERS = 200
_MODULE = "solution"
"""Not `__main__`, so that code under `if __name__ == "__main__"` does not run."""


class NotPlainDataError(ValueError):
    """A value that is not plain data, or nested too deeply."""


def main() -> None:
    """Confine this process, run the code from standard input, and write a line for each of its calls.

    A first line says whether the process is confined; only this line is written before the code runs.
    """
    results = os.dup(1)
    os.dup2(2, 1)  # what the code prints goes to stderr
    code, calls, files, folders, parent = marshal.load(sys.stdin.buffer)
    try:
        confine(files, folders, parent)
    except OSError as error:
        os.write(results, _line("failed", str(error)))
        os._exit(1)
    os.write(results, _line("returned", None))
    solution = type(sys)(_MODULE)
    sys.modules[_MODULE] = solution
    failure = _load(code, solution.__dict__)
    for call in calls:
        os.write(results, _line("failed", failure) if failure else _outcome(call, solution.__dict__))
    os._exit(0)


def _load(code: str, names: dict[str, object]) -> str:
    """Run the code; return why it failed, or an empty string."""
    try:
        exec(compile(code, f"{_MODULE}.py", "exec", dont_inherit=True), names)
    except BaseException as error:  # SystemExit included
        return f"could not be called: {_described(error)}"
    return ""


def _outcome(call: str, names: dict[str, object]) -> bytes:
    try:
        return _line("returned", eval(call, names))
    except NotPlainDataError as error:
        return _line("failed", f"returned {error}")
    except BaseException as error:
        return _line("failed", f"raised {_described(error)}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_MESSAGE_CHARACTERS]


def _line(kind: str, content: object) -> bytes:
    return f'["{kind}",{encode(content)}]\n'.encode("ascii")


def encode(value: object, depth: int = MAX_DEPTH) -> str:
    """Return plain data as JSON in ASCII: null, a Boolean, or a list of the name of a type and the content.

    An instance of a subclass, such as a Counter or a named tuple, is sent as an instance of its built-in base.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    for scalar in (int, float, complex, str, bytes):
        if isinstance(value, scalar):
            return f'["{scalar.__name__}","{_hexadecimal(value)}"]'
    for container in (list, tuple, set, frozenset, dict):
        if isinstance(value, container):
            if depth == 0:
                raise NotPlainDataError("a value that is nested too deeply")
            parts = [*value.items()] if isinstance(value, dict) else [*value]
            return f'["{container.__name__}",[{",".join(encode(part, depth - 1) for part in parts)}]]'
    raise NotPlainDataError(f"a {type(value).__name__}, which is not plain data")


def _hexadecimal(value: object) -> str:
    """A number or text in hexadecimal, which needs no escaping and takes linear time, unlike decimal integers."""
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
