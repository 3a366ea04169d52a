"""The tables of cases in tests/grading/cases: lines of columns between tabs, below comments and a line of names."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).parent / "cases"
SHARED = Path("../shared")
_CONTROL_PICTURES = re.compile("[\u2400-\u241f]")


class Case(NamedTuple):
    """A response, the expected answer, and what the verdict should be."""

    gold: str
    response: str
    verdict: str
    why: str


def table(name: str) -> list[list[str]]:
    """Return the rows of a table, with each picture of a control character (␊) replaced by that character."""
    lines = (FOLDER / name).read_text(encoding="utf-8").split("\n")
    _, *rows = (line.split("\t") for line in lines if line and not line.startswith("# "))
    return [[_CONTROL_PICTURES.sub(lambda match: chr(ord(match[0]) - 0x2400), cell) for cell in row] for row in rows]


ATTACKS = [Case(gold, response, "wrong", why) for gold, response, why in table("attacks.tsv")]
"""Responses that try to be graded right without having the answer."""


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a table that lies beside the project and whose licence does not allow to ship it."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is not part of the project")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
