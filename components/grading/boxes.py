r"""Boxed answers as MATH writes them: `\boxed{...}`, `\fbox{...}` and `\boxed 2`."""

import re
from dataclasses import dataclass

_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s${}]*\})*")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_MAX_NESTED = 4
_MAX_JOIN_CHARACTERS = 60
_MAX_CHARACTERS = 1000  # longer ones are no answer, whatever is in them
_DELIMITERS = re.compile(r"[\s$]*(?:\\[()\[\]][\s$]*)*")
_JOIN = re.compile(r"(?=.*(?:[,;]|\b(?:and|or)\b))(?:[^.!?]|\\[!.])*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a text: `text[start:end]` is the whole of it."""

    start: int
    end: int
    content: str


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last box; None without a box, or where the last one is never closed.

    Boxes that follow one another within a sentence, as in `\boxed{1} and \boxed{2}`, are one answer: a list.
    """
    boxes, all_closed = _read(text)
    if not boxes or not all_closed:
        return None
    first = len(boxes) - 1
    while first and _goes_on(text, boxes[first - 1], boxes[first]):
        first -= 1
    return ", ".join(dict.fromkeys(box.content for box in boxes[first:]))


def _goes_on(text: str, box: Box, other: Box) -> bool:
    """Whether nothing but "and", commas and a few words stands between two boxes."""
    between = text[box.end : other.start] if other.start - box.end <= _MAX_JOIN_CHARACTERS else "."
    return bool(_DELIMITERS.fullmatch(between) or _JOIN.fullmatch(between))


def find_boxes(text: str) -> list[Box]:
    """Return each closed box with its place in the text."""
    return _read(text)[0]


def _read(text: str) -> tuple[list[Box], bool]:
    """The boxes up to the first that is never closed, and whether all are closed."""
    boxes: list[Box] = []
    position = 0
    while command := _COMMAND.search(text, position):
        content, position = _content(text, command.end())
        if content is None:
            return boxes, False
        boxes.append(Box(command.start(), position, _innermost(content)))
    return boxes, True


def _content(text: str, start: int) -> tuple[str | None, int]:
    """What a box holds whose content begins at `start`, and where the box ends; None where it is never closed."""
    if text.startswith("{", start):
        end = _closing_brace(text, start)
        return (None, len(text)) if end is None else (text[start + 1 : end].strip(), end + 1)
    found = _UNBRACED.match(text, start)
    content = found.group().rstrip(".,;:") if found else ""
    return content, start + len(content)


def _closing_brace(text: str, start: int) -> int | None:
    r"""The index of the brace that closes the one at `start`; `\{` and `\}` are text."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None


def _innermost(content: str) -> str:
    """What counts of a box that holds nothing but another box: the content of the inner one."""
    for _ in range(_MAX_NESTED if len(content) <= _MAX_CHARACTERS else 0):
        command = _COMMAND.match(content)
        inner, end = _content(content, command.end()) if command else (None, 0)
        if inner is None or end < len(content):
            return content
        content = inner
    return content
