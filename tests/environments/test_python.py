import pytest

from components.environments.pool import Environments
from components.environments.python import Python
from components.shared.tools import ToolsConfig
from tests import tiny


def _python(**arguments: object) -> Python:
    values = {"environment": "python", "call_format": "fenced", "arguments": arguments}
    python = Python(ToolsConfig.model_validate(values))
    python.reset(tiny.PROBLEMS[0])
    return python


def _run(python: Python, code: str) -> str:
    return python.step(f"```python\n{code}\n```\n").text


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(37*48)", "1776"),
        ("print('a', end='')\n'b'", "a'b'"),
        ("x = 1", "(no output)"),
        ("print(object())\n(x for x in '')", "<object object at 0x...>\n<generator object <genexpr> at 0x...>"),
        ("from fractions import Fraction\nprint(Fraction(1, 3) + 1)", "4/3"),
        ("print('a')\n1/0", "a\nZeroDivisionError: division by zero (line 2)"),
        ("def f():\n    return y\n\nf()", "NameError: name 'y' is not defined (line 2)"),
        ("def f(:", "SyntaxError: invalid syntax (code, line 1)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (line 2)"),
        ("open('/etc/passwd')", "PermissionError: [Errno 13] Permission denied: '/etc/passwd' (line 1)"),
        ("import socket\nsocket.socket()", "PermissionError: [Errno 1] Operation not permitted (line 2)"),
        ("while True: print('x' * 1000)", "RuntimeError: more than 200000 characters were printed (line 1)"),
    ],
)
def test_a_block_shows_what_it_prints_and_how_it_fails(code: str, output: str) -> None:
    """And the value of its last line."""
    text = _run(_python(), code)
    assert text == output or (len(text) > 1000 and text.endswith(output)) or text.startswith(output[:40])


def test_a_block_sees_the_names_of_earlier_ones() -> None:
    """Even of one that failed in its middle, but not of one that does not end, nor of another trajectory."""
    python = _python()
    assert _run(python, "x = 6\nimport os\nos._exit(0)") == "Error: the code was not finished: it ended with status 0"
    assert _run(python, "x").startswith("NameError")
    assert _run(python, "import random\nx = 1\nfirst = random.random()\nfirst") == _run(python, "first")
    assert _run(python, "y = 2\n1/0").startswith("ZeroDivisionError")
    assert _run(python, "print('again')\nx + y") == "again\n3"
    python.reset(tiny.PROBLEMS[1])
    assert _run(python, "x").startswith("NameError")


def test_a_long_output_is_cut_in_its_middle_and_a_long_program_refused() -> None:
    """The beginning and the end of an output are read; all blocks of a program count."""
    python = _python(max_output_characters=11)
    assert _run(python, "print('abcdef' * 1000)") == "abcdef\n... (cut) ...\nbcdef"
    for _ in range(2):
        text = _run(python, "'" + "x" * 9_970 + "'")
    assert text.startswith("'xxx")
    assert _run(python, "1" * 100) == "Error: all code together is longer than 20,000 characters"


def test_a_trajectory_can_be_continued_in_another_pool() -> None:
    """Its past turns say what its names are."""
    config = ToolsConfig(environment="python", num_workers=1)
    with Environments(config) as environments:
        episode = environments.begin(tiny.PROBLEMS[0], past=["```python\nx = 37\n```\n"])
        assert episode.step("```python\nx * 48\n```\n").result().observation.text == "1776"
        assert episode.step("#### 1776").result().observation.done
