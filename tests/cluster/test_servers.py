import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.cluster import servers as launcher
from components.cluster.servers import Health, ServerProcess, Supervisor, running
from components.shared.errors import PipelineError, RetryableError

_ROOT = Path(__file__).parents[2]
SERVER = """
import http.server, os, pathlib, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("hello from", os.getpid(), child.pid, flush=True)
if "--fail" in sys.argv: sys.exit("no such model")
if "--slow" in sys.argv: time.sleep(600)
port = int(next(a.removeprefix("--port=") for a in sys.argv if a.startswith("--port=")))
state = pathlib.Path(os.environ["TMPDIR"]) / f"state-{port}"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = state.read_text() if state.exists() else "well"
        if said == "hangs": time.sleep(600)
        self.send_response(503 if said == "dead" else 200); self.end_headers()
        if said == "closing": threading.Thread(target=self.server.shutdown).start()
with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server: server.serve_forever(0.02)
time.sleep(600)
"""
"""Answers as a server does, as it is told in a file, and has a process of its own as vLLM has."""


def _server(folder: Path, *flags: str, number: int = 0) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", SERVER, *flags], folder / f"{number}.log", lambda _: dict(os.environ))


def _is_ready(server: ServerProcess) -> bool:
    return server.health() is Health.READY


def _pids(log: Path) -> list[list[int]]:
    """The processes of each start: the server, and its own."""
    lines = log.read_text().splitlines()
    return [[int(word) for word in line.split()[-2:]] for line in lines if line.startswith("hello from")]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers' own folders lie."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_servers_answer_in_the_block_and_are_gone_after_it(tmp_path: Path, folders: Path) -> None:
    """Both have ports of their own; afterwards neither they nor what they started live, and their folders are gone."""
    servers = [_server(tmp_path, number=number) for number in range(2)]
    with running(servers, 20, 20):
        assert len({server.url for server in servers}) == 2
        assert all(urllib.request.urlopen(server.url + "/health").status == 200 for server in servers)
        assert len(list(folders.iterdir())) == 2
    pids = [pid for number in range(2) for pids in _pids(tmp_path / f"{number}.log") for pid in pids]
    assert len(pids) == 4
    assert not any(_is_alive(pid) for pid in pids)
    assert not list(folders.iterdir())


def test_servers_are_gone_after_an_exception(tmp_path: Path) -> None:
    """An error in the block passes, and ends the servers."""
    with pytest.raises(KeyError), running([_server(tmp_path)], 20, 20):
        raise KeyError
    assert not any(_is_alive(pid) for pids in _pids(tmp_path / "0.log") for pid in pids)


@pytest.mark.parametrize("which", [0, 1])
def test_nothing_is_left_where_the_launcher_is_killed(tmp_path: Path, folders: Path, which: int) -> None:
    """SIGKILL or SIGTERM of the launching process takes the server, its process and its folder with it."""
    script = f"""
import sys, time
sys.path.insert(0, {str(_ROOT)!r})
from pathlib import Path
from tests.cluster.test_servers import _server
from components.cluster.servers import running
with running([_server(Path({str(tmp_path)!r}))], 20, 20):
    print("ready", flush=True)
    time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        assert any(line.startswith("ready") for line in launcher.stdout)
        launcher.send_signal([signal.SIGKILL, signal.SIGTERM][which])
        pids = _pids(tmp_path / "0.log")[0]
        _wait_until(lambda: not any(_is_alive(pid) for pid in pids))
        _wait_until(lambda: not list(folders.iterdir()))


@pytest.mark.parametrize("victim", ["server", "guard"])
def test_a_server_that_is_killed_is_started_again_at_its_address(tmp_path: Path, victim: str) -> None:
    """What is left of the old one is ended first; the new one answers where the old one did."""
    server = _server(tmp_path)
    with running([server], 20, 20):
        first = _pids(tmp_path / "0.log")[0]
        os.kill(first[0] if victim == "server" else os.getpgid(first[0]), signal.SIGKILL)
        _wait_until(lambda: len(_pids(tmp_path / "0.log")) == 2)
        _wait_until(lambda: _is_ready(server))
        assert not any(_is_alive(pid) for pid in first)
    assert not any(_is_alive(pid) for pids in _pids(tmp_path / "0.log") for pid in pids)


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[ServerProcess, Supervisor, Clock]]:
    """A server that answers, and a supervisor that looks at it when it is told to, by a clock that is moved by hand."""
    server, clock = _server(tmp_path), Clock()
    server.start()
    try:
        _wait_until(lambda: _is_ready(server))
        yield server, Supervisor([server], start_deadline_s=100, health_deadline_s=30, clock=clock), clock
    finally:
        server.close()
    assert not any(_is_alive(pid) for pids in _pids(server.log) for pid in pids)


def _tell(server: ServerProcess, state: str) -> None:
    (Path(os.environ["TMPDIR"]) / f"state-{server.url.rsplit(':', 1)[1]}").write_text(state)


@pytest.mark.parametrize("state", ["dead", "closing"])
def test_a_server_without_its_engine_is_ended_and_started_again_at_once(
    kept: tuple[ServerProcess, Supervisor, Clock], state: str
) -> None:
    """It says that its engine is dead, or it listens no more and yet goes on, as vLLM does while requests wait."""
    server, supervisor, _ = kept
    supervisor.check()
    assert len(_pids(server.log)) == 1
    _tell(server, state)
    if state == "closing":
        _wait_until(lambda: not _is_ready(server))
    supervisor.check()
    assert not any(_is_alive(pid) for pid in _pids(server.log)[0])
    _tell(server, "well")
    _wait_until(lambda: _is_ready(server))
    assert len(_pids(server.log)) == 2


def test_a_server_that_hangs_is_started_again_when_its_deadline_has_passed(
    kept: tuple[ServerProcess, Supervisor, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is only slow to answer is left alone until then, and so is one that has just been started."""
    server, supervisor, clock = kept
    monkeypatch.setattr(launcher, "_HEALTH_TIMEOUT_S", 0.1)
    _tell(server, "hangs")
    clock.now = 30
    supervisor.check()
    assert all(_is_alive(pid) for pid in _pids(server.log)[0])
    clock.now = 31
    supervisor.check()
    _wait_until(lambda: len(_pids(server.log)) == 2)
    clock.now = 31 + 100
    supervisor.check()
    assert len(_pids(server.log)) == 2
    clock.now = 31 + 101
    supervisor.check()
    _wait_until(lambda: len(_pids(server.log)) == 3)
    assert not any(_is_alive(pid) for pids in _pids(server.log)[:2] for pid in pids)


def test_a_server_that_answers_in_between_may_fail_as_often_as_it_likes(
    kept: tuple[ServerProcess, Supervisor, Clock],
) -> None:
    """Only failures in a row count: four restarts, each of which leads to an answer, are made."""
    server, supervisor, _ = kept
    for number in range(1, 5):
        os.kill(_pids(server.log)[-1][0], signal.SIGKILL)
        _wait_until(lambda: server.ended)
        supervisor.check()
        _wait_until(lambda: _is_ready(server))
        assert len(_pids(server.log)) == number + 1
        supervisor.check()


def test_what_a_server_printed_before_its_last_start_is_kept_apart(tmp_path: Path) -> None:
    """Why it ended the last time says nothing of why it ends now; the log has both."""
    (tmp_path / "0.log").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    server = _server(tmp_path)
    server.start()
    _wait_until(lambda: _is_ready(server))
    server.close()
    assert "out of memory" not in server.printed()
    assert server.printed()
    assert (tmp_path / "0.log").read_text().endswith(server.printed())


@pytest.mark.long
def test_a_start_that_the_system_refuses_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a full disk: the server is started at the next try, and answers."""
    server, start, refused = _server(tmp_path), ServerProcess.start, [OSError(28, "No space left on device")]

    def start_or_refuse(process: ServerProcess) -> None:
        if refused:
            raise refused.pop()
        start(process)

    with running([server], 20, 20):
        monkeypatch.setattr(ServerProcess, "start", start_or_refuse)
        os.kill(_pids(tmp_path / "0.log")[0][0], signal.SIGKILL)
        _wait_until(lambda: len(_pids(tmp_path / "0.log")) == 2 and server.health() is Health.READY)
    assert not refused


def test_a_server_that_keeps_ending_is_left_alone_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After three more starts it is given up, with the end of what it printed."""
    server = _server(tmp_path)
    with running([server], 20, 20):
        server._command.append("--fail")
        os.kill(_pids(tmp_path / "0.log")[0][0], signal.SIGKILL)
        _wait_until(lambda: server.ended and len(_pids(tmp_path / "0.log")) == 4)
        time.sleep(1)
    assert len(_pids(tmp_path / "0.log")) == 4
    said = capsys.readouterr().out
    assert said.count("starting it again") == 3
    assert "giving up on it" in said
    assert "no such model" in said


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """The error holds the end of what it printed, and the server beside it is ended."""
    servers = [_server(tmp_path), _server(tmp_path, "--fail", number=1)]
    with pytest.raises(PipelineError, match=r"(?s)ended before it answered.*no such model"), running(servers, 20, 20):
        pytest.fail("they run")
    assert not any(_is_alive(pid) for each in _pids(tmp_path / "0.log") for pid in each)


def test_a_server_that_does_not_answer_in_time_is_an_error(tmp_path: Path) -> None:
    """The deadline and what it printed are in the error; it can be tried again."""
    servers = [_server(tmp_path, "--slow")]
    with pytest.raises(RetryableError, match=r"(?s)after 1 s.*hello from"), running(servers, 1, 20):
        pytest.fail("it runs")
    assert not any(_is_alive(pid) for pid in _pids(tmp_path / "0.log")[0])


def test_a_port_is_nobody_elses_while_its_server_is_down(tmp_path: Path) -> None:
    """No other socket gets the port of a server that has not started yet, or has ended."""
    server = _server(tmp_path)
    port = int(server.url.rsplit(":", 1)[1])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    server.close()
