"""Unit tests as text: which are understood, what of them leaves for the sandbox, and what they accept."""

from typing import Any

import pytest
from hypothesis import given, strategies

from components.grading.unit_tests import UnitTest, UnreadableTestsError, read_tests


def only(test: str) -> UnitTest:
    """The one test of a text."""
    (read,) = read_tests(test)
    return read


@pytest.mark.parametrize(
    ("test", "call", "accepted", "refused"),
    [
        ("assert f(1, 2) == 3", "f(1, 2)", [3, 3.0], [4, "3", None, [3]]),
        ('assert remove_Occ("hello","l") == "heo"', "remove_Occ('hello', 'l')", ["heo"], ["helo", b"heo", 0]),
        ("assert (f(1)) == (-3)", "f(1)", [-3], [3]),
        ("assert f(1) == 3, 'says why'", "f(1)", [3], [4]),
        ("assert f(1)==True", "f(1)", [True, 1], [False, 2, "True"]),
        (
            "assert f([1])[0].x == [1, (2, {'a': None})]",
            "f([1])[0].x",
            [[1, (2, {"a": None})]],
            [[1, [2, {"a": None}]]],
        ),
        ("assert set(f(1)) == set([1, 2])", "set(f(1))", [{2, 1}, frozenset({1, 2})], [{1}, [1, 2]]),
        ("assert f(1) == frozenset((1,))", "f(1)", [{1}], [(1,)]),
        ("assert f(1) == set()", "f(1)", [set()], [{}, [], ()]),
        ("assert f(1) == (5.0, -2+3j)", "f(1)", [(5.0, -2 + 3j), (5, complex(-2, 3))], [(5.0, -2)]),
        ("assert f(0.1) == 0.3", "f(0.1)", [0.3], [0.1 + 0.2]),
        ("assert f(lambda x: x > 2) == [3]", "f(lambda x: x > 2)", [[3]], [[2]]),
        ("assert f(1) is None", "f(1)", [None], [0, False]),
        ("assert f(1) is True", "f(1)", [True], [1, 1.0, "yes"]),
        ("assert f(1)", "f(1)", [True], [1, "yes", [0], False, None]),
        ("assert not f(1)", "f(1)", [False], [0, "", None, True]),
        ("assert math.isclose(f(1), 3.0)", "f(1)", [3.0, 3, 3 + 1e-12], [3.001, "3", None, [3.0], 3j, 10**400]),
        ("assert math.isclose(f(1), 100, rel_tol=0.01)", "f(1)", [99.5, 101], [98, float("nan"), float("inf")]),
        ("assert math.isclose(f(1), 0, abs_tol=1e-3, rel_tol=0)", "f(1)", [1e-3, -1e-4], [0.002]),
        ("assert abs(f(1) - 2.5) < 0.1", "f(1)", [2.5, 2.55], [2.7, None, float("nan"), 10**400]),
        ("assert abs(f(1) - 1e12) < 0.1", "f(1)", [1e12], [1e12 + 100]),
        ("assert abs(f(1)) == 2", "abs(f(1))", [2], [-2]),
    ],
)
def test_a_test_is_a_call_and_what_it_accepts(test: str, call: str, accepted: list[Any], refused: list[Any]) -> None:
    """Values are compared by Python's `==` unless the test names identity or a tolerance."""
    read = only(test)
    assert read.call == call
    assert [value for value in accepted if not read.accepts(value)] == []
    assert [value for value in refused if read.accepts(value)] == []


@pytest.mark.parametrize(
    "test",
    [
        "x = 1",
        "import math",
        "f(1) == 2",
        "assert f(1) > 3",
        "assert f(1) != 3",
        "assert f(1) in (1, 2)",
        "assert f(1) == g(1)",
        "assert f(1) == x",
        "assert f(1) == [2 * 3]",
        "assert f(1) == ...",
        "assert f(1) == 2 == 2",
        "assert f(1) == 2 and f(2) == 3",
        "assert 3 == f(1)",
        "assert 3 == 3",
        "assert [3][0] == 3",
        "assert x",
        "assert x == 3",
        "assert True",
        "assert (f(1) == 3) == True",
        "assert all(f(n) == n for n in range(5)) == True",
        "assert f(1) - 3 == 0",
        "assert -f(1) == 3",
        "assert (f(1), f(2)) == (1, 2)",
        "assert (lambda: f(1)) == 3",
        "assert isinstance(f(1), int)",
        "assert not any(f(1))",
        "assert np.allclose(f(1), [1, 2])",
        "assert math.isclose(f(1), 3, rel_tol=-1)",
        "assert math.isclose(f(1), 3, tolerance=1)",
        "assert math.isclose(f(1), g(3))",
        "assert math.isclose(f(1), '3')",
        "assert math.isclose(3, f(1))",
        "assert abs(f(1) - 3) < x",
        "assert abs(f(1) - 3) < -1",
        "assert abs(f(1) - g(1)) < 1",
        "assert abs(3 - f(1)) < 1",
        "assert f(1) is 3",
        "assert f(1) is not None",
        "assert f(1) == {[]}",
        "assert f(1) == set(1)",
        "assert f(1) == set(range(3))",
        "assert f(1) == " + "[" * 60 + "]" * 60,
        f"assert f(1) == {set(range(2000))}",
    ],
)
def test_any_other_form_is_refused_by_its_line(test: str) -> None:
    """The message says which line it is and what would be accepted."""
    with pytest.raises(
        UnreadableTestsError, match=r"line 2 of the tests is none of `assert CALL == VALUE`, .* written out"
    ):
        read_tests(f"assert f(1) == 1\n{test}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("assert f(1) ==", r"the tests are no Python: invalid syntax \(.*line 1\)"),
        ("assert f(1) == 1\n  assert f(2) == 2", "the tests are no Python: unexpected indent"),
        ("assert f(1) == '\0'", "the tests are no Python"),
        ("assert f(1) == " + "[" * 5000 + "]" * 5000, "the tests are no Python: too many nested parentheses"),
        ("assert f(1) == " + "-" * 50_000 + "1", "the tests are no Python"),
        (f"assert f(1) == {'x' * 70_000!r}", "the tests are longer than 65536 characters"),
    ],
)
def test_what_is_no_python_is_refused(text: str, message: str) -> None:
    """Neither broken nor monstrous text raises anything else."""
    with pytest.raises(UnreadableTestsError, match=message):
        read_tests(text)


def test_tests_keep_their_order() -> None:
    """Comments and blank lines are no tests."""
    tests = read_tests("# two\nassert f(1) == 1\n\nassert g(2) == 2  # last\n")
    assert [test.call for test in tests] == ["f(1)", "g(2)"]


scalars = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False, allow_infinity=False)
)
hashable = scalars | strategies.text(max_size=5) | strategies.binary(max_size=5)
plain = strategies.recursive(
    hashable | strategies.sets(hashable, min_size=1, max_size=3),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.lists(inner, max_size=3).map(tuple)
        | strategies.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain, plain)
def test_any_plain_value_is_accepted_if_and_only_if_it_is_equal(value: object, other: object) -> None:
    """Whatever can be written out can be expected."""
    test = only(f"assert f() == {value!r}")
    assert test.accepts(value)
    assert test.accepts(other) == (value == other)
