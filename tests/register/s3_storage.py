"""An S3 server in this process with as much of the protocol as DVC uses; it fails on request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

Fault = Literal["forbidden", "internal error", "dies in mid-push", "loses bytes"]
_ERRORS = {
    "forbidden": (403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
    "internal error": (500, "InternalError", "We encountered an internal error."),
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "S3Storage"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        body, fault = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.server.fault
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if fault in _ERRORS:
            self._answer_error(*_ERRORS[fault])
        elif self.command == "PUT":
            if fault == "dies in mid-push" and self.server.objects:
                self.close_connection = True
                self.connection.close()
                return
            if source := self.headers.get("x-amz-copy-source"):
                self.server.objects[address.path] = self.server.objects[f"/{unquote(source).lstrip('/')}"]
                self._answer(200, b'<CopyObjectResult><ETag>"e"</ETag></CopyObjectResult>')
                return
            self.server.objects[address.path] = body[: -1 if fault == "loses bytes" else None]
            self._answer(200, b"")
        elif "list-type" in query:
            self._answer(200, self._listing(address.path, query.get("prefix", [""])[0]))
        elif address.path in self.server.objects:
            self._answer(200, self.server.objects[address.path])
        else:
            self._answer_error(404, "NoSuchKey", "There is no such key.")

    do_GET = do_HEAD = do_PUT = _handle

    def _listing(self, bucket: str, prefix: str) -> bytes:
        contents = "".join(
            f"<Contents><Key>{path.removeprefix(f'{bucket}/')}</Key><Size>{len(content)}</Size>"
            '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"e"</ETag></Contents>'
            for path, content in self.server.objects.items()
            if path.startswith(f"{bucket}/{prefix}")
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    def _answer_error(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class S3Storage(ThreadingHTTPServer):
    """The server, with the contents of its buckets by path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault = fault
        self.objects: dict[str, bytes] = {}

    def set_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lead clients here."""
        for name, value in {
            "ENDPOINT_URL": f"http://127.0.0.1:{self.server_address[1]}",
            "EC2_METADATA_DISABLED": "true",
            "MAX_ATTEMPTS": "1",
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "secret",
            "DEFAULT_REGION": "us-east-1",
            "REQUEST_CHECKSUM_CALCULATION": "when_required",  # otherwise requests have chunks of AWS's own
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)


@contextmanager
def s3_storage(fault: Fault | None = None) -> Iterator[S3Storage]:
    """Serve empty buckets of any name."""
    server = S3Storage(fault)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
