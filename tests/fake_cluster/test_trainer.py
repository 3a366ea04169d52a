"""The fake cluster against recordings of Trainer 2.3, JobSet 0.12 and Kueue 0.19, and the definitions of releases."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from tests.fake_cluster import ApiServer, Json, kinds, script
from tests.fake_cluster.pods import job_set_of, pods_of
from tests.pipelines.cluster.recorded import RECORDINGS, needs_recordings

pytestmark = needs_recordings
GRACE = "terminationGracePeriodSeconds"
DRAINED, QUEUED = "grpo-46381143-81562f1c", "grpo-7f6d9408-77fb"
"""Recorded jobs: the queue of one was stopped, drained and opened again; the other was admitted, and ended well."""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster with a runtime."""
    with ApiServer() as server:
        server.cluster.add_runtime()
        yield server


def create(server: ApiServer, document: Json) -> Json:
    """Create a TrainJob with the real client."""
    api = client.ApiClient(client.Configuration(server.url, {"authorization": f"Bearer {server.access.token}"}))
    path = ("trainer.kubeflow.org", "v1alpha1", "team", "trainjobs")
    job: Json = client.CustomObjectsApi(api).create_namespaced_custom_object(*path, document)
    return job


def recorded(name: str) -> list[Json]:
    """Return the objects of a file of watch events."""
    lines = (RECORDINGS / name).read_text().splitlines()
    return [each.get("object", each) for each in map(json.loads, lines)]


def test_recorded_training_jobs_are_admitted_but_for_what_trainer_2_2_lacks(server: ApiServer) -> None:
    """They were written for Trainer 2.3; the fake cluster is a 2.2."""
    for job in {each["metadata"]["name"]: each for each in recorded("trainer-2.3.0/trainjobs.jsonl")}.values():
        del job["metadata"]["namespace"]
        patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        pod = patch["template"]["spec"]["template"]["spec"]
        if GRACE in pod:
            with pytest.raises(client.ApiException, match=GRACE):
                create(server, job)
            del pod[GRACE]
        is_queued = "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
        assert create(server, job)["spec"] == {**job["spec"], "suspend": is_queued}


def test_job_sets_are_those_that_trainer_makes() -> None:
    """From the job and this project's runtime; the pods are those of their templates."""
    runtime = yaml.safe_load(Path("k8s/base/runtime-torch.yaml").read_text())
    real = {each["metadata"]["name"]: each for each in recorded("trainer-2.3.0/jobsets.jsonl")}
    jobs = {each["metadata"]["name"]: each for each in recorded("trainer-2.3.0/trainjobs.jsonl")}
    assert real.keys() & jobs.keys()
    for name in real.keys() & jobs.keys():
        made = job_set_of(jobs[name], runtime)
        assert made["metadata"].items() <= real[name]["metadata"].items()
        for spec in (made["spec"], real[name]["spec"]):
            template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
            template["spec"][GRACE] = 0  # the runtime had another one then
        assert made["spec"] == real[name]["spec"]
        pods = list(pods_of(made, 0))
        assert [pod["spec"] for pod in pods] == [template["spec"]] * len(pods)
        assert len(pods) == jobs[name]["spec"]["trainer"]["numNodes"]
        assert template["metadata"]["labels"].items() <= pods[0]["metadata"]["labels"].items()


def states(server: ApiServer, kind: kinds.Kind, *steps: script.Step) -> list[list[Json]]:
    """Return the conditions of an object of a kind, one after the other, while a queued job follows a script."""
    seen: list[Json] = []
    server.store.listen(lambda change: seen.append(change.after) if change.kind == kind else None)
    server.cluster.play(*steps)
    job: Json = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    job["metadata"] = {"name": "grpo-1", "labels": {"kueue.x-k8s.io/queue-name": "gpu"}}
    create(server, {**job, "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "grpo-torch"}}})
    server.clock.advance(600)
    return conditions(sorted(seen, key=lambda each: int(each["metadata"]["resourceVersion"])))


def conditions(objects: list[Json]) -> list[list[Json]]:
    """Return the conditions that objects have, one after the other, without their times."""
    found: list[list[Json]] = []
    for each in objects:
        status = each.get("status", {}).get("conditions", [])
        now = [{key: value for key, value in each.items() if key != "lastTransitionTime"} for each in status]
        if now not in found[-1:]:
            found.append(now)
    return [each for each in found if each]


def test_a_queued_job_goes_through_the_recorded_states(server: ApiServer) -> None:
    """Conditions in their order and words."""
    seen = states(server, kinds.TRAIN_JOBS, script.Queued(30), script.Running(60), script.Complete())
    every = recorded("trainer-2.3.0/trainjobs.jsonl")
    assert seen == conditions([each for each in every if each["metadata"]["name"].startswith(QUEUED)])


def test_a_drained_queue_changes_a_workload_as_recorded(server: ApiServer) -> None:
    """Evicted, without its reservation, and admitted again; the recorded queue had room at first."""
    drained = (script.Queued(30), script.Running(60), script.Preempted(60), script.Running(60))
    real = [each for each in recorded("third-trial/workloads.jsonl") if DRAINED in each["metadata"]["name"]]

    def changes(workload: list[list[Json]]) -> list[dict[str, str]]:
        read = ("QuotaReserved", "Admitted", "Evicted")
        every = [{each["type"]: each["status"] for each in found if each["type"] in read} for found in workload]
        first = next(number for number, each in enumerate(every) if each.get("QuotaReserved") == "True")
        return [each for number, each in enumerate(every) if number >= first and each != every[number - 1]]

    assert changes(states(server, kinds.WORKLOADS, *drained)) == changes(conditions(real))
