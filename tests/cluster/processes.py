"""Processes of tests that run for real: what there is of them, and waiting for what they do."""

import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from components.rollout.vllm.process import ServerProcess

ROOT = Path(__file__).parents[2]
SERVER = """
import http.server, os, pathlib, socket, socketserver, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("hello from", os.getpid(), child.pid, flush=True)
if "--fail" in sys.argv: sys.exit("no such model")
if "--slow" in sys.argv: time.sleep(600)
path = next(a.removeprefix("--uds=") for a in sys.argv if a.startswith("--uds="))
state = pathlib.Path(path).parent / "state"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        condition = state.read_text() if state.exists() else "ready"
        if condition == "hangs": time.sleep(600)
        self.send_response(503 if condition == "dead" else 200); self.end_headers()
        if condition == "closing": threading.Thread(target=self.server.shutdown).start()
    def log_message(self, *words): pass
class Server(http.server.ThreadingHTTPServer):
    address_family, server_bind = socket.AF_UNIX, socketserver.TCPServer.server_bind
with Server(path, Handler) as server: server.serve_forever(0.02)
time.sleep(600)
"""
"""Answers as a file says, and has a child process, as vLLM has."""


def wait_until(condition: Callable[[], object], limit_s: float = 120) -> None:
    """Wait until something is true; the limit only ends a test that has failed."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def listeners(pid: int) -> dict[int, bool]:
    """The TCP ports that a process listens on, and whether each can be reached from this machine alone."""
    files = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            files.add(str(descriptor.readlink()))
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in files:
                host, port = local.split(":")
                words = [bytes.fromhex(host[place : place + 8])[::-1] for place in range(0, len(host), 8)]
                ports[int(port, 16)] = ipaddress.ip_address(b"".join(words)).is_loopback
    return ports


def start_as_nobody(code: str) -> "subprocess.Popen[str]":
    """Python code in a process of another user of this machine; skips the test where only root could tell."""
    if os.geteuid():
        pytest.skip("only root can act as another user")
    code = f"import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534); {code}"
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **output)


def errors_of_nobody(command: str) -> str:
    """What a shell command prints to its standard error for another user."""
    with start_as_nobody(f"os.execvp('sh', ['sh', '-c', {command!r}])") as process:
        return process.communicate()[1]


def pids(folder: Path) -> list[int]:
    """The processes of the ranks that `tests.cluster.ranks.act` runs in, in the order of their ranks."""
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid")) if path.read_text()]


def server_process(folder: Path, *flags: str, number: int = 0) -> ServerProcess:
    """A server that answers health checks, whose log is `number`.log."""
    return ServerProcess([sys.executable, "-c", SERVER, *flags], folder / f"{number}.log", lambda _: dict(os.environ))
