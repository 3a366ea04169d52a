"""What a real Kubeflow Pipelines 2.17.0 was recorded to answer, for the fake cluster to answer as well."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cluster import ApiServer, Json

RECORDINGS = Path(__file__).parents[4] / "shared" / "recordings"
"""Beside the checkout, where there are any."""
needs_recordings = pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
_RUNS = "/apis/v2beta1/runs/"
_NAME = "grpo-post-training-on-cluster"
_PODS_OF_LOGS = {
    "preflight-failed": f"{_NAME}-d8tj6-metadata-0-2-system-container-impl-444939009",
    "train_grpo-killed-by-backoff-limit": f"{_NAME}-g57sp-metadata-0-2-retry-system-container-impl-3774546142",
    "train_grpo-terminated": f"{_NAME}-k9sp2-metadata-0-2-retry-system-container-impl-2640444821",
    "train_sft-in-use": f"{_NAME}-z97vj-metadata-0-2-retry-system-container-impl-624006430",
    "train_sft-succeeded": f"{_NAME}-jlq6d-metadata-0-2-retry-system-container-impl-3505841395",
}
"""The pods whose logs were recorded as files."""


class Recorded:
    """The recordings, with all that stands for something longer put in place.

    Attributes:
        exchanges: Requests and answers.
        runs: Every run by its id, as it was each time that it was asked for.
        pods_of: The pods of each run whose workflow was recorded.
        archived: Where Argo has archived the logs of their pods.
    """

    def __init__(self) -> None:
        exchanges = _objects(RECORDINGS / "kfp-2.17.0" / "exchanges.jsonl")
        pipelines = {_digest(spec): spec for each in exchanges for spec in _pipelines(each)}
        self.exchanges: list[Json] = [_whole(each, pipelines) for each in exchanges]
        self.runs: dict[str, list[Json]] = {}
        for each in self.answers(_RUNS):
            self.runs.setdefault(each["run_id"], []).append(each)
        workflows = _objects(RECORDINGS / "argo-4.0.8" / "workflows.jsonl")
        self.pods_of = {each["metadata"]["labels"]["pipeline/runid"]: set(_pods(each)) for each in workflows}
        self.archived = {run_id: set(_archived(each)) for run_id, each in zip(self.pods_of, workflows, strict=True)}
        events = [each.get("object", each) for each in _objects(RECORDINGS / "events.jsonl")]
        self._events = [each for each in events if each["involvedObject"]["kind"] == "Pod"]
        self._logs = {pod: (RECORDINGS / "logs" / f"{name}.txt").read_text() for name, pod in _PODS_OF_LOGS.items()}

    def id_of(self, name: str) -> str:
        """Return the id of the run of a name."""
        (run_id,) = (run_id for run_id, moments in self.runs.items() if moments[0]["display_name"] == name)
        return run_id

    def load(self, server: ApiServer) -> None:
        """Put all of it into a fake cluster, each run as it was last."""
        kfp = server.kfp
        kfp.runs |= {run_id: moments[-1] for run_id, moments in self.runs.items()}
        versions = self.answers("/apis/v2beta1/pipelines/")
        kfp.versions |= {each["pipeline_version_id"]: each for each in versions if "pipeline_version_id" in each}
        for event in self._events:
            kfp.events.setdefault(event["involvedObject"]["name"], []).append(event)
        kfp.pods |= dict.fromkeys(pod for pods in (*self.pods_of.values(), kfp.events) for pod in pods) | self._logs

    def answers(self, prefix: str) -> list[Json]:
        """Return what was answered to reading what begins with this path."""
        found = [each for each in self.exchanges if (each["method"], each["status"]) == ("GET", 200)]
        return [each["response"] for each in found if each["path"].startswith(prefix)]


def _objects(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _digest(spec: Json) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12]


def _pipelines(value: Any) -> Iterator[Json]:
    """Yield every pipeline that is written out in a value."""
    if isinstance(value, dict):
        spec = value.get("pipeline_spec")
        if isinstance(spec, dict) and "same_as_digest" not in spec:
            yield spec
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _pipelines(each)


def _whole(value: Any, pipelines: dict[str, Json]) -> Any:
    """Return a value with every reference to a pipeline replaced by the pipeline."""
    if isinstance(value, dict):
        if "same_as_digest" in value:
            return pipelines[value["same_as_digest"]]
        return {name: _whole(each, pipelines) for name, each in value.items()}
    return [_whole(each, pipelines) for each in value] if isinstance(value, list) else value


def _pods(workflow: Json) -> Iterator[str]:
    """Yield the names of the pods of a workflow."""
    name = workflow["metadata"]["name"]
    for id_, node in workflow["status"]["nodes"].items():
        if node["type"] == "Pod":
            yield f"{name}-{node['templateName']}-{id_.rpartition('-')[2]}"


def _archived(workflow: Json) -> Iterator[str]:
    """Yield the keys under which the logs of the pods of a workflow were archived."""
    for node in workflow["status"]["nodes"].values():
        for artifact in node.get("outputs", {}).get("artifacts", []):
            if artifact["name"] == "main-logs":
                yield artifact["s3"]["key"]
