"""A Hugging Face hub on this machine: the calls of huggingface_hub that create a repository and upload a folder to it.

It answers as https://huggingface.co/docs/hub/api and the client's source describe, and refuses everything else.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_writes"
Answer = tuple[int, Any]
"""HTTP status, and what is sent as JSON."""


class Hub(ThreadingHTTPServer):
    """What is on the hub, and its server."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        """Content of the main branch of each repository, by path."""
        self.tags: dict[str, set[str]] = {}

    def answer(self, path: str, token: str, lines: list[Any]) -> Answer:
        """Answer a request, of which each line is a JSON object."""
        match = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(tree|preupload|commit|tag)/main", path)
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "type": "user"}
        if path == "/api/validate-yaml":  # the front matter of a model card
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(lines[0])
        return self._call(match[2], match[1], lines) if match and match[1] in self.files else (404, {"error": path})

    def _create(self, body: Any) -> Answer:
        name = f"{body.get('organization') or 'someone'}/{body['name']}"
        if name in self.files:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.files[name], self.tags[name], self.private[name] = {}, set(), body.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def _call(self, call: str, name: str, lines: list[Any]) -> Answer:
        files = self.files[name]
        match call:
            case "tree":
                return 200, [{"type": "file", "path": each, "size": len(files[each]), "oid": "0"} for each in files]
            case "preupload":
                asked = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in lines[0]["files"]]
                return 200, {"files": asked}
            case "tag":
                self.tags[name].add(lines[0]["tag"])
                return 200, {}
        for value in (line["value"] for line in lines if line["key"] == "deletedFile"):
            del files[value["path"]]
        for value in (line["value"] for line in lines if line["key"] == "file"):
            files[value["path"]] = base64.b64decode(value["content"])
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1", "hookOutput": ""}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"".join(iter(self._chunk, b""))
        lines = [json.loads(line) for line in body.splitlines()]
        path, token = self.path.partition("?")[0], self.headers.get("Authorization", "")
        status, answer = self.server.answer(path, token, lines)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _respond

    def _chunk(self) -> bytes:
        content = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return content

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty hub while the block runs."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
