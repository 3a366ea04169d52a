"""The cores that a process may use."""

import os
from pathlib import Path

import pytest

from components.shared import environment
from components.shared.environment import available_cores


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 8),
        ("", 8),
    ],
)
def test_a_container_has_no_more_cores_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int
) -> None:
    """Of eight cores, as many as cgroups give it time for; without a limit, or outside a container, all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("components.shared.environment._CPU_LIMIT", tmp_path / "cpu.max")
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert available_cores() == cores


@pytest.mark.parametrize(("running", "spin"), [(1, "300000"), (2, "1000"), (9, "1000")])
def test_threads_spin_briefly_where_other_work_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: int, spin: str
) -> None:
    """The first process of a run decides, and what the user has set stays."""
    load = tmp_path / "loadavg"
    load.write_text(f"0.10 0.20 0.30 {running}/90 1234\n")
    monkeypatch.setattr(environment, "_LOAD", load)
    monkeypatch.setattr(os, "environ", {})
    environment.choose_spin()
    assert os.environ == {"GOMP_SPINCOUNT": spin}
    load.write_text("0.10 0.20 0.30 1/90 1234\n")
    environment.choose_spin()
    assert os.environ == {"GOMP_SPINCOUNT": spin}
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "PASSIVE"})
    environment.choose_spin()
    assert os.environ == {"OMP_WAIT_POLICY": "PASSIVE"}
