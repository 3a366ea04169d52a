"""The inside of the sandbox: runs code that nobody has read, and sends what calls of it give.

Nothing here is trusted once the code runs: it may change every object of this process, and write to every descriptor.
"""

import marshal
import os
import sys

from components.grading.sandbox.confinement import confine
from components.grading.sandbox.encode import NotPlainDataError, encode
from components.grading.sandbox.limits import MESSAGE_CHARACTERS

_MODULE = "solution"
"""Not `__main__`, so that what a script would do when started is left out."""


def main() -> None:
    """Confine this process, run the code that standard input holds, and write a line for each of its calls.

    The line before them says whether the process is confined; it alone was written before the code ran.
    """
    results = os.dup(1)
    os.dup2(2, 1)
    code, calls, files, folders = marshal.load(sys.stdin.buffer)
    try:
        confine(files, folders)
    except OSError as error:
        os.write(results, _line("failed", str(error)))
        os._exit(1)
    os.write(results, _line("gave", None))
    solution = type(sys)(_MODULE)
    sys.modules[_MODULE] = solution
    failure = _load(code, solution.__dict__)
    for call in calls:
        os.write(results, _line("failed", failure) if failure else _outcome(call, solution.__dict__))
    os._exit(0)


def _load(code: str, names: dict[str, object]) -> str:
    """Run the code; why it cannot be called, empty where it can."""
    try:
        exec(compile(code, f"{_MODULE}.py", "exec", dont_inherit=True), names)
    except BaseException as error:  # SystemExit is no better than another
        return f"could not be called: {_described(error)}"
    return ""


def _outcome(call: str, names: dict[str, object]) -> bytes:
    try:
        return _line("gave", eval(call, names))
    except NotPlainDataError as error:
        return _line("failed", f"gave {error}")
    except BaseException as error:
        return _line("failed", f"raised {_described(error)}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:MESSAGE_CHARACTERS]


def _line(kind: str, content: object) -> bytes:
    return f'["{kind}",{encode(content)}]\n'.encode("ascii")
