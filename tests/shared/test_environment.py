"""The cores that a process may use."""

import os
from pathlib import Path

import pytest

from components.shared import environment
from components.shared.environment import available_cores


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 8), ("", 8)]
)
def test_cores_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int) -> None:
    """Of eight cores, as many as cgroups give it time for; without a limit, or outside a container, all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("components.shared.environment._CPU_LIMIT", tmp_path / "cpu.max")
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert available_cores() == cores


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_spin_briefly_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]) -> None:
    """A run may share its cores at any time."""
    monkeypatch.setattr(os, "environ", dict(chosen))
    environment.limit_spin()
    assert os.environ == (chosen or {"GOMP_SPINCOUNT": "1000"})
