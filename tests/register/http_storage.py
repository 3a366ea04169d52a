"""A DVC remote that is reached by a URL, in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Storage"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Keep a file."""
        self.server.files[self.path] = self._body()[: -1 if self.server.loses_bytes else None]
        self._answer(200, b"")

    def do_GET(self) -> None:
        """Give a file back."""
        found = self.server.files.get(self.path)
        self._answer(200 if found is not None else 404, found or b"")

    do_HEAD = do_GET

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Storage(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    files: dict[str, bytes]
    loses_bytes: bool


@contextmanager
def http_storage(*, loses_bytes: bool = False) -> Iterator[str]:
    """The URL of an empty storage, or of one that loses the last byte of whatever it is sent."""
    server = _Storage(("127.0.0.1", 0), _Handler)
    server.files = {}
    server.loses_bytes = loses_bytes
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/models"
    finally:
        server.shutdown()
        server.server_close()
