"""Which part of a response is its code."""

import pytest

from components.grading.unit_tests import last_code_block
from tests.processor_time import processor_time


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```py\nx = 1\n```", "x = 1"),
        ("```Python3\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("So:\n```python\nx = 1\n\ny = 2\n```\nDone.", "x = 1\n\ny = 2"),
        ("```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2"),
        ("```\nx = 1\n```\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\n```bash\npython x.py\n```", "x = 1"),
        ("1. Like this:\n   ```python\n   if x:\n       y = 1\n   ```", "if x:\n    y = 1"),
        ("``` python \nx = 1\n```  ", "x = 1"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1"),
        ("```python\nx = '''\n```inside\n'''\n```", "x = '''\n```inside\n'''"),
        ("```python\n```", ""),
    ],
)
def test_the_last_python_block_is_the_code(text: str, code: str) -> None:
    """Blocks marked as Python come before unmarked ones, later before earlier; shared indentation goes."""
    assert last_code_block(text) == code


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1",
        "`x = 1`",
        "```x = 1```",
        "```bash\nls\n```",
        "```python\nx = 1",
        "text ```python\nx = 1\n```",
        "```\n",
    ],
)
def test_without_a_closed_block_there_is_no_code(text: str) -> None:
    """Neither loose code nor inline code nor another language nor a block that breaks off is taken for the code."""
    assert last_code_block(text) is None


@pytest.mark.parametrize("rest", ["```", "```python\nx = 2", "```python"])
def test_what_breaks_off_behind_the_code_does_not_count(rest: str) -> None:
    """Models like to write one fence too many."""
    assert last_code_block(f"```python\nx = 1\n```\n{rest}") == "x = 1"


@pytest.mark.parametrize("piece", ["```python\n", "```\n", "`", "```", "\n", "    ", "```python\nx\n```\n"])
def test_repetition_is_read_in_no_time(piece: str) -> None:
    """A completion that repeats a fence thousands of times costs milliseconds."""
    with processor_time(3):
        last_code_block(piece * 20_000)
