"""Events of a run: JSON lines in its journal, which the screen, `runs` and the index read.

Each line has a `stage` and an `event`: `started` (its `outputs`), `work` (the `folder` of unfinished work), `message`
(a `text`), `progress` (`done` of `total` and a `text`), `finished` (`seconds`, `metrics`, and `reused_from` if its
outputs are an earlier run's) or `failed` (`error`, `exit_code`).
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.shared.environment import JOURNAL_VARIABLE


def log_event(stage: str, event: str, **details: Any) -> None:
    """Append a line to the run's journal, if any, in one write, as processes share it; ignore errors of the disk."""
    journal = os.environ.get(JOURNAL_VARIABLE)
    if journal:
        line = json.dumps({"stage": stage, "event": event, **details}, default=str) + "\n"
        with suppress(OSError), Path(journal).open("ab", buffering=0) as file:
            file.write(line.encode())


def run_name() -> str:
    """Return the name of this process's run; empty without a journal."""
    journal = os.environ.get(JOURNAL_VARIABLE)
    return Path(journal).resolve().parent.name if journal else ""
