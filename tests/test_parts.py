import ast
from pathlib import Path

from tests.conftest import MAX_MINUTES, PART_MINUTES, parts

ROOT = Path(__file__).parents[1]


def test_each_long_test_is_in_one_part_and_each_part_has_its_limit() -> None:
    """A file stays together if it fits into a part."""
    minutes = {"a::1": 2.0, "a::2": 1.5, "b::1": 1.0, "c::1": 8.0, "c::2": 4.0, "d::1": 2.0}
    packed = parts(minutes)
    assert packed == [["a::1", "a::2", "b::1"], ["c::1"], ["c::2", "d::1"]]
    assert all(len(part) == 1 or sum(minutes[name] for name in part) <= PART_MINUTES for part in packed)


def test_no_long_test_is_too_long() -> None:
    """A campaign that takes longer is to be split, or CI does not run it in time."""
    minutes: dict[tuple[Path, int], float] = {}
    for path in ROOT.glob("tests/**/*.py"):
        keywords = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword)]
        minutes |= {(path, each.lineno): ast.literal_eval(each.value) for each in keywords if each.arg == "minutes"}
    assert minutes
    assert not {place for place, each in minutes.items() if each > MAX_MINUTES}
