"""The rows of a problems folder as they are, good and bad, so that bad ones can be counted and named."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.shared import jsonl
from components.shared.problem import Problem, Split, problems_file


@dataclass(frozen=True)
class Row:
    """One line of a split's file."""

    label: str
    """Its id, or file and line where it has none."""
    place: str
    """Its file and line."""
    split: Split
    """The split whose file it is in."""
    columns: frozenset[str]
    problem: Problem | None
    """None for a row that is no problem."""
    defect: str
    """Why it is none; empty for a good row."""


def read(folder: Path) -> list[Row]:
    """Return every row of both splits; a file that is missing or no JSON lines at all is an error."""
    return [row for split in Split for row in _read_split(problems_file(folder, split), split)]


def _read_split(path: Path, split: Split) -> Iterator[Row]:
    for number, values in jsonl.read_rows(path):
        problem, defect = _parse(values)
        label, place = values.get("id"), f"{path.name}:{number}"
        yield Row(
            label=label if isinstance(label, str) and label.strip() else place,
            place=place,
            split=split,
            columns=frozenset(values),
            problem=problem,
            defect=defect,
        )


def _parse(values: dict[str, Any]) -> tuple[Problem | None, str]:
    """The problem that a row is, or what keeps it from being one."""
    try:
        # Strict, as JSON: the level "3" is not the level 3.
        problem = Problem.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
    blank = next((name for name in ("id", "source", "question", "answer") if not getattr(problem, name).strip()), None)
    return (None, f"{blank}: is blank") if blank else (problem, "")
