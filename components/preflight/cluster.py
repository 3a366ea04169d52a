"""What a run needs in the cluster, each looked for by itself: a line for what is not there or not fit."""

from collections.abc import Callable
from typing import Any

from kubernetes import client

from components.cluster.manifest import NODE
from components.shared.progress import say

_TRAINER, _TRAINER_VERSION = "trainer.kubeflow.org", "v1alpha1"
_KUEUE, _KUEUE_VERSION = "kueue.x-k8s.io", "v1beta1"
_SHARED = "ReadWriteMany"
_FORBIDDEN, _MISSING = 403, 404
_DEFAULT_GRACE_S = 30
"""Time in which a pod has to end where its spec does not say."""
_MARGIN_S = 30
"""Time that a pod needs beyond its ranks' own to end."""


def trainer(api: client.ApiClient) -> list[str]:
    """Whether Kubeflow Trainer is installed."""
    if _resources(api, _TRAINER, _TRAINER_VERSION) & {"trainjobs"}:
        return []
    return [f"this cluster has no TrainJob ({_TRAINER}/{_TRAINER_VERSION}); Kubeflow Trainer 2.2 or newer is needed"]


def runtime(api: client.ApiClient, namespace: str, name: str, grace_s: float | None = None) -> list[str]:
    """Whether the runtime of training jobs is in the namespace, and gives ranks the time to end that they may take."""
    read = client.CustomObjectsApi(api).get_namespaced_custom_object
    found = _found(read, _TRAINER, _TRAINER_VERSION, namespace, "trainingruntimes", name)
    if found is None:
        return [f"namespace {namespace} has no TrainingRuntime {name}; apply an overlay of k8s/"]
    if found is _UNSEEN or grace_s is None:
        return []
    (job,) = (each for each in found["spec"]["template"]["spec"]["replicatedJobs"] if each["name"] == NODE)
    limit_s = job["template"]["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if grace_s + _MARGIN_S <= limit_s:
        return []
    return [
        f"checkpoint.grace_s: ranks have {grace_s:g} s to write a checkpoint, but the TrainingRuntime {name} has their "
        f"pods killed after {limit_s} s; set terminationGracePeriodSeconds there to {grace_s + _MARGIN_S:g} or more"
    ]


def volume(api: client.ApiClient, namespace: str, claim: str) -> list[str]:
    """Whether the shared volume is there, and shared."""
    core = client.CoreV1Api(api)
    found = _found(lambda where, name: core.read_namespaced_persistent_volume_claim(name, where), namespace, claim)
    if found is None:
        return [f"cluster_volume_claim: namespace {namespace} has no volume claim {claim}; apply an overlay of k8s/"]
    if found is _UNSEEN:
        return []
    if _SHARED not in found.spec.access_modes:
        modes = ", ".join(found.spec.access_modes)
        return [f"cluster_volume_claim: {claim} is {modes}; all pods of a run share it, which takes {_SHARED}"]
    if found.status.phase == "Lost":
        return [f"cluster_volume_claim: {claim} has lost its volume; name another claim"]
    return []


def local_queue(api: client.ApiClient, namespace: str, name: str) -> list[str]:
    """Whether Kueue has the queue, and takes jobs into it."""
    read = client.CustomObjectsApi(api).get_namespaced_custom_object
    found = _found(read, _KUEUE, _KUEUE_VERSION, namespace, "localqueues", name)
    if found is None:
        return [f"cluster_queue: namespace {namespace} has no LocalQueue {name}; leave it empty to run without Kueue"]
    if found is _UNSEEN:
        return []
    for condition in found.get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] == "False":
            return [f"cluster_queue: {name} takes no jobs: {condition.get('message', 'no reason given')}"]
    return []


_UNSEEN: Any = object()
"""Something that we may not look at: roles name what they are for, and a run may name something else."""


def _found(read: Callable[..., Any], *names: str) -> Any:
    """What `read` returns of the object that is named last; None where it is not there."""
    try:
        return read(*names)
    except client.ApiException as error:
        if error.status == _MISSING:
            return None
        if error.status == _FORBIDDEN:
            say("preflight", f"could not look at {names[-1]}: not allowed; it is taken to be fit")
            return _UNSEEN
        raise


def _resources(api: client.ApiClient, group: str, version: str) -> set[str]:
    """The kinds of objects that a version of an API has; every service account may ask."""
    try:
        listed = client.CustomObjectsApi(api).get_api_resources(group, version)
    except client.ApiException as error:
        if error.status == _MISSING:
            return set()
        raise
    return {resource.name for resource in listed.resources}
