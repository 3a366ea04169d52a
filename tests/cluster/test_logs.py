import io
import time
from typing import Any

import pytest
from kubernetes import client

from components.cluster import watch
from components.cluster.kube import Clock
from tests.cluster.launched import RESULT, Launched
from tests.fake_cluster import Fault, script

LINES = tuple(f"step {number}/200  reward {number / 200:.3f}" for number in range(200))


@pytest.mark.parametrize(
    ("seconds", "faults"),
    [
        (100, [Fault("GET", "/log", cut_after=size) for size in (7, 300, 1, 1111, 64)]),
        (0.001, [Fault("GET", "/log", cut_after=size) for size in (3000, 40, 9000)]),
        (100, [Fault("GET", "/log", status=500, times=4), Fault("GET", "/log", drop="after")]),
    ],
)
def test_every_line_is_printed_once(
    job: Launched, capfd: pytest.CaptureFixture[str], seconds: float, faults: list[Fault]
) -> None:
    """None is lost, doubled or torn, over connections that break."""
    job.server.faults.add(*faults)
    job.play(script.Running(seconds, LINES), script.Running(60), script.Do(job.succeed), script.Complete())
    assert job.run() == RESULT
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")] == list(LINES)


def test_restarted_pods_are_followed(job: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart by JobSet the log is that of the new pod."""
    printed: list[str] = []
    monkeypatch.setattr(watch, "say_line", printed.append)
    advance = job.server.clock.advance

    def sleep(seconds: float) -> None:
        # The log of a lost pod can be read as long as the pod exists, which takes its time.
        while not printed and any(request.path.endswith("/log") for request in job.server.requests):
            time.sleep(0.01)
        advance(seconds)

    monkeypatch.setattr(job.server.clock, "sleep", sleep)
    job.cluster.add_runtime(max_restarts=1)
    lost = (script.Running(60, ("first pod",)), script.NodeLost(0), script.Running(60, ("second pod",)))
    job.play(*lost, *job.success())
    assert job.run() == RESULT
    assert printed == ["first pod", "second pod", "step 1", "step 2"]


def test_times_of_any_zone_and_lines_without_a_time_are_read() -> None:
    """A node has its own clock, and the kubelet adds lines of its own, which are no place to go on from."""
    asked: list[str | None] = []
    printed: list[str] = []
    lines = b"2026-01-02T03:04:05.123456789+02:00 step 1\nfailed to watch the file\n"

    class Jobs:
        def log(self, *_: Any, follow: bool, since: str | None) -> Any:
            if follow:
                raise client.ApiException(404)
            asked.append(since)
            return io.BytesIO(lines)

    stream = watch.LogStream(Jobs(), {"name": "node-0", "uid": "1"}, Clock(), printed.append)  # type: ignore[arg-type]
    for _ in range(2):
        stream.finish()
    assert printed == ["step 1", "failed to watch the file", "failed to watch the file"]
    assert asked == [None, "2026-01-02T01:04:05Z"]
