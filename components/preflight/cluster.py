"""Checks of the cluster: Kubeflow Trainer, its runtime, the volume, queue and permissions, and a dry run of the job.

Each check yields a line for each error, and raises ApiException if the cluster does not answer.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client

from components.cluster import kube
from components.cluster.config import ClusterStage
from components.cluster.job import Job
from components.cluster.manifest import NODE, train_job
from components.preflight.config import Params
from components.shared.progress import say

_FORBIDDEN, _MISSING = 403, 404
_MISSING_OBJECT = '" not found'
"""Part of the message of a 404 for an object, such as a namespace, but not for an unknown group or version."""
_DEFAULT_GRACE_S, _MARGIN_S = 30, 30
"""Kubernetes' default for terminationGracePeriodSeconds, and what a pod needs beyond its ranks' grace period."""
LAUNCH = (
    *((verb, kube.PLURAL, kube.GROUP) for verb in ("create", "delete", "get", "list", "patch")),
    ("list", "pods", ""),
    ("get", "pods/log", ""),
    ("list", "events", ""),
)
"""Permissions to launch, watch and remove a training job: verb, resource and group, as in a Role."""
QUEUE = (
    ("list", "workloads", kube.KUEUE),
    ("get", "localqueues/pendingworkloads", f"visibility.{kube.KUEUE}"),
)
"""Permissions to tell a job's position in a queue."""


def read(name: str, request: Callable[..., Any], *location: str) -> Any:
    """Return the answer to `request`; None if the object does not exist, False without permission to read it."""
    try:
        return request(*location)
    except client.ApiException as error:
        if error.status == _MISSING:
            return None
        if error.status == _FORBIDDEN:
            say("preflight", f"no permission to read {name}; going on without")
            return False
        raise


def runtime(api: client.ApiClient, namespace: str, name: str, grace_s: float | None = None) -> Iterator[str]:
    """Check that the runtime of training jobs exists and gives pods enough time to end beyond `grace_s`."""
    request = client.CustomObjectsApi(api).get_namespaced_custom_object
    existing = read(name, request, kube.GROUP, kube.VERSION, namespace, "trainingruntimes", name)
    if existing is None:
        yield f"namespace {namespace} has no TrainingRuntime {name}; apply an overlay of k8s/"
    if not existing or grace_s is None:
        return
    jobs = {job["name"]: job["template"] for job in existing["spec"]["template"]["spec"]["replicatedJobs"]}
    pod_spec = jobs[NODE]["spec"]["template"]["spec"]
    pod_grace_s = pod_spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if grace_s + _MARGIN_S > pod_grace_s:
        yield (
            f"checkpoint.grace_s: ranks have {grace_s:g} s to write a checkpoint, but the TrainingRuntime {name} has "
            f"their pods killed after {pod_grace_s} s; set terminationGracePeriodSeconds there to "
            f"{grace_s + _MARGIN_S:g} or more"
        )


def volume(api: client.ApiClient, namespace: str, claim: str) -> Iterator[str]:
    """Check that the volume claim exists and can be mounted by all pods of a run."""
    pvc = read(claim, client.CoreV1Api(api).read_namespaced_persistent_volume_claim, claim, namespace)
    if pvc is None:
        yield f"deployment.volume: namespace {namespace} has no volume claim {claim}; apply an overlay of k8s/"
    elif pvc and "ReadWriteMany" not in pvc.spec.access_modes:
        modes = ", ".join(pvc.spec.access_modes)
        yield f"deployment.volume: {claim} is {modes}; all pods of a run share it, which takes ReadWriteMany"


def local_queue(api: client.ApiClient, namespace: str, name: str) -> Iterator[str]:
    """Check that Kueue's LocalQueue exists and admits jobs."""
    custom, version = client.CustomObjectsApi(api), kube.KUEUE_VERSION
    if read("Kueue", custom.get_api_resources, kube.KUEUE, version) is None:
        yield (
            f"cluster_queue: this cluster has no Kueue with {kube.KUEUE}/{version}, and thus no queue {name}; install "
            "Kueue 0.17 or newer, or leave it empty"
        )
        return
    queue = read(name, custom.get_namespaced_custom_object, kube.KUEUE, version, namespace, "localqueues", name)
    if queue is False:
        yield (
            f"cluster_queue: not allowed to read LocalQueue {name} in namespace {namespace}; add k8s/components/kueue "
            "to the overlay"
        )
    if queue is None:
        yield f"cluster_queue: namespace {namespace} has no LocalQueue {name}; leave it empty to run without Kueue"
    for condition in (queue or {}).get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] == "False":
            yield f"cluster_queue: {name} admits no jobs: {condition.get('message', 'no reason given')}"


def permissions(api: client.ApiClient, namespace: str, wanted: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Check that this process has the permissions `wanted` in a namespace, such as `LAUNCH`."""
    missing = []
    for verb, resource, group in wanted:
        plural, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": plural, "namespace": namespace}
        review = {"spec": {"resourceAttributes": {**attributes, "subresource": subresource}}}
        if not client.AuthorizationV1Api(api).create_self_subject_access_review(review).status.allowed:
            missing.append(f"{verb} {resource}" + (f" ({group})" if group else ""))
    if missing:
        yield f"not allowed in namespace {namespace}: {', '.join(missing)}; bind the Role grpo-pipeline-launcher (k8s/)"


def dry_run(api: client.ApiClient, namespace: str, params: Params) -> Iterator[str]:
    """Check that Kubeflow Trainer is installed and accepts a training job like that of GRPO, without creating it."""
    num_processes, now = params.train_grpo.engine.num_processes, datetime.now(UTC).isoformat(timespec="seconds")
    job = Job(Path("/work/preflight"), "", {}, {}, {}, num_processes, grace_s=0)  # only `num_processes` matters here
    stage = ClusterStage(params.cluster, "preflight", "train_grpo", Path(params.cluster.mount))
    try:
        client.CustomObjectsApi(api).create_namespaced_custom_object(
            *(kube.GROUP, kube.VERSION, namespace, kube.PLURAL, train_job(job, stage, {}, None, now)),
            dry_run="All",
            field_validation="Strict",
        )
    except client.ApiException as error:
        if kube.is_transient(error):
            raise
        message = kube.error_message(error)
        if (error.status == _MISSING and _MISSING_OBJECT not in message) or "runtimePatches" in message:
            kind = f"{kube.GROUP}/{kube.VERSION}"
            yield f"this cluster has no TrainJob ({kind}) of Kubeflow Trainer 2.2 or newer: {message}"
        elif error.status != _FORBIDDEN:  # the checks of permissions and of the runtime report it
            yield f"the cluster refuses the training job: {message}"
