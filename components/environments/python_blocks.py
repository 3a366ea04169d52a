"""The inside of the Python environment's sandbox: runs blocks of code as one program.

Only the standard library is here, and nothing that takes long to import.
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
    def write(self, text: str) -> int:
        if self.tell() + len(text) > _MAX_CHARACTERS:
            raise RuntimeError(f"more than {_MAX_CHARACTERS} characters were printed")
        return super().write(text)


def run_blocks(blocks: list[str]) -> str:
    """Return what the last block prints, the value of its last line if it is an expression, and how it failed."""
    random.seed(0)  # a program that is run again goes on as it did
    names: dict[str, object] = {"__name__": "__main__"}
    output, failure = _Output(), ""
    for block in blocks:
        output = _Output()
        sys.stdout = sys.stderr = output
        failure = _run(block, names)
    printed = output.getvalue()
    return printed + ("\n" if failure and printed and not printed.endswith("\n") else "") + failure


def _run(block: str, names: dict[str, object]) -> str:
    try:
        program = ast.parse(block, _FILE)
        last = program.body.pop() if program.body and isinstance(program.body[-1], ast.Expr) else None
        exec(compile(program, _FILE, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # SystemExit included
        message = f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_MESSAGE_CHARACTERS]
        line = error.lineno if isinstance(error, SyntaxError) else _line(error.__traceback__)
        return f"{message} (line {line})" if line and "line " not in message else message
    return ""


def _line(place: TracebackType | None) -> int | None:
    line = None
    while place:
        line = place.tb_lineno if place.tb_frame.f_code.co_filename == _FILE else line
        place = place.tb_next
    return line
