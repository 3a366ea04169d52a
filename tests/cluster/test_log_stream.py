"""The first rank's log in the step's own."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.launched import RESULT, launched
from tests.fake_cluster import ApiServer, Fault, kinds, script

LINES = tuple(f"step {number}/200  reward {number / 200:.3f}" for number in range(200))


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster with the runtime."""
    with ApiServer() as server:
        yield server


@pytest.mark.parametrize(
    ("seconds", "faults"),
    [
        pytest.param(100, [], id="no faults"),
        pytest.param(0.001, [], id="all in one moment"),
        pytest.param(100, [Fault("GET", "/log", cut_after=size) for size in (7, 300, 1, 1111, 64)], id="cut off"),
        pytest.param(
            0.001, [Fault("GET", "/log", cut_after=size) for size in (3000, 40, 9000)], id="cut in one moment"
        ),
        pytest.param(100, [Fault("GET", "/log", drop="before", times=5)], id="dropped"),
        pytest.param(100, [Fault("GET", "/log", status=500, times=4), Fault("GET", "/log", drop="after")], id="errors"),
    ],
)
def test_every_line_once(
    server: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seconds: float,
    faults: list[Fault],
) -> None:
    """None is lost or doubled, and none is torn, whatever becomes of the connection."""
    job = launched(server, tmp_path, monkeypatch)
    server.faults.add(*faults)
    server.cluster.play(script.Running(seconds, LINES), script.Running(60), script.Do(job.work), script.Complete())
    assert job.run() == RESULT
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")] == list(LINES)


def test_restarted_pods_are_followed(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """JobSet makes new pods: their log is the job's from then on."""
    job = launched(server, tmp_path, monkeypatch)
    server.cluster.remove(kinds.TRAINING_RUNTIMES, "grpo-torch")
    server.cluster.add_runtime("grpo-torch", max_restarts=1)
    server.cluster.play(
        script.Running(60, ("first life",)), script.NodeLost(0), script.Running(60, ("second life",)), *job.goes_well()
    )
    advance = server.clock.advance

    def slowly(seconds: float) -> None:
        # What a lost pod has printed can be had while it is there, which takes its time.
        time.sleep(0.1)
        advance(seconds)

    monkeypatch.setattr(server.clock, "sleep", slowly)
    assert job.run() == RESULT
    said = capfd.readouterr().out.splitlines()
    assert [line for line in said if "life" in line or line.startswith("step")] == [
        "first life",
        "second life",
        "step 1",
        "step 2",
    ]


def test_a_log_that_cannot_be_read_decides_nothing(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the result, and not whether a job has stalled."""
    job = launched(server, tmp_path, monkeypatch)
    server.faults.add(Fault("GET", "/log", status=403, times=100_000))
    server.cluster.play(*job.goes_well(script.Running(600)))
    assert job.run() == RESULT
