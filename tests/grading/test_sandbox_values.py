"""What comes out of the sandbox: plain data, whatever the code sends."""

import pytest

from components.grading.sandbox.run import Failed, Gave, run
from tests.processor_time import processor_time

VALUES = [
    *(None, True, False, 0, -1, 2**64, -(10**50), 1.5, -0.0, 1e308, float("inf"), 1j, complex(1, -2.5)),
    *("", "a\n\"'\\", "\ud800\x00é\U0001f600", b"", b"\xff\x00", [], [[1], [2.0, "x"]], (), (1, (2,))),
    *(set(), {1, (2, "x")}, frozenset({1}), {}, {1: "a", (1, 2): [3], None: {}}, {"k": {"n": {1, 2}}}),
]


def forging(lines: bytes) -> str:
    """Code that writes lines of its own into the pipe of the results, and ends."""
    return f"import os\ndef attack():\n    os.write(3, {lines!r})\n    os._exit(0)"


def test_plain_data_arrive_as_they_are() -> None:
    """Type and value of every kind of plain data survive the way out, and so do those of their parts."""
    outcomes = run("inf = float('inf')", [repr(value) for value in VALUES])
    assert [(type(outcome.value), repr(outcome.value)) for outcome in outcomes if isinstance(outcome, Gave)] == [
        (type(value), repr(value)) for value in VALUES
    ]


def test_nan_arrives_and_equals_nothing() -> None:
    """It is a float like others on its way, and no expected value equals it."""
    (outcome,) = run("", ["float('nan')"])
    assert isinstance(outcome, Gave)
    assert isinstance(outcome.value, float)
    assert outcome.value != outcome.value


def test_subclasses_arrive_as_what_they_extend() -> None:
    """A Counter is a dict and a named tuple a tuple, as for Python's `==`; how they behave does not come along."""
    code = """
import collections, enum
class Text(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def encode(self, *how): return b"forged"
class Number(int):
    def __eq__(self, other): return True
    def __format__(self, how): return "2a"
Point = collections.namedtuple("Point", "x y")
"""
    calls = ["collections.Counter('aab')", "Point(1, 2)", "Text('t')", "Number(7)", "enum.IntEnum('E', 'A').A"]
    values = [outcome.value for outcome in run(code, calls) if isinstance(outcome, Gave)]
    assert values == [{"a": 2, "b": 1}, (1, 2), "t", 7, 1]
    assert [type(value) for value in values] == [dict, tuple, str, int, int]


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ("object()", "gave a object, which is no plain data"),
        ("(x for x in [])", "gave a generator, which is no plain data"),
        ("__import__('fractions').Fraction(1, 2)", "gave a Fraction, which is no plain data"),
        ("[print]", "gave a builtin_function_or_method, which is no plain data"),
        ("nested(60)", "gave a value that is nested too deeply"),
        ("nested(100_000)", "gave a value that is nested too deeply"),
        ("endless()", "gave a value that is nested too deeply"),
        ("set(range(2000))", "gave nothing that can be read"),
    ],
)
def test_what_is_no_plain_data_is_refused(call: str, failure: str) -> None:
    """Objects, cycles and depths do not come out; the reason says what it was."""
    code = """
def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value
def endless():
    value = []
    value.append(value)
    return value
"""
    assert run(code, [call]) == [Failed(failure)]


def test_a_huge_number_costs_no_time() -> None:
    """It is written in hexadecimal: decimal digits take the square of their number, and Python refuses many of them."""
    with processor_time(1):
        assert run("", ["7 ** 10**6"]) == [Gave(7**10**6)]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\n",
        b"\x00\xff\n",
        b"{}\n",
        b"[]\n",
        b'"gave"\n',
        b'["gave"]\n',
        b'["gave",1]\n',
        b'["gave",NaN]\n',
        b'["gave","x"]\n',
        b'["gave",["int",5]]\n',
        b'["gave",["int","5","5"]]\n',
        b'["gave",["int","zz"]]\n',
        b'["gave",["list",[5]]]\n',
        b'["gave",["set",[["list",[]]]]]\n',
        b'["gave",["dict",[["int","1"]]]]\n',
        b'["gave",["float","0x1p99999"]]\n',
        b'["gave",["complex","1 2 3"]]\n',
        b'["gave",["str","ff"]]\n',
        b'["gave",["object","1"]]\n',
        b'["gave",["__import__",[]]]\n',
        b'["failed",null]\n',
        b'["failed",["int","5"]]\n',
        b'["passed",true]\n',
        b'["gave",true]',
        b'["gave",' + b"9" * 10_000 + b"]\n",
        b'["gave",' + b"[" * 100_000 + b"\n",
        b'["gave",' + b'["list",[' * 400 + b"]]" * 400 + b"]\n",
    ],
)
def test_a_forged_message_is_no_result(message: bytes) -> None:
    """Whatever is written to the pipe instead of a result is no value, and raises nothing."""
    assert isinstance(run(forging(message), ["attack()"])[0], Failed)


def test_a_forged_result_is_the_only_one_for_its_call() -> None:
    """Lines are taken in the order of the calls: a second guess is the next call's only one, and more are ignored."""
    code = forging(b'["gave",true]\n' * 3 + b'["gave",false]\n' * 100)
    assert run(code, ["attack()", "1"]) == [Gave(True), Gave(True)]
    assert run(code, ["1", "attack()", "2"]) == [Gave(1), Gave(True), Gave(True)]


def test_colliding_hashes_cost_whoever_reads_them_no_time() -> None:
    """Numbers with one hash would make a large set quadratic for this process, which the limit on sets forbids."""
    assert isinstance(run("", ["{n * (2**61 - 1) for n in range(1, 1001)}"])[0], Gave)
    numbers = ",".join(f'["int","{number * (2**61 - 1):x}"]' for number in range(20_000))
    forged = forging(f'["gave",["set",[{numbers}]]]\n'.encode())
    with processor_time(1):
        assert isinstance(run(forged, ["attack()"])[0], Failed)
