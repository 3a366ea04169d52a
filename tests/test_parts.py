import ast
from pathlib import Path

from tests.conftest import PART_MINUTES, parts

ROOT = Path(__file__).parents[1]


def test_each_long_test_is_in_one_part_and_each_part_has_its_limit() -> None:
    """A file stays together if it fits into a part."""
    minutes = {"a::1": 3.0, "a::2": 2.0, "b::1": 2.0, "c::1": 8.0, "c::2": 4.0, "d::1": 1.0}
    packed = parts(minutes)
    assert packed == [["a::1", "a::2", "b::1"], ["c::1"], ["c::2", "d::1"]]
    assert all(sum(minutes[name] for name in part) <= PART_MINUTES for part in packed)


def test_no_long_test_is_longer_than_a_part() -> None:
    """A campaign that takes longer is to be split, or CI does not run it in time."""
    minutes: dict[tuple[Path, int], float] = {}
    for path in ROOT.glob("tests/**/*.py"):
        keywords = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword)]
        minutes |= {(path, each.lineno): ast.literal_eval(each.value) for each in keywords if each.arg == "minutes"}
    assert minutes
    assert not {place for place, each in minutes.items() if each > PART_MINUTES}
