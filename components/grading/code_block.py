"""The code of a response: its last fenced block of Python."""

import re
import textwrap

_FENCE = re.compile(r"[ \t]*```([^`]*)")
_PYTHON = frozenset({"python", "python3", "py"})
_UNMARKED = frozenset({""})


def last_code_block(text: str) -> str | None:
    """Return what stands in the last block marked as Python or, where none is, in the last block without a mark.

    None where there is neither. The mark counts first, since what follows the code without one is often its output. A
    block that is never closed is none.
    """
    blocks = _closed_blocks(text)
    for marks in (_PYTHON, _UNMARKED):
        for mark, lines in reversed(blocks):
            if mark in marks:
                return textwrap.dedent("\n".join(lines))
    return None


def _closed_blocks(text: str) -> list[tuple[str, list[str]]]:
    """Mark and lines of each block."""
    blocks: list[tuple[str, list[str]]] = []
    mark: str | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        info = fence[1].strip().lower() if fence else ""
        if fence and mark is None:
            mark, lines = info, []
        elif fence and mark is not None and not info:
            blocks.append((mark, lines))
            mark = None
        elif mark is not None:
            lines.append(line)
    return blocks
