"""A Hugging Face hub on this machine: the calls of huggingface_hub that create a repository and upload a folder to it.

It answers as https://huggingface.co/docs/hub/api and the client's source describe, and refuses everything else.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

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
        self.commits: list[str] = []
        self._large: dict[str, bytes] = {}
        """Large files by their SHA-256."""

    def answer(self, path: str, token: str, body: bytes) -> Answer:
        """Answer a request."""
        if match := re.fullmatch(r"/storage/([0-9a-f]{64})", path):  # whose URL carries its own signature
            self._large[match[1]] = body
            return (200, {}) if hashlib.sha256(body).hexdigest() == match[1] else (400, {"error": "other content"})
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        match path:
            case "/api/whoami-v2":
                return 200, {"name": "someone", "type": "user"}
            case "/api/validate-yaml":  # the front matter of a model card
                yaml.safe_load(json.loads(body)["content"].split("---")[1])
                return 200, {"errors": [], "warnings": []}
            case "/api/repos/create":
                return self._create(json.loads(body))
        return self._answer_of(path, body)

    def _answer_of(self, path: str, body: bytes) -> Answer:
        """Answer a request about a repository."""
        match = re.fullmatch(
            r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(?:\.git)?/((?:info|tree|preupload|commit|tag)/.+)", path
        )
        if not match or match[1] not in self.files:
            return 404, {"error": f"Repository not found: {path}"}
        return self._call(match[1], match[2], [json.loads(line) for line in body.splitlines()])

    def _create(self, body: Any) -> Answer:
        name = f"{body.get('organization') or 'someone'}/{body['name']}"
        if name in self.files:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.files[name], self.tags[name], self.private[name] = {}, set(), body.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def _call(self, name: str, call: str, lines: list[Any]) -> Answer:
        files = self.files[name]
        if call == "tree/main":
            return 200, [{"type": "file", "path": each, "size": len(files[each]), "oid": "0"} for each in files]
        if call == "preupload/main":
            return 200, {"files": [_upload_mode(each["path"]) for each in lines[0]["files"]]}
        if call == "info/lfs/objects/batch":
            upload = [{"upload": {"href": f"{self.url}/storage/{each['oid']}"}} for each in lines[0]["objects"]]
            objects = [{**each, "actions": action} for each, action in zip(lines[0]["objects"], upload, strict=True)]
            return 200, {"transfer": "basic", "objects": objects}
        if call == "commit/main":
            return self._commit(name, lines)
        if call == "tag/main":
            self.tags[name].add(lines[0]["tag"])
            return 200, {}
        return 404, {"error": f"no such call: {call}"}

    def _commit(self, name: str, lines: list[Any]) -> Answer:
        """Apply a commit, of which each line is the header, a file, or a file to delete."""
        files = dict(self.files[name])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self._large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case other:
                    return 400, {"error": f"unknown key {other}"}
        self.files[name] = files
        commit = hashlib.sha1(repr(sorted(files)).encode()).hexdigest()
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit, "hookOutput": ""}


def _upload_mode(path: str) -> dict[str, Any]:
    is_large = path.endswith(".safetensors")
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"".join(iter(self._chunk, b""))
        path = self.path.partition("?")[0]
        status, answer = self.server.answer(path, self.headers.get("Authorization", ""), body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _respond

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
