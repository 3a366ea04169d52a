"""The server: takes requests over HTTP, writes them down, lets faults happen, and hands them to the APIs."""

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from tests.fake_cluster import kfp_api, registry_api
from tests.fake_cluster.access import Access
from tests.fake_cluster.clock import Clock
from tests.fake_cluster.cluster import Cluster
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.faults import AFTER, BEFORE, Fault, Faults
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kubernetes_api import KubernetesApi
from tests.fake_cluster.logs import LogReader, Logs
from tests.fake_cluster.store import Store
from tests.fake_cluster.tls import Certificate


class ApiServer:
    """A cluster's API server, for as long as the `with` lasts.

    Attributes:
        clock: The server's time; the code under test takes its `sleep`, `monotonic` and `now`.
        cluster: What happens to TrainJobs, and direct access to the objects.
        faults: What goes wrong on the way.
        access: Token and role of the Kubernetes client.
        kfp: Kubeflow Pipelines: its experiments, pipelines, runs and schedules.
        registry: What is in the model registry, and what it speaks.
        requests: What was asked, in the order in which it came.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        namespace: str = "team",
        seed: int = 0,
        certificate: Certificate | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.namespace = namespace
        self.access = Access(user=f"system:serviceaccount:{namespace}:pipeline-runner")
        self.faults = Faults(seed=seed)
        self.requests: list[Request] = []
        self.store = Store(self.clock)
        logs = Logs(self.clock)
        self.cluster = Cluster(self.store, logs, namespace)
        self.registry = registry_api.RegistryApi(self.clock)
        self.kfp = kfp_api.KfpApi(self.clock, namespaces=(namespace,))
        self._kubernetes = KubernetesApi(self.store, self.access, LogReader(self.store, logs))
        self._mistakes: list[Exception] = []
        self._server = _Server(("127.0.0.1", 0), _RequestHandler)
        self._server.owner = self
        self._certificate = certificate
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.file, certificate.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="api-server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.close()
        self.cluster.close()
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        for mistake in (*self._mistakes, *self.clock.mistakes):
            raise mistake

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "https" if self._certificate else "http"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for the client, with its token."""
        user = {"token": self.access.token} if self.access.token else {}
        authority = {"certificate-authority": str(self._certificate.file)} if self._certificate else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, **authority}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": self.namespace}}],
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def answer(self, request: Request, fault: Fault | None) -> Answer:
        """Answer one request, well or not."""
        if fault is not None and fault.status and not fault.effect:
            return _faulty(fault)
        try:
            answer = self._route(request)
        except ApiError as error:
            answer = Answer(_refusal(request, error), error.code)
        except Exception as error:
            # A mistake of the server's own must not pass for one that it was told to make.
            self._mistakes.append(error)
            raise
        return _faulty(fault) if fault is not None and fault.status else answer

    def _route(self, request: Request) -> Answer:
        if request.path.startswith(registry_api.PREFIX):
            return self.registry.answer(request)
        if request.path.startswith((kfp_api.PREFIX, kfp_api.PODS_PREFIX)):
            return self.kfp.answer(request)
        return self._kubernetes.answer(request)


def _refusal(request: Request, error: ApiError) -> Json | str:
    """A refusal in the form that the API has for it."""
    if request.path.startswith(kfp_api.PODS_PREFIX):
        return error.message
    if request.path.startswith(registry_api.PREFIX):
        return {"code": str(error.code), "message": error.message}
    if request.path.startswith(kfp_api.PREFIX):
        code = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6}.get(error.code, 13)
        return {"error": error.message, "code": code, "message": error.message, "details": []}
    return error.status()


def _faulty(fault: Fault) -> Answer:
    messages = {429: "too many requests, please try again later", 401: "Unauthorized"}
    error = ApiError(fault.status, messages.get(fault.status, "injected fault"))
    headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s else {}
    return Answer(error.status(), fault.status, headers)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: ApiServer

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def hang_up(self) -> None:
        """Close what clients keep open for their next request, with the threads that wait for it."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed leave broken connections behind; that is no news."""


class _RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        """Remember the connection."""
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        """Forget the connection."""
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: `ApiServer.requests` has it all."""

    def _handle(self) -> None:
        owner = self.server.owner
        request = self._read()
        fault = owner.faults.befalls(request)
        owner.requests.append(request)
        if fault is not None and fault.delay_s:
            time.sleep(fault.delay_s)
        if fault is not None and fault.drop == BEFORE:
            self._hang_up()
            return
        answer = owner.answer(request, fault)
        if fault is not None and fault.drop == AFTER:
            self._hang_up()
            return
        request.status = answer.status
        if answer.stream is None:
            self._send(answer)
        else:
            self._stream(answer, answer.stream, fault or Fault())

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def _read(self) -> Request:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return Request(
            method=self.command,
            path=unquote(parts.path),
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=body,
            time=self.server.owner.clock.monotonic(),
            arrived=time.monotonic(),
        )

    def _send(self, answer: Answer) -> None:
        is_text = isinstance(answer.body, str)
        body = answer.body.encode() if isinstance(answer.body, str) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        headers = {"Content-Type": "text/plain" if is_text else "application/json", **answer.headers}
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, answer: Answer, chunks: Iterator[bytes], fault: Fault) -> None:
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Transfer-Encoding": "chunked", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
        left = fault.ends_after if fault.cut_after is None else fault.cut_after
        for chunk in chunks:
            piece = chunk if left is None else chunk[:left]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b"")
            self.wfile.flush()
            left = None if left is None else left - len(piece)
            if left == 0 and fault.cut_after is not None:
                self._hang_up()
                return
            if left == 0:
                break
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _hang_up(self) -> None:
        """Reset the connection, so that the client sees it broken rather than ended."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            os.close(self.connection.detach())
