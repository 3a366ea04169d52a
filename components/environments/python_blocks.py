"""The code that runs blocks as one program, inside the sandbox of the Python environment.

The sandbox has only the standard library. What is imported here delays every call: nothing slow.
"""

import ast
import io
import random
import sys
from types import TracebackType

_FILE = "code"
_MAX_CHARACTERS = 200_000
_MAX_MESSAGE_CHARACTERS = 500


class _Output(io.StringIO):
    """What the code prints; RuntimeError if that is too long."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > _MAX_CHARACTERS:
            raise RuntimeError(f"more than {_MAX_CHARACTERS} characters were printed")
        return super().write(text)


def run_blocks(blocks: list[str]) -> str:
    """Run blocks as one program; return what the last block prints, the value of its last line, and its error.

    The other blocks have run in earlier calls. They run again for the names they define; their output is dropped.
    """
    random.seed(0)  # the same random numbers in each call
    names: dict[str, object] = {"__name__": "__main__"}
    output, failure = _Output(), ""
    for block in blocks:
        output = _Output()
        sys.stdout = sys.stderr = output
        failure = _run(block, names)
    printed = output.getvalue()
    if failure and printed and not printed.endswith("\n"):
        printed += "\n"
    return printed + failure


def _run(block: str, names: dict[str, object]) -> str:
    """Run a block and print the value of its last line if that is an expression; return its error, or an empty text."""
    try:
        program = ast.parse(block, _FILE)
        last = program.body[-1] if program.body else None
        if isinstance(last, ast.Expr):
            program.body.pop()
        exec(compile(program, _FILE, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # SystemExit included
        message = f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_MESSAGE_CHARACTERS]
        line = error.lineno if isinstance(error, SyntaxError) else _line_of(error.__traceback__)
        has_line = "line " in message  # as in the message of a SyntaxError
        return f"{message} (line {line})" if line and not has_line else message
    return ""


def _line_of(traceback: TracebackType | None) -> int | None:
    """Return the innermost line of the blocks, rather than of a library, in a traceback; None if it has none."""
    line = None
    while traceback:
        if traceback.tb_frame.f_code.co_filename == _FILE:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
