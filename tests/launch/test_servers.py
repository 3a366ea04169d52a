import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from components.launch.servers import ServerProcess, running
from components.shared.errors import PipelineError, RetryableError

_ROOT = Path(__file__).parents[2]
SERVER = """
import http.server, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("hello from", os.getpid(), child.pid, flush=True)
if "--fail" in sys.argv: sys.exit("no such model")
if "--slow" in sys.argv: time.sleep(600)
port = int(next(a.removeprefix("--port=") for a in sys.argv if a.startswith("--port=")))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Answers as a server does, and has a process of its own as vLLM has."""


def _server(folder: Path, *flags: str, number: int = 0) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", SERVER, *flags], folder / f"{number}.log", lambda _: dict(os.environ))


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
    with running(servers, 20):
        assert len({server.url for server in servers}) == 2
        assert all(urllib.request.urlopen(server.url + "/health").status == 200 for server in servers)
        assert len(list(folders.iterdir())) == 2
    pids = [pid for number in range(2) for pids in _pids(tmp_path / f"{number}.log") for pid in pids]
    assert len(pids) == 4
    assert not any(_is_alive(pid) for pid in pids)
    assert not list(folders.iterdir())


def test_servers_are_gone_after_an_exception(tmp_path: Path) -> None:
    """An error in the block passes, and ends the servers."""
    with pytest.raises(KeyError), running([_server(tmp_path)], 20):
        raise KeyError
    assert not any(_is_alive(pid) for pids in _pids(tmp_path / "0.log") for pid in pids)


@pytest.mark.parametrize("which", [0, 1])
def test_nothing_is_left_where_the_launcher_is_killed(tmp_path: Path, folders: Path, which: int) -> None:
    """SIGKILL or SIGTERM of the launching process takes the server, its process and its folder with it."""
    script = f"""
import sys, time
sys.path.insert(0, {str(_ROOT)!r})
from pathlib import Path
from tests.launch.test_servers import _server
from components.launch.servers import running
with running([_server(Path({str(tmp_path)!r}))], 20):
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
    with running([server], 20):
        first = _pids(tmp_path / "0.log")[0]
        os.kill(first[0] if victim == "server" else os.getpgid(first[0]), signal.SIGKILL)
        _wait_until(lambda: len(_pids(tmp_path / "0.log")) == 2)
        _wait_until(server.answers)
        assert not any(_is_alive(pid) for pid in first)
    assert not any(_is_alive(pid) for pids in _pids(tmp_path / "0.log") for pid in pids)


@pytest.mark.long
def test_a_start_that_the_system_refuses_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a full disk: the server is started at the next try, and answers."""
    server, start, refused = _server(tmp_path), ServerProcess.start, [OSError(28, "No space left on device")]

    def start_or_refuse(process: ServerProcess) -> None:
        if refused:
            raise refused.pop()
        start(process)

    with running([server], 20):
        monkeypatch.setattr(ServerProcess, "start", start_or_refuse)
        os.kill(_pids(tmp_path / "0.log")[0][0], signal.SIGKILL)
        _wait_until(lambda: len(_pids(tmp_path / "0.log")) == 2 and server.answers())
    assert not refused


def test_a_server_that_keeps_ending_is_left_alone_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After three more starts it is given up, with the end of what it printed."""
    server = _server(tmp_path)
    with running([server], 20):
        server._command.append("--fail")
        os.kill(_pids(tmp_path / "0.log")[0][0], signal.SIGKILL)
        _wait_until(lambda: server.ended and len(_pids(tmp_path / "0.log")) == 4)
        time.sleep(1)
    assert len(_pids(tmp_path / "0.log")) == 4
    said = capsys.readouterr().out
    assert said.count("starting it again") == 3
    assert "left alone" in said
    assert "no such model" in said


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """The error holds the end of what it printed, and the server beside it is ended."""
    servers = [_server(tmp_path), _server(tmp_path, "--fail", number=1)]
    with pytest.raises(PipelineError, match=r"(?s)ended before it answered.*no such model"), running(servers, 20):
        pytest.fail("they run")
    assert not any(_is_alive(pid) for each in _pids(tmp_path / "0.log") for pid in each)


def test_a_server_that_does_not_answer_in_time_is_an_error(tmp_path: Path) -> None:
    """The deadline and what it printed are in the error; it can be tried again."""
    servers = [_server(tmp_path, "--slow")]
    with pytest.raises(RetryableError, match=r"(?s)after 1 s.*hello from"), running(servers, 1):
        pytest.fail("it runs")
    assert not any(_is_alive(pid) for pid in _pids(tmp_path / "0.log")[0])


def test_a_port_is_nobody_elses_while_its_server_is_down(tmp_path: Path) -> None:
    """No other socket gets the port of a server that has not started yet, or has ended."""
    server = _server(tmp_path)
    port = int(server.url.rsplit(":", 1)[1])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    server.stop()
