"""A fake of a vLLM server that refuses every request that the real one was not seen to accept."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from components.rollout.vllm.servers import INITIAL_VERSION
from components.rollout.vllm.verification import LoadedWeights, Piece, digest, weights_in

_PARAMS = {
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "seed", "stop_token_ids", "ignore_eos", "logprobs", "detokenize",
}  # fmt: skip


class FakeVllm(ThreadingHTTPServer):
    """Samples the token 2 plus the version of its weights, and then the end token 1."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.calls: list[tuple[str, Any]] = []
        self.version = self.loaded = INITIAL_VERSION
        self.held = LoadedWeights(pieces=[], unverified=[])
        self.adapters: set[str] = set()
        """Names under which it has adapters."""
        self.frozen: LoadedWeights | None = None
        """What it reports to hold, whatever it loads."""
        self.paused = self.dead = False
        self.at_once = self.most_at_once = 0
        self.before_answer: Callable[[], object] = lambda: None
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def die(self) -> None:
        """Stop answering, as a killed server does: on connections that are open, too."""
        self.dead = True
        self.shutdown()
        self.server_close()

    def generated(self) -> list[Any]:
        """The requests for completions so far."""
        return [body for path, body in self.calls if path == "/inference/v1/generate"]

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the content of the answer to a call."""
        answers = {"/inference/v1/generate": self._generate, "/v1/load_lora_adapter": self._load_adapters}
        if path in answers:
            return answers[path](body)
        content: dict[str, Any] = {}
        match method, path:
            case "GET", "/weight_info":
                content = {"weight_version": self.version}
            case "POST", "/pause?mode=wait&clear_cache=true":
                self.paused = True
            case "POST", "/collective_rpc" if self.paused and body["method"] == "load_folder":
                self.loaded = body["kwargs"]["version"]
                self.held = self.frozen or LoadedWeights(pieces=_pieces(Path(body["kwargs"]["folder"])), unverified=[])
                content = {"results": [None]}
            case "POST", "/collective_rpc" if self.paused and body["method"] == "loaded_weights":
                content = {"results": [self.held]}
            case "POST", "/update_weight_version" if self.paused and body["new_version"] == self.loaded:
                self.version = body["new_version"]
            case "POST", "/resume":
                self.paused = False
            case _:
                return 404, {"detail": f"{method} {path} out of turn"}
        return 200, content

    def _load_adapters(self, body: Any) -> tuple[int, Any]:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters or not self.paused:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        self.loaded, self.adapters = name, {name}
        self.held = self.frozen or LoadedWeights(pieces=_pieces(folder), unverified=[])
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _generate(self, body: Any) -> tuple[int, Any]:
        params = body["sampling_params"]
        if body.get("model", self.version) not in (self.version, *self.adapters):
            return 404, {"error": {"message": "The model does not exist."}}
        if set(params) != _PARAMS or self.paused:
            return 400, {"error": {"message": f"unexpected: {set(params) ^ _PARAMS}"}}
        if len(body["token_ids"]) > 400:
            return 400, {"error": {"message": "the prompt is too long"}}
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        version = self.version
        self.before_answer()
        with self.lock:
            self.at_once -= 1
        number = 2 if version == INITIAL_VERSION else 2 + int(version)
        choice = {
            "token_ids": [number, 1],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "weight_versions": [{"version": version, "start": 0, "end": 2}],
        }
        return 200, {"choices": [{"index": index, **choice} for index in range(params["n"])]}


def _pieces(folder: Path) -> list[Piece]:
    """Whole tensors, as they lie in the folder."""
    return [
        Piece(f"own.{name}", name, 0, list(each.shape), list(each.stride()), "float32", digest(each))
        for name, each in weights_in(folder).items()
    ]


class _Handler(BaseHTTPRequestHandler):
    server: FakeVllm
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        if self.server.dead:
            self.close_connection = True
            return
        self.server.calls.append((self.path, body))
        try:
            status, content = self.server.answer(self.command, self.path, body)
        except ConnectionError:  # what `before_answer` raises for a server that dies over a request
            self.close_connection = True
            return
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
