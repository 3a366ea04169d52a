"""GSM8K: grade-school word problems whose answers are numbers after `#### `."""

import re
from typing import Any

from components.prepare_data.fields import Fields
from components.prepare_data.raw_rows import MalformedRowError, shown, text

_MARK = "####"
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def gsm8k_fields(columns: dict[str, Any]) -> Fields:
    """Read one row; the solution stays as it is, the answer loses its thousands commas."""
    solution = text(columns, "answer")
    _, mark, final = solution.rpartition(_MARK)
    if not mark:
        raise MalformedRowError(f"column `answer` has no `{_MARK}` before its final answer")
    if not final.strip():
        raise MalformedRowError(f"column `answer` has nothing after its `{_MARK}`")
    if not _NUMBER.fullmatch(final.strip()):
        raise MalformedRowError(f"the final answer {shown(final.strip())} is no number")
    return Fields(
        question=text(columns, "question"),
        solution=solution,
        answer=final.strip().replace(",", ""),
        subject="",
        level=None,
    )
