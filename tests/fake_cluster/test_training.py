"""What becomes of TrainJobs in the scripted cluster."""

from typing import Any

import pytest
from kubernetes import client

from tests.cluster.jobs import NS, conditions, create, get, patch, pods, queued_job, train_job
from tests.fake_cluster import ApiServer, kinds, script


def events(api: client.ApiClient, reason: str) -> list[str]:
    """The messages of the events with a reason."""
    found = client.CoreV1Api(api).list_namespaced_event(NS).items
    return [each.message for each in found if each.reason == reason]


def state(pod: Any) -> Any:
    """The state of a pod's container."""
    return pod.status.container_statuses[0].state


def test_a_job_waits_in_the_queue_until_it_is_admitted(server: ApiServer, api: client.ApiClient) -> None:
    """Suspended with a condition, then resumed; no pod before that."""
    server.cluster.play(script.Queued(3600), script.Running(None))
    create(api, queued_job())
    server.clock.advance(3590)
    assert conditions(server) == {"Suspended": ("True", "Suspended")}
    assert pods(api) == []
    server.clock.advance(60)
    assert conditions(server) == {"Suspended": ("False", "Resumed")}
    assert [pod.status.phase for pod in pods(api)] == ["Running"]


def test_pods_without_a_node_say_why(server: ApiServer, api: client.ApiClient) -> None:
    """Pending, with the scheduler's event."""
    server.cluster.play(script.Unschedulable(600, "0/2 nodes are available"), script.Running(None))
    create(api)
    server.clock.advance(300)
    (pod,) = pods(api)
    assert (pod.status.phase, pod.status.conditions[0].reason) == ("Pending", "Unschedulable")
    assert events(api, "FailedScheduling") == ["0/2 nodes are available"]


def test_an_image_that_cannot_be_pulled(server: ApiServer, api: client.ApiClient) -> None:
    """The container waits with the reason, for ever."""
    server.cluster.play(script.PullBackOff(None))
    create(api, train_job(trainer={"image": "registry/none:1"}))
    server.clock.advance(86400)
    (pod,) = pods(api)
    assert state(pod).waiting.reason == "ImagePullBackOff"
    assert any("registry/none:1" in message for message in events(api, "Failed"))
    assert conditions(server) == {}


@pytest.mark.parametrize(
    ("step", "exit_code", "reason"),
    [(script.OUT_OF_MEMORY, 137, "OOMKilled"), (script.Failed(1), 1, "Error"), (script.NCCL_HANGS, 134, "Error")],
)
def test_a_failed_job_keeps_the_pod_that_says_why(
    server: ApiServer, api: client.ApiClient, step: script.Failed, exit_code: int, reason: str
) -> None:
    """Failed, with exit code and reason in the pod, and its log; the other pods are removed."""
    server.cluster.play(script.Running(60), step)
    create(api, train_job(trainer={"numNodes": 2}))
    server.clock.advance(120)
    assert conditions(server) == {"Failed": ("True", "FailedJobs")}
    (pod,) = pods(api)
    assert (state(pod).terminated.exit_code, state(pod).terminated.reason) == (exit_code, reason)
    log = client.CoreV1Api(api).read_namespaced_pod_log(pod.metadata.name, NS)
    assert ("Watchdog caught collective operation timeout" in log) == (exit_code == 134)


def test_a_lost_node_restarts_all_pods_as_often_as_the_runtime_allows(server: ApiServer, api: client.ApiClient) -> None:
    """New pods with the next attempt; after the last one the job has failed."""
    server.cluster.play(script.Running(60), script.NodeLost(), script.Running(60), script.NodeLost())
    create(api, train_job(trainer={"numNodes": 2}))
    server.clock.advance(30)
    first = {pod.metadata.uid for pod in pods(api)}
    server.clock.advance(60)
    second = pods(api)
    assert len(second) == 2
    assert first.isdisjoint(pod.metadata.uid for pod in second)
    assert {pod.metadata.labels["jobset.sigs.k8s.io/restart-attempt"] for pod in second} == {"1"}
    server.clock.advance(120)
    assert conditions(server) == {"Failed": ("True", "ReachedMaxRestarts")}


def test_a_preempted_job_runs_again(server: ApiServer, api: client.ApiClient) -> None:
    """Suspended, without pods; then admitted anew, and complete."""
    server.cluster.play(
        script.Queued(1), script.Running(60), script.Preempted(600), script.Running(60), script.Complete()
    )
    create(api, queued_job())
    server.clock.advance(300)
    assert conditions(server) == {"Suspended": ("True", "Suspended")}
    assert pods(api) == []
    server.clock.advance(800)
    assert conditions(server) == {"Suspended": ("False", "Resumed"), "Complete": ("True", "AllJobsCompleted")}
    assert {pod.status.phase for pod in pods(api)} == {"Succeeded"}


def test_whoever_suspends_a_job_stops_it(server: ApiServer, api: client.ApiClient) -> None:
    """It goes on where its script was, once it is resumed."""
    server.cluster.play(script.Running(60), script.Running(60, ("on",)), script.Complete())
    create(api)
    server.clock.advance(30)
    patch(api, {"spec": {"suspend": True}})
    server.clock.advance(3600)
    assert pods(api) == []
    patch(api, {"spec": {"suspend": False}})
    server.clock.advance(200)
    assert conditions(server)["Complete"] == ("True", "AllJobsCompleted")


def test_the_deadline_counts_from_the_last_admission(server: ApiServer, api: client.ApiClient) -> None:
    """Waiting costs nothing; after it the job has failed and its pods are gone."""
    server.cluster.play(script.Queued(1000), script.Running(None))
    create(api, queued_job(activeDeadlineSeconds=100))
    server.clock.advance(1090)
    assert "Failed" not in conditions(server)
    server.clock.advance(20)
    assert conditions(server)["Failed"] == ("True", "DeadlineExceeded")
    assert pods(api) == []


def test_an_earlier_admission_s_deadline_is_void(server: ApiServer, api: client.ApiClient) -> None:
    """A job that was preempted has all its time again."""
    server.cluster.play(script.Queued(10), script.Running(60), script.Preempted(10), script.Running(None))
    create(api, queued_job(activeDeadlineSeconds=100))
    server.clock.advance(150)
    assert set(conditions(server)) == {"Suspended"}
    server.clock.advance(60)
    assert conditions(server)["Failed"] == ("True", "DeadlineExceeded")


def test_the_deadline_outlives_restarts(server: ApiServer, api: client.ApiClient) -> None:
    """Pods that start anew get no new time."""
    server.cluster.play(script.Running(60), script.NodeLost(), script.Running(None))
    create(api, train_job(activeDeadlineSeconds=100))
    server.clock.advance(110)
    assert conditions(server)["Failed"] == ("True", "DeadlineExceeded")


def test_the_status_counts_jobs(server: ApiServer, api: client.ApiClient) -> None:
    """Active and ready while it runs, succeeded afterwards; one entry per replicated job of the runtime."""
    server.cluster.add_runtime("grpo-torch-vllm", jobs=("node", "rollout"))
    create(api, train_job(runtimeRef={"kind": "TrainingRuntime", "name": "grpo-torch-vllm"}))
    server.clock.advance(5)
    jobs = {each["name"]: each for each in get(api)["status"]["jobsStatus"]}
    assert set(jobs) == {"node", "rollout"}
    assert (jobs["node"]["active"], jobs["node"]["ready"]) == (1, 1)
    server.clock.advance(60)
    assert get(api)["status"]["jobsStatus"][0]["succeeded"] == 1


def test_pods_have_what_job_runtime_and_patches_say(server: ApiServer, api: client.ApiClient) -> None:
    """Image, command, resources and environment of the trainer; volumes, tolerations and labels of the patches."""
    pod = {
        "metadata": {"labels": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}],
            "containers": [{"name": "node", "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}]}],
        },
    }
    jobs = [{"name": "node", "template": {"spec": {"template": pod}}}]
    patches = [{"manager": "a.b/c", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}]
    trainer = {
        "numNodes": 2,
        "numProcPerNode": 8,
        "image": "gpu:2",
        "command": ["torchrun"],
        "env": [{"name": "A", "value": "1"}],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": "8"}},
    }
    create(api, train_job(trainer=trainer, runtimePatches=patches), field_validation="Strict")
    server.clock.advance(5)
    first, second = pods(api)
    container = first.spec.containers[0]
    assert (container.image, container.command) == ("gpu:2", ["torchrun"])
    assert container.resources.limits == {"nvidia.com/gpu": "8"}
    env = {each.name: each.value for each in container.env}
    assert {"A": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}.items() <= env.items()
    assert env["PET_MASTER_ADDR"] == "grpo-1-node-0-0.grpo-1"
    assert container.volume_mounts[0].mount_path == "/dev/shm"
    assert first.spec.tolerations[0].key == "nvidia.com/gpu"
    assert first.metadata.labels["sidecar.istio.io/inject"] == "false"
    assert second.metadata.labels["batch.kubernetes.io/job-completion-index"] == "1"
    assert second.metadata.name.startswith("grpo-1-node-0-1-")


def test_scripts_are_for_names(server: ApiServer, api: client.ApiClient) -> None:
    """The last script that was set for a name counts, and others keep theirs."""
    seen: list[str] = []
    server.cluster.play(script.Do(lambda: seen.append("sft")), script.Complete(), name="sft")
    create(api, train_job("grpo-sft"))
    create(api, train_job("grpo-other"))
    server.clock.advance(60)
    assert seen == ["sft"]
    assert {kind["metadata"]["name"] for kind in server.cluster.all(kinds.TRAIN_JOBS)} == {"grpo-sft", "grpo-other"}
