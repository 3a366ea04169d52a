import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from components.rollout.vllm import process as servers_module
from components.rollout.vllm.process import Health, Supervisor, running
from components.rollout.vllm.servers import UNIX, ServerLostError, VllmClient
from components.shared.errors import PipelineError, RetryableError
from tests.cluster.processes import (
    ROOT,
    errors_of_nobody,
    is_gone,
    listeners,
    server_process,
    start_as_nobody,
    wait_until,
)


class _Supervised:
    """A server under supervision, by a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server = MagicMock(url="http://server", log=Path("server.log"))
        self.server.tail.return_value = "no such model"
        self.supervisor = Supervisor(self.server, 100, 30, lambda: self.now)

    def check(self, now: float, state: Health | None) -> int:
        """Check it at this time in this state, None if it has ended; return how often it was restarted until now."""
        self.now, self.server.has_ended, self.server.health.return_value = now, state is None, state
        self.supervisor.check()
        return int(self.server.start.call_count)


def test_server_is_restarted_at_once_if_it_failed_and_after_its_deadline_if_it_is_silent() -> None:
    """A failed one has ended, or its engine or socket is closed; one that has just been started is left alone."""
    for state in (None, "broken"):
        assert _Supervised().check(2, state) == 1
    server = _Supervised()
    assert server.check(30, "silent") == 0
    assert server.check(31, "silent") == 1
    assert server.check(31 + 100, "broken") == 1, "it starts"
    assert server.check(31 + 101, "silent") == 2


def test_only_failures_in_a_row_are_limited(capsys: pytest.CaptureFixture[str]) -> None:
    """After three restarts without an answer, a server is given up; a start that the system refuses is a failure."""
    server = _Supervised()
    server.server.start.side_effect = [OSError(28, "No space left on device"), *[None] * 7]
    for number in range(1, 6):
        assert server.check(number, None) == number
        server.check(number, "ready")
    for number in (6, 7, 8, 8, 8):
        assert server.check(10, None) == number
    out = capsys.readouterr().out
    assert out.count("starting it again") == 8
    assert out.count("4 times in a row: giving up on it; no such model") == 1


@pytest.mark.slow
def test_no_other_user_stands_in_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it takes the place of the socket while the server is down."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        server = server_process(Path(folder))
        path = server.url.removeprefix(UNIX)
        server.close()
        impostor = f"os.mkdir(os.path.dirname('{path}'), 0o777); s = socket.socket(socket.AF_UNIX); "
        impostor += (
            f"s.bind('{path}'); s.listen(); os.chmod('{path}', 0o777); print(flush=True); list(iter(s.accept, None))"
        )
        with start_as_nobody(impostor) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "\n"
            assert server.health() == "silent"
            with pytest.raises(ServerLostError, match="is a socket of another user \\(65534\\)"):
                VllmClient(server.url, 10).version()
            other.kill()


def _starts(log: Path) -> list[list[int]]:
    """The processes of each start: the server and its child; a line that is still being written does not count."""
    complete = log.read_text().rpartition("\n")[0].splitlines()
    return [[int(word) for word in line.split()[-2:]] for line in complete if line.startswith("hello from")]


def _all_gone(folder: Path) -> bool:
    return all(is_gone(pid) for log in folder.glob("*.log") for start in _starts(log) for pid in start)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for the servers' own folders."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.slow
def test_servers_run_in_the_block(tmp_path: Path, folders: Path) -> None:
    """Each at its own URL, at no port, and not for other users. After it, and after an error, nothing remains."""
    folders.chmod(0o777)
    servers = [server_process(tmp_path, number=number) for number in range(2)]
    with suppress(KeyError), running(servers, 60, 60):
        assert [server.health() for server in servers] == ["ready"] * 2
        assert len(list(folders.iterdir())) == 2
        assert [listeners(_starts(log)[0][0]) for log in tmp_path.glob("*.log")] == [{}, {}]
        assert "Permission denied" in errors_of_nobody(f"ls {servers[0].url.removeprefix(UNIX)}")
        raise KeyError
    assert _all_gone(tmp_path)
    assert not list(folders.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "watchdog"])
def test_killed_server_is_restarted_at_its_url(tmp_path: Path, folders: Path, victim: str) -> None:
    """What is left of the old one is killed first."""
    del folders
    server, log = server_process(tmp_path), tmp_path / "0.log"
    with running([server], 60, 60):
        first = _starts(log)[0]
        os.kill(first[0] if victim == "server" else os.getpgid(first[0]), signal.SIGKILL)
        wait_until(lambda: len(_starts(log)) == 2 and server.health() == "ready")
        assert all(is_gone(pid) for pid in first)
        assert server.printed().startswith("hello from")
        assert log.read_text().endswith(server.printed()), "the output of the last start alone"
    assert _all_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_their_launcher(tmp_path: Path, folders: Path, number: int) -> None:
    """However it ends, with their children and folders."""
    script = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.cluster.processes import server_process
from components.rollout.vllm.process import running
with running([server_process(Path({str(tmp_path)!r}))], 60, 60):
    print("ready", flush=True)
    time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        assert any(line.startswith("ready") for line in launcher.stdout)
        launcher.send_signal(number)
        wait_until(lambda: _all_gone(tmp_path) and not list(folders.iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("state", ["dead", "closing", "hangs"])
def test_health_of_a_server(tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """It says that its engine is dead; its socket is closed while it goes on, as vLLM's is; or it does not answer."""
    monkeypatch.setattr(servers_module, "_HEALTH_TIMEOUT_S", 0.5)
    server = server_process(tmp_path)
    server.start()
    try:
        wait_until(lambda: server.health() == "ready")
        Path(server.url.removeprefix(UNIX)).with_name("state").write_text(state)
        expected = "silent" if state == "hangs" else "broken"
        wait_until(lambda: server.health() == expected)
        assert not server.has_ended
    finally:
        server.close()
    assert _all_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "deadline_s", "error", "message"),
    [
        ("--fail", 60, PipelineError, r"(?s)ended before it answered.*no such model"),
        ("--slow", 1, RetryableError, r"(?s)does not answer after 1 s; the end of .*0.log"),
    ],
)
def test_server_that_does_not_start_is_an_error(
    tmp_path: Path, folders: Path, flag: str, deadline_s: float, error: type[PipelineError], message: str
) -> None:
    """With the end of what it printed; the server beside it is ended."""
    del folders
    servers = [server_process(tmp_path, flag), server_process(tmp_path, number=1)]
    with pytest.raises(error, match=message), running(servers, deadline_s, 20):
        time.sleep(600)
    assert _all_gone(tmp_path)
