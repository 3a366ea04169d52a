import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/kubeflow.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (U\d+) \| .* \| (.*) \|$", TEXT, re.MULTILINE))


def test_every_row_is_there_once() -> None:
    """Thirty of them, in their order."""
    assert list(ROWS) == [f"U{number}" for number in range(1, 31)]
    assert len(re.findall(r"^\| U\d+", TEXT, re.MULTILINE)) == 30


@pytest.mark.parametrize("row", ROWS)
def test_every_test_that_a_row_names_is_there(row: str) -> None:
    """By file and name; a row without one would show nothing."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[row])
    assert named, "no test"
    for file, name in named:
        module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {each.name for each in module.body if isinstance(each, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"
