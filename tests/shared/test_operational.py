"""Operational keys: left out wherever they are in a config."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from components.shared.config import Config, Operational, without_operational


class _Precision(StrEnum):
    BF16 = "bf16"


class _Engine(Config):
    precision: _Precision = _Precision.BF16
    num_processes: Annotated[int, Operational] = Field(gt=0)
    deadline_s: Annotated[float | None, Operational] = None


class _Section(Config):
    engine: _Engine
    engines: list[_Engine]
    by_name: dict[str, _Engine]
    maybe: _Engine | None
    pair: tuple[int, _Engine]
    base: Path = Path("a/b")
    whole: Annotated[_Engine, Operational]


def test_operational_keys_are_left_out_at_any_depth() -> None:
    """In a section, a list, a mapping, a union and a tuple, and a section as a whole."""
    result = {"precision": "bf16"}
    expected = {"engine": result, "engines": [result], "by_name": {"x": result}, "maybe": result, "pair": [2, result]}
    for processes in (1, 8):
        engine = _Engine(num_processes=processes, deadline_s=float(processes))
        section = _Section(
            engine=engine, engines=[engine], by_name={"x": engine}, maybe=engine, pair=(2, engine), whole=engine
        )
        assert without_operational(section) == {**expected, "base": "a/b"}
