"""The runtimes of k8s/base, as the server takes them, and training jobs that refer to them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.cluster.jobs import NS, create, get, pods, refused, train_job
from tests.fake_cluster import ApiServer, script

RUNTIMES = ("trainer.kubeflow.org", "v1alpha1", NS, "trainingruntimes")
BASE = Path(__file__).parents[2] / "k8s" / "base"


def runtime(name: str) -> Any:
    """A manifest of k8s/base, under a name of its own."""
    document = yaml.safe_load((BASE / f"runtime-{name}.yaml").read_text(encoding="utf-8"))
    document["metadata"]["name"] += "-here"
    return document


def install(api: client.ApiClient, document: Any) -> str:
    """Create a runtime; returns its name."""
    client.CustomObjectsApi(api).create_namespaced_custom_object(*RUNTIMES, document, field_validation="Strict")
    return str(document["metadata"]["name"])


@pytest.mark.parametrize(("name", "jobs"), [("torch", ["node"]), ("torch-vllm", ["node", "rollout"])])
def test_the_runtimes_are_taken_and_run(server: ApiServer, api: client.ApiClient, name: str, jobs: list[str]) -> None:
    """Under strict validation, and a job on them has the pods that they say."""
    server.cluster.play(script.Running(None))
    installed = install(api, runtime(name))
    reference = {"kind": "TrainingRuntime", "name": installed}
    create(api, train_job(runtimeRef=reference, trainer={"numNodes": 2}), field_validation="Strict")
    server.clock.advance(10)
    found = pods(api)
    assert sorted({pod.metadata.labels["jobset.sigs.k8s.io/replicatedjob-name"] for pod in found}) == jobs
    for pod in found:
        mounts = {mount.mount_path for mount in pod.spec.containers[0].volume_mounts}
        assert {"/dev/shm", "/work"} <= mounts
        assert pod.spec.security_context.run_as_non_root


def test_each_server_has_a_name_that_stays(server: ApiServer, api: client.ApiClient) -> None:
    """Replicas are Jobs of their own: <job>-rollout-<number>-0, by which training reaches them."""
    server.cluster.play(script.Running(None))
    document = runtime("torch-vllm")
    next(job for job in document["spec"]["template"]["spec"]["replicatedJobs"] if job["name"] == "rollout")[
        "replicas"
    ] = 3
    create(api, train_job(runtimeRef={"kind": "TrainingRuntime", "name": install(api, document)}))
    server.clock.advance(10)
    servers = sorted(pod.metadata.name.rpartition("-")[0] for pod in pods(api) if "-rollout-" in pod.metadata.name)
    assert servers == [f"grpo-1-rollout-{number}-0" for number in range(3)]
    ready = {each["name"]: each["ready"] for each in get(api)["status"]["jobsStatus"]}
    assert ready == {"rollout": 3, "node": 1}


def _changed(change: Any) -> Any:
    document = copy.deepcopy(runtime("torch-vllm"))
    jobs = document["spec"]["template"]["spec"]["replicatedJobs"]
    change(jobs, next(job for job in jobs if job["name"] == "node"))
    return document


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _, node: node.update(replicas=2), "always must be 1"),
        (lambda jobs, _: jobs.reverse(), "must be a replicatedJob before this one"),
        (
            lambda _, node: node["template"]["spec"]["template"]["spec"]["containers"][0].update(name="main"),
            "must contain the required container for the ancestor: trainer",
        ),
        (lambda _, node: node.update(dependOn=[]), "unknown field"),
    ],
)
def test_runtimes_that_the_webhook_denies(api: client.ApiClient, change: Any, said: str) -> None:
    """Several trainers, servers after those who wait for them, a trainer by another name, a typing error."""
    assert said in refused(install, api, _changed(change))
