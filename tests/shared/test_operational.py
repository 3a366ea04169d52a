"""Operational keys: left out wherever they stand in a config."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.shared.config import Config, Operational, without_operational


class _Precision(StrEnum):
    BF16 = "bf16"


class _Engine(Config):
    precision: _Precision
    num_processes: Annotated[int, Operational] = Field(gt=0)
    zero_stage: Annotated[Literal[0, 1, 2, 3], Operational]
    deadline_s: Annotated[float | None, Operational] = None


class _Checkpoint(Config):
    every_steps: int


class _Stage(Config):
    seed: int
    engine: _Engine
    engines: list[_Engine]
    by_name: dict[str, _Engine]
    maybe: _Engine | None
    pair: tuple[int, _Engine]
    base: Path
    checkpoint: Annotated[_Checkpoint, Operational]


def _stage(processes: int) -> _Stage:
    engine = _Engine(precision=_Precision.BF16, num_processes=processes, zero_stage=3, deadline_s=float(processes))
    return _Stage(
        seed=1,
        engine=engine,
        engines=[engine],
        by_name={"first": engine},
        maybe=engine,
        pair=(2, engine),
        base=Path("a/b"),
        checkpoint=_Checkpoint(every_steps=processes),
    )


def test_operational_keys_are_left_out_at_any_depth() -> None:
    """In a section, a list, a mapping, a union and a tuple, and a section as a whole."""
    engine = {"precision": "bf16"}
    expected: dict[str, Any] = {
        "seed": 1,
        "engine": engine,
        "engines": [engine],
        "by_name": {"first": engine},
        "maybe": engine,
        "pair": [2, engine],
        "base": "a/b",
    }
    assert without_operational(_stage(1)) == without_operational(_stage(8)) == expected
