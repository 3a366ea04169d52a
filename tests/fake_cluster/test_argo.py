"""What follows an attempt at a step, against recorded workflows of Argo 4.0 in Kubeflow Pipelines 2.17."""

import json
from datetime import datetime
from typing import Any

import pytest

from tests.fake_cluster.argo import FAILED, SUCCEEDED, Attempt, End, Retry, RetryStrategy, after
from tests.pipelines.cluster.recorded import RECORDINGS

DEFAULTS = RetryStrategy(limit=2, policy="OnError")
"""Of Kubeflow Pipelines 2.17, for every node; steps with retries set the rest."""


def seconds(stamp: str) -> float:
    """Return a recorded moment in seconds."""
    return datetime.fromisoformat(stamp).timestamp()


def strategy(node: dict[str, Any]) -> RetryStrategy:
    """Return how a recorded node is retried."""
    values = {each["name"]: each.get("value", "") for each in node.get("inputs", {}).get("parameters", [])}
    if "retry-max-count" not in values:
        return DEFAULTS
    duration, most = (float(values[f"retry-backoff-{name}"].removesuffix("s")) for name in ("duration", "max-duration"))
    return RetryStrategy(
        limit=int(values["retry-max-count"]),
        policy="OnError",
        duration_s=duration,
        factor=float(values["retry-backoff-factor"]),
        max_duration_s=most,
    )


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
def test_recorded_steps_end_as_argo_ended_them() -> None:
    """After every attempt but the last there is another one; after the last the step has its phase and message."""
    ends: set[tuple[str, str]] = set()
    for line in (RECORDINGS / "argo-4.0.8" / "workflows.jsonl").read_text().splitlines():
        workflow = json.loads(line)
        nodes = workflow["status"]["nodes"]
        deadline = (
            seconds(workflow["status"]["startedAt"]) if workflow["spec"].get("activeDeadlineSeconds") == 0 else None
        )
        for node in nodes.values():
            pods = [nodes[child] for child in node.get("children", []) if nodes[child]["type"] == "Pod"]
            pods = [pod for pod in pods if pod["name"].startswith(f"{node['name']}(")]
            if node["type"] != "Retry" or not pods:
                continue
            attempts = [
                Attempt(seconds(pod["startedAt"]), seconds(pod["finishedAt"]), pod["phase"], pod.get("message", ""))
                for pod in pods
            ]
            for number in range(1, len(attempts)):
                what = after(strategy(node), attempts[:number], attempts[number].started_s)
                assert isinstance(what, Retry)
                assert what.at_s <= attempts[number].started_s
            now = seconds(node["finishedAt"])
            end = after(strategy(node), attempts, now, workflow_deadline_s=deadline)
            assert isinstance(end, End)
            message = node.get("message", "") if node["phase"] != SUCCEEDED else ""
            assert (end.phase, message.partition(" 2026")[0]) == (node["phase"], end.message), node["name"]
            ends.add((end.phase, end.message))
    assert ends >= {
        (SUCCEEDED, ""),
        (FAILED, "main: Error (exit code 1)"),
        (FAILED, "Max duration limit exceeded"),
        (FAILED, "retry exceeded workflow deadline"),
    }
