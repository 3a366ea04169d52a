"""What a run needs in the cluster: Kubeflow Trainer, a runtime, a volume, a queue, permissions, an acceptable job.

Each check returns a line for each thing that is missing or cannot be used, and raises ApiException if the cluster does
not answer.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kubernetes import client

from components.cluster import kube
from components.cluster.config import ClusterConfig, ClusterStage
from components.cluster.job import Job
from components.cluster.kube import is_transient
from components.cluster.manifest import NODE, train_job
from components.preflight.config import CLUSTER, Sections
from components.shared.progress import say

_KUEUE, _KUEUE_VERSION = "kueue.x-k8s.io", "v1beta1"
_SHARED = "ReadWriteMany"
_FORBIDDEN, _MISSING = 403, 404
_DEFAULT_GRACE_S = 30
"""Time that Kubernetes gives a pod to end if its spec does not say."""
_MARGIN_S = 30
"""Time that a pod needs beyond its ranks' own to end."""
_STAGE = "train_grpo"


class Permission(NamedTuple):
    """One kind of request."""

    verb: str
    resource: str
    """With its subresource: `pods/log`."""
    group: str = ""

    def __str__(self) -> str:
        """In the words of a Role."""
        return f"{self.verb} {self.resource}" + (f" ({self.group})" if self.group else "")


LAUNCH = (
    *(Permission(verb, kube.PLURAL, kube.GROUP) for verb in ("create", "delete", "get", "list", "patch")),
    Permission("list", "pods"),
    Permission("get", "pods/log"),
    Permission("list", "events"),
)
"""What launching, watching and removing a training job takes."""


def trainer(api: client.ApiClient) -> list[str]:
    """Check that Kubeflow Trainer is installed; every service account may ask."""
    try:
        listed = client.CustomObjectsApi(api).get_api_resources(kube.GROUP, kube.VERSION).resources
    except client.ApiException as error:
        if error.status != _MISSING:
            raise
        listed = []
    if kube.PLURAL in {resource.name for resource in listed}:
        return []
    return [f"this cluster has no TrainJob ({kube.GROUP}/{kube.VERSION}); install Kubeflow Trainer 2.2 or newer"]


def runtime(api: client.ApiClient, namespace: str, name: str, grace_s: float | None = None) -> list[str]:
    """Check that the runtime of training jobs exists, and that its pods have `grace_s` and more to end."""
    read = client.CustomObjectsApi(api).get_namespaced_custom_object
    existing = _read(read, kube.GROUP, kube.VERSION, namespace, "trainingruntimes", name)
    if existing is None:
        return [f"namespace {namespace} has no TrainingRuntime {name}; apply an overlay of k8s/"]
    if existing is _NO_PERMISSION or grace_s is None:
        return []
    (job,) = (each for each in existing["spec"]["template"]["spec"]["replicatedJobs"] if each["name"] == NODE)
    limit_s = job["template"]["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if grace_s + _MARGIN_S <= limit_s:
        return []
    return [
        f"checkpoint.grace_s: ranks have {grace_s:g} s to write a checkpoint, but the TrainingRuntime {name} has their "
        f"pods killed after {limit_s} s; set terminationGracePeriodSeconds there to {grace_s + _MARGIN_S:g} or more"
    ]


def volume(api: client.ApiClient, namespace: str, claim: str) -> list[str]:
    """Check that the shared volume exists, and is shared."""
    core = client.CoreV1Api(api)
    pvc = _read(lambda where, name: core.read_namespaced_persistent_volume_claim(name, where), namespace, claim)
    if pvc is None:
        return [f"deployment.volume: namespace {namespace} has no volume claim {claim}; apply an overlay of k8s/"]
    if pvc is _NO_PERMISSION:
        return []
    if _SHARED not in pvc.spec.access_modes:
        modes = ", ".join(pvc.spec.access_modes)
        return [f"deployment.volume: {claim} is {modes}; all pods of a run share it, which takes {_SHARED}"]
    if pvc.status.phase == "Lost":
        return [f"deployment.volume: {claim} has lost its volume; use another claim"]
    return []


def local_queue(api: client.ApiClient, namespace: str, name: str) -> list[str]:
    """Check that the queue of Kueue exists, and admits jobs."""
    read = client.CustomObjectsApi(api).get_namespaced_custom_object
    queue = _read(read, _KUEUE, _KUEUE_VERSION, namespace, "localqueues", name)
    if queue is None:
        return [f"cluster_queue: namespace {namespace} has no LocalQueue {name}; leave it empty to run without Kueue"]
    if queue is _NO_PERMISSION:
        return []
    for condition in queue.get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] == "False":
            return [f"cluster_queue: {name} admits no jobs: {condition.get('message', 'no reason given')}"]
    return []


def permissions(api: client.ApiClient, namespace: str) -> list[str]:
    """Check that this process may launch training jobs in a namespace; the cluster itself is asked."""
    missing = [str(each) for each in LAUNCH if not _allowed(api, namespace, each)]
    if not missing:
        return []
    return [f"not allowed in namespace {namespace}: {', '.join(missing)}; bind the Role grpo-pipeline-launcher (k8s/)"]


def dry_run(api: client.ApiClient, namespace: str, sections: Sections) -> list[str]:
    """Check that the cluster would accept the training job that valid sections lead to, field by field."""
    config = ClusterConfig.model_validate(sections[CLUSTER])
    section, now = sections[_STAGE], datetime.now(UTC).isoformat(timespec="seconds")
    # A job of the right size; what it would run makes no difference here.
    job = Job(
        folder=Path("/work/preflight"),
        function="",
        config={},
        folders={},
        outputs={},
        num_processes=section["engine"]["num_processes"],
        grace_s=section["checkpoint"]["grace_s"],
    )
    manifest = train_job(job, ClusterStage(config, "preflight", _STAGE, Path(config.mount)), {}, None, now)
    try:
        client.CustomObjectsApi(api).create_namespaced_custom_object(
            kube.GROUP, kube.VERSION, namespace, kube.PLURAL, manifest, dry_run="All", field_validation="Strict"
        )
    except client.ApiException as error:
        if is_transient(error):
            raise
        if error.status in {_FORBIDDEN, _MISSING}:  # no permission, or no such kind: other checks say so plainly
            return []
        return [f"the cluster refuses the training job: {_reason(error)}"]
    return []


_NO_PERMISSION: Any = object()
"""In the place of an object that may not be read: roles name what they are for, and a run may name something else."""


def _read(read: Callable[..., Any], *location: str) -> Any:
    """What `read` returns for an object, which is named last; None if it does not exist."""
    try:
        return read(*location)
    except client.ApiException as error:
        if error.status == _MISSING:
            return None
        if error.status == _FORBIDDEN:
            say("preflight", f"no permission to read {location[-1]}; assuming it is usable")
            return _NO_PERMISSION
        raise


def _allowed(api: client.ApiClient, namespace: str, permission: Permission) -> bool:
    verb, resource, group = permission
    plural, _, subresource = resource.partition("/")
    attributes = client.V1ResourceAttributes(
        verb=verb, group=group, resource=plural, subresource=subresource or None, namespace=namespace
    )
    review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes))
    answer = client.AuthorizationV1Api(api).create_self_subject_access_review(review)
    return bool(answer.status.allowed)


def _reason(error: client.ApiException) -> str:
    try:
        message = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    if "runtimePatches" in message:
        return f"Kubeflow Trainer is too old; 2.2 or newer is needed ({message})"
    return message
