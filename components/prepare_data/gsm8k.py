"""GSM8K: grade-school word problems whose answers are numbers after `#### `."""

import re
from typing import Any, Literal

from components.prepare_data.source import Fields, FileSource, MalformedRowError, excerpt, text, text_or_number

_MARK = "####"
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class GSM8K(FileSource):
    """GSM8K as published: rows with `question` and `answer`."""

    kind: Literal["gsm8k"]

    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem; the solution stays unchanged, the answer loses its thousands commas."""
        solution = text_or_number(columns, "answer")
        _, mark, answer = solution.rpartition(_MARK)
        if not mark:
            raise MalformedRowError(
                f"column `answer` has no `{_MARK}` before its final answer; `kind: dataset` reads bare answers"
            )
        if not _NUMBER.fullmatch(answer.strip()):
            raise MalformedRowError(f"the final answer {excerpt(answer.strip())} is not a number")
        return Fields(text(columns, "question"), solution, answer.strip().replace(",", ""))
