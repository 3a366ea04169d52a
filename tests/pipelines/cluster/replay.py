"""A Kubeflow Pipelines that answers what a real one was recorded to answer, and nothing else.

The answers are those of Kubeflow Pipelines 2.17.0 at the address of its UI server. What was not recorded is refused
with 501 and listed in `Replay.refused`: a test ends with a look at it.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

Json = dict[str, Any]
RECORDINGS = Path(__file__).parents[4] / "shared" / "recordings"
"""Beside the checkout, where there are any."""
_RUNS = "/apis/v2beta1/runs/"
_LOGS_OF = {
    "preflight-failed": "grpo-post-training-on-cluster-d8tj6-metadata-0-2-system-container-impl-444939009",
    "train_grpo-killed-by-backoff-limit": (
        "grpo-post-training-on-cluster-g57sp-metadata-0-2-retry-system-container-impl-3774546142"
    ),
    "train_grpo-terminated": "grpo-post-training-on-cluster-k9sp2-metadata-0-2-retry-system-container-impl-2640444821",
    "train_sft-in-use": "grpo-post-training-on-cluster-z97vj-metadata-0-2-retry-system-container-impl-624006430",
    "train_sft-succeeded": "grpo-post-training-on-cluster-jlq6d-metadata-0-2-retry-system-container-impl-3505841395",
}
"""The pods whose logs were kept as files."""


class Recorded:
    """What was recorded, with all that stands for something longer put in place."""

    def __init__(self, folder: Path = RECORDINGS) -> None:
        exchanges = [json.loads(line) for line in _lines(folder / "kfp-2.17.0" / "exchanges.jsonl")]
        pipelines = {_digest(spec): spec for each in exchanges for spec in _specs(each)}
        self.exchanges: list[Json] = [_whole(each, pipelines) for each in exchanges]
        self.events = [each.get("object", each) for each in map(json.loads, _lines(folder / "events.jsonl"))]
        workflows = [json.loads(line) for line in _lines(folder / "argo-4.0.8" / "workflows.jsonl")]
        self.pods_of = {each["metadata"]["labels"]["pipeline/runid"]: set(_pods(each)) for each in workflows}
        self.pods = {pod for pods in self.pods_of.values() for pod in pods}
        self.pods |= {each["involvedObject"]["name"] for each in self.events if each["involvedObject"]["kind"] == "Pod"}
        self.logs = {pod: (folder / "logs" / f"{name}.txt").read_text() for name, pod in _LOGS_OF.items()}

    def runs(self) -> dict[str, list[Json]]:
        """Every run, as it was at each time that it was asked for."""
        found: dict[str, list[Json]] = {}
        for each in self.exchanges:
            run_id = each["path"].removeprefix(_RUNS)
            if each["method"] == "GET" and each["path"] == _RUNS + run_id and each["status"] == 200:
                found.setdefault(run_id, []).append(each["response"])
        return found


class Replay:
    """A server of what was recorded, for as long as the `with` lasts.

    Attributes:
        moments: The answers that are still to come for each run; the last one stays.
        lost: Beginnings of the names of pods that were removed since.
        refused: Requests that were not recorded.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.moments = {run_id: list(answers) for run_id, answers in recorded.runs().items()}
        self.lost: tuple[str, ...] = ()
        self.refused: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = owner.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if body.startswith("{") else "text/plain")
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        assert self.refused == []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str) -> tuple[int, str]:
        """Answer a GET with a status and a body."""
        parts = urlsplit(path)
        query = dict(parse_qsl(parts.query))
        if parts.path == "/apis/v2beta1/healthz":
            # The recorded answer is of a server that was not ready yet; a ready one says this as well.
            return 200, json.dumps({**self._exchange("GET", parts.path)["response"], "multi_user": False})
        if parts.path.startswith("/k8s/pod"):
            return self._of_pod(parts.path, query)
        run_id = parts.path.removeprefix(_RUNS)
        if run_id in self.moments:
            moments = self.moments[run_id]
            return 200, json.dumps(moments.pop(0) if len(moments) > 1 else moments[0])
        known = [each for each in self._recorded.exchanges if (each["method"], each["path"]) == ("GET", path)]
        return (known[-1]["status"], _text(known[-1]["response"])) if known else self._refuse(path)

    def _of_pod(self, path: str, query: dict[str, str]) -> tuple[int, str]:
        pod = query.get("podname", "")
        if pod not in self._recorded.pods or query.get("podnamespace") != "kubeflow":
            return self._refuse(f"{path} {query}")
        is_lost = bool(self.lost) and pod.startswith(self.lost)
        if path.endswith("/events"):
            of_it = [each for each in self._recorded.events if each["involvedObject"]["name"] == pod]
            return 200, json.dumps({"kind": "EventList", "items": of_it})
        if path.endswith("/logs"):
            return self._log(pod, query) if not is_lost else (500, "Could not get main container logs: NoSuchKey")
        return (500, f'pods "{pod}" not found') if is_lost else (200, json.dumps({"kind": "Pod"}))

    def _log(self, pod: str, query: dict[str, str]) -> tuple[int, str]:
        for each in self._recorded.exchanges:
            parts = urlsplit(each["path"])
            asked = dict(parse_qsl(parts.query))
            # The UI sends the day of a run besides, for installations that archive by the day.
            if (
                parts.path == "/k8s/pod/logs"
                and asked == {name: query.get(name) for name in asked}
                and "runid" in asked
            ):
                return each["status"], _text(each["response"])
        if pod in self._recorded.logs:
            return 200, self._recorded.logs[pod]
        return 500, "Could not get main container logs: NoSuchKey"

    def _exchange(self, method: str, path: str) -> Json:
        return next(each for each in self._recorded.exchanges if (each["method"], each["path"]) == (method, path))

    def _refuse(self, path: str) -> tuple[int, str]:
        self.refused.append(path)
        return 501, f"not recorded: {path}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _text(response: Any) -> str:
    return response if isinstance(response, str) else json.dumps(response)


def _digest(spec: Json) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12]


def _specs(value: Any) -> Iterator[Json]:
    """Every pipeline that is written out in a value."""
    if isinstance(value, dict):
        spec = value.get("pipeline_spec")
        if isinstance(spec, dict) and "same_as_digest" not in spec:
            yield spec
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _specs(each)


def _whole(value: Any, pipelines: dict[str, Json]) -> Any:
    """A value with every reference to a pipeline replaced by the pipeline."""
    if isinstance(value, dict):
        if "same_as_digest" in value:
            return pipelines[value["same_as_digest"]]
        return {name: _whole(each, pipelines) for name, each in value.items()}
    return [_whole(each, pipelines) for each in value] if isinstance(value, list) else value


def _pods(workflow: Json) -> Iterator[str]:
    """Names of the pods of a workflow."""
    name = workflow["metadata"]["name"]
    for id_, node in workflow["status"]["nodes"].items():
        if node["type"] == "Pod":
            yield f"{name}-{node['templateName']}-{id_.rpartition('-')[2]}"
