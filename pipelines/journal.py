"""The journal of a local run: which stages started, finished and failed, read while they write it."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Reads the lines that have been added to a journal since the last time."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open(encoding="utf-8")
        self._partial = ""

    def new(self) -> list[Event]:
        """Return the events not returned before; a line still being written waits for its end."""
        *lines, self._partial = (self._partial + self._file.read()).split("\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Stop reading."""
        self._file.close()
