import os
import signal

import pytest

from components.policy import shutdown
from components.policy.shutdown import on_stop_signal


@pytest.mark.parametrize(("same_s", "expected"), [(0.0, ["first", "again"]), (1e9, ["first"])])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_request_to_stop_is_told_from_the_first_one_sent_twice(
    monkeypatch: pytest.MonkeyPatch, number: int, same_s: float, expected: list[str]
) -> None:
    """As `timeout` sends it to a command and to its group; afterwards signals mean what they meant before."""
    monkeypatch.setattr(shutdown, "_ONE_REQUEST_S", same_s)
    calls: list[str] = []
    before = signal.getsignal(number)
    with on_stop_signal(lambda: calls.append("first"), lambda: calls.append("again")):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
    assert calls == expected
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("launched", "expected"), [(False, [75]), (True, [])])
def test_a_second_request_ends_a_run_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: bool, expected: list[int]
) -> None:
    """But for a rank, which is told by its launcher and by the terminal, and ends with the launcher."""
    monkeypatch.setattr(shutdown, "_ONE_REQUEST_S", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "1")
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with shutdown.graceful_shutdown(600) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        stop.unsaved_steps = 4
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == expected
    line = "error: stopped at once by a second request: the current step and 4 before it are lost; "
    assert capsys.readouterr().err.startswith(line) is not launched
