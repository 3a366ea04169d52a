"""The server: takes requests over HTTP, records them, injects faults, and hands them to the three APIs."""

import contextlib
import ipaddress
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fake_cluster.clock import START, Clock
from tests.fake_cluster.cluster import ScriptedCluster
from tests.fake_cluster.http import AFTER, BEFORE, Answer, ApiError, Fault, Faults, Request
from tests.fake_cluster.kfp import KfpApi
from tests.fake_cluster.kubernetes import KubernetesApi
from tests.fake_cluster.registry import RegistryApi
from tests.fake_cluster.store import Store


def self_signed(folder: Path) -> Path:
    """Write a certificate for 127.0.0.1, with its key, that a client trusts only if it is told to."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(START - timedelta(days=3650)).not_valid_after(START + timedelta(days=36500))
    for extension in (address, x509.BasicConstraints(ca=True, path_length=None)):
        builder = builder.add_extension(extension, critical=False)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "certificate.pem"
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem) + private)
    return path


class ApiServer:
    """A cluster's API server, for as long as the `with` lasts; at its end it raises its own first mistake."""

    def __init__(self, *, namespace: str = "team", certificate: Path | None = None) -> None:
        self.clock = Clock()
        self.namespace = namespace
        self.faults = Faults()
        self.before: Callable[[Request], None] = lambda _: None  # what is done before a request is answered
        self.requests: list[Request] = []
        self.store = Store(self.clock)
        self.cluster = ScriptedCluster(self.store, namespace)
        self.registry = RegistryApi(self.clock)
        self.kfp = KfpApi(self.clock, namespaces=(namespace,))
        self._kubernetes = KubernetesApi(self.cluster)
        self.access = self._kubernetes.access
        self._mistakes: list[Exception] = []
        self._server = _Server(("127.0.0.1", 0), _RequestHandler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="api-server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.close()
        self._server.shutdown()
        self._server.server_close()
        for mistake in self._mistakes:
            raise mistake

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for the client, with its token."""
        context = {"cluster": "test", "user": "test", "namespace": self.namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": self.access.token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    def answer(self, request: Request, fault: Fault) -> Answer:
        """Answer one request by the API that its path names, or as the fault wants."""
        if fault.status:
            return Answer(ApiError(fault.status, fault.message).status(), fault.status)
        apis = (self.registry, self.kfp, self._kubernetes)
        api = next(each for each in apis if request.path.startswith(each.prefixes))
        try:
            return api.answer(request)
        except ApiError as error:
            return Answer(api.refusal(request, error), error.code)
        except Exception as error:
            # A mistake of the server's own must not pass for an injected fault.
            self._mistakes.append(error)
            raise


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: ApiServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the broken connections of clients that were killed."""


class _RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: `ApiServer.requests` has it all."""

    def _handle(self) -> None:
        owner = self.server.owner
        request = self._read()
        fault = owner.faults.next(request)
        owner.requests.append(request)
        owner.before(request)
        time.sleep(fault.delay_s)
        if fault.drop == BEFORE:
            return self._hang_up()
        answer = owner.answer(request, fault)
        if fault.drop == AFTER:
            return self._hang_up()
        request.status = answer.status
        return self._stream(answer, fault) if answer.stream else self._send(answer, fault)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _read(self) -> Request:
        parts = urlsplit(self.path)
        return Request(
            method=self.command,
            path=unquote(parts.path),
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            time=self.server.owner.clock.monotonic(),
        )

    def _begin(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in (*headers.items(), ("Connection", "close")):
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def _send(self, answer: Answer, fault: Fault) -> None:
        is_text = isinstance(answer.body, str)
        body = (answer.body if isinstance(answer.body, str) else json.dumps(answer.body)).encode()
        retry = {"Retry_After": fault.retry_after_s} if fault.retry_after_s else {}
        content_type = "text/plain" if is_text else "application/json"
        self._begin(answer.status, Content_Type=content_type, Content_Length=len(body), **retry)
        self.wfile.write(body)

    def _stream(self, answer: Answer, fault: Fault) -> None:
        self._begin(answer.status, Content_Type="text/plain", Transfer_Encoding="chunked")
        self.wfile.flush()
        num_sent = 0
        for chunk in answer.stream or ():
            piece = chunk if fault.cut_after is None else chunk[: fault.cut_after - num_sent]
            num_sent += len(piece)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b"")
            self.wfile.flush()
            if num_sent == fault.cut_after:
                return self._hang_up()
        self.wfile.write(b"0\r\n\r\n")

    def _hang_up(self) -> None:
        """Reset the connection, so that the client sees it broken rather than ended."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            os.close(self.connection.detach())
