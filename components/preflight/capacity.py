"""What can never be scheduled: requests of a run's pods against the cluster's nodes, and the quotas of its namespace.

Every check yields a line for each problem, with the amounts and the key to change. What is merely in use is no problem:
sizes of nodes and quotas are compared, not what is free of them. What may not be read is passed over.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from kubernetes import client
from kubernetes.utils.quantity import parse_quantity

from components.cluster import kube
from components.cluster.config import GPU_RESOURCE, GPU_TYPE_LABEL, ClusterConfig, Toleration
from components.cluster.kube import Json
from components.cluster.manifest import ROLLOUT
from components.preflight.cluster import read

Amounts = Mapping[str, Decimal]
"""Cores, bytes and numbers of devices, by the name of the resource."""

LAUNCHER_CPU, LAUNCHER_MEMORY = ("500m", "2"), ("2G", "4G")
"""What the task that starts and watches a training job requests, and its limits."""
EVALUATION_CPU = ("1", "4")
"""The same of the task that evaluates."""
_TEMPORARY = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Prefixes of taints that come and go with the state of a node."""
_HARD_EFFECTS = ("NoSchedule", "NoExecute")
_GIB, _ZERO = 2**30, Decimal(0)
_UNITS = {"cpu": "CPUs", "memory": "GiB of memory", GPU_RESOURCE: "GPUs", "pods": "pods"}


class Pods(NamedTuple):
    """Pods that are alike and run at the same time."""

    name: str
    """As in `{name} pods`."""
    number: int
    requests: Amounts
    limits: Amounts
    keys: Mapping[str, str]
    """What to change, by resource."""

    def total(self, part: str = "requests") -> Amounts:
        """Return what all of them request, or with `limits` may use."""
        amounts = self.limits if part == "limits" else self.requests
        return {**{resource: self.number * each for resource, each in amounts.items()}, "pods": Decimal(self.number)}


def described(config: ClusterConfig, evaluation_gpus: int) -> dict[str, str]:
    """Return what the pods that run a model ask for, for people."""
    every = {"training pods": training_pods(config), "evaluation pod": evaluating_pods(config, evaluation_gpus)}
    return {name: f"{each.number} with {_texts(each.requests)}" for name, each in every.items()}


def training_pods(config: ClusterConfig) -> Pods:
    """Return the pods of a training job's ranks."""
    pod = config.training_pod
    requests = {"cpu": pod.cpu, "memory": f"{pod.memory_gib}Gi", **_gpus(pod.gpus)}
    keys = {"cpu": "cpu_per_node", "memory": "memory_per_node_gib", GPU_RESOURCE: "gpus_per_node", "pods": "nodes"}
    return _pods("training", config.nodes, requests, {**requests, "cpu": pod.cpu_limit}, keys)


def evaluating_pods(config: ClusterConfig, gpus: int) -> Pods:
    """Return the pod of the task that evaluates."""
    others = {"memory": f"{config.evaluation_gib}Gi", **_gpus(gpus)}
    requests, limits = ({"cpu": cpu, **others} for cpu in EVALUATION_CPU)
    return _pods("evaluation", 1, requests, limits, {"memory": "evaluate_memory_gib", GPU_RESOURCE: "gpus_per_node"})


def launcher_pods() -> Pods:
    """Return the pod of the task that waits for a training job."""
    both = zip(LAUNCHER_CPU, LAUNCHER_MEMORY, strict=True)
    requests, limits = ({"cpu": cpu, "memory": memory} for cpu, memory in both)
    return _pods("launcher", 1, requests, limits, {})


def server_pods(api: client.ApiClient, namespace: str, runtime: str) -> Iterator[Pods]:
    """Yield the pods with vLLM servers of a runtime, where it can be read and has any."""
    request = client.CustomObjectsApi(api).get_namespaced_custom_object
    document = read(runtime, request, kube.GROUP, kube.VERSION, namespace, "trainingruntimes", runtime) or {}
    template = document.get("spec", {}).get("template", {}).get("spec", {})
    for job in template.get("replicatedJobs", []):
        if job["name"] == ROLLOUT:
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            amounts = container.get("resources", {})
            requests, limits = (_parsed(amounts.get(part)) for part in ("requests", "limits"))
            keys = dict.fromkeys(_UNITS, "cluster.rollout_servers")
            yield Pods(f"{runtime} server", job.get("replicas", 1), {**limits, **requests}, limits, keys)


def too_large_for_nodes(api: client.ApiClient, config: ClusterConfig, pods: Sequence[Pods]) -> Iterator[str]:
    """Check that pods fit the nodes that they may run on."""
    listed = read("nodes", client.CoreV1Api(api).list_node)
    for each in pods if listed and listed.items and not config.autoscaling else ():
        nodes = [node for node in listed.items if config.labels.items() <= (node.metadata.labels or {}).items()]
        if not nodes:
            yield _without_node(config, each, listed.items)
            continue
        tolerated = [node for node in nodes if not _obstacles(node, config.tolerations, each)]
        if not tolerated:
            taints = sorted({taint for node in nodes for taint in _obstacles(node, config.tolerations, each)})
            yield (
                f"cluster.tolerations: {each.name} pods tolerate none of the {len(nodes)} nodes that they could run "
                f"on, which have the taints {', '.join(taints)}"
            )
            continue
        yield from _too_large(each, {node.metadata.name: _parsed(node.status.allocatable) for node in tolerated})


def beyond_quotas(api: client.ApiClient, namespace: str, *groups: Sequence[Pods]) -> Iterator[str]:
    """Check that ResourceQuotas and LimitRanges of a namespace admit pods; those of a group run at the same time."""
    core = client.CoreV1Api(api)
    quotas = read("resource quotas", core.list_namespaced_resource_quota, namespace)
    for quota in quotas.items if quotas else ():
        if quota.spec.scope_selector or set(quota.spec.scopes or ()) - {"NotBestEffort"}:
            continue  # for pods of another kind
        for pods in groups:
            yield from _over_quota(pods, quota, f"the ResourceQuota {quota.metadata.name} of namespace {namespace}")
    ranges = read("limit ranges", core.list_namespaced_limit_range, namespace)
    for limits in ranges.items if ranges else ():
        where = f"the LimitRange {limits.metadata.name} of namespace {namespace}"
        for item in limits.spec.limits:
            for each in itertools.chain(*groups):
                yield from _outside_range(each, item, where)


def _pods(name: str, number: int, requests: Json, limits: Json, keys: Mapping[str, str]) -> Pods:
    in_cluster = {resource: f"cluster.{key}" for resource, key in keys.items()}
    return Pods(name, number, _parsed(requests), _parsed(limits), in_cluster)


def _gpus(number: int) -> Json:
    return {GPU_RESOURCE: number} if number else {}


def _without_node(config: ClusterConfig, pods: Pods, nodes: Sequence[Any]) -> str:
    """Say which labels nodes lack, and which values of them there are."""
    labels = [node.metadata.labels or {} for node in nodes]
    missing = [name for name, value in config.labels.items() if value not in {each.get(name) for each in labels}]
    name = (missing or [*config.labels])[0]
    key = "gpu_type" if name == GPU_TYPE_LABEL and config.gpu_type else "node_selector"
    values = ", ".join(sorted({each[name] for each in labels if name in each})) or "none"
    wanted = ", ".join(f"{name}={value}" for name, value in config.labels.items())
    return (
        f"cluster.{key}: {pods.name} pods need a node with {wanted}, and there is none; nodes have for {name}: {values}"
    )


def _obstacles(node: Any, tolerations: Sequence[Toleration], pods: Pods) -> list[str]:
    """Return the taints of a node that keep pods away from it for good.

    Clusters whose nodes with GPUs have a taint of the resource's name add the toleration to pods by themselves.
    """
    taints = [each for each in node.spec.taints or () if each.effect in _HARD_EFFECTS]
    return [
        f"{taint.key}={taint.value or ''}:{taint.effect}"
        for taint in taints
        if not taint.key.startswith(_TEMPORARY)
        and not (taint.key == GPU_RESOURCE and GPU_RESOURCE in pods.requests)
        and not any(_tolerates(each, taint) for each in tolerations)
    ]


def _tolerates(toleration: Toleration, taint: Any) -> bool:
    is_value = toleration.operator == "Exists" or toleration.value == (taint.value or "")
    return is_value and toleration.key in {"", taint.key} and toleration.effect in {"", taint.effect}


def _too_large(pods: Pods, nodes: Mapping[str, Amounts]) -> Iterator[str]:
    """Compare pods with the nodes that they may run on: one with the largest, and all of them with all nodes."""
    remedy = "set cluster.autoscaling if such nodes are added when needed"
    lacking = _lacking(pods.requests, nodes.values())
    for resource in lacking or ():
        node = max(nodes, key=lambda name: nodes[name].get(resource, _ZERO))
        asked, largest = _text(resource, pods.requests[resource]), _text(resource, nodes[node].get(resource, _ZERO))
        key = _key(pods, resource)
        yield f"{key}each {pods.name} pod asks for {asked}; the largest node, {node}, has {largest}; {remedy}"
    if lacking == []:
        asked, key = _texts(pods.requests), _key(pods, "memory")
        yield f"{key}each {pods.name} pod asks for {asked}; no node has all of it; {remedy}"
    room = sum(
        min(int(node.get(resource, _ZERO) // amount) for resource, amount in pods.requests.items() if amount)
        for node in nodes.values()
    )
    if lacking is None and room < pods.number:
        yield (
            f"{_key(pods, 'pods')}{pods.number} {pods.name} pods run together, each with "
            f"{_texts(pods.requests)}; the nodes hold {room}; {remedy}"
        )


def _lacking(wanted: Amounts, places: Iterable[Amounts]) -> list[str] | None:
    """Return the resources of which no place has enough, none where no place has all at once; None if one has."""
    has = [{name for name, amount in wanted.items() if place.get(name, _ZERO) >= amount} for place in places]
    return None if set(wanted) in has else [name for name in wanted if not any(name in each for each in has)]


def _over_quota(pods: Sequence[Pods], quota: Any, where: str) -> Iterator[str]:
    """Compare what pods ask for together with a ResourceQuota."""
    for name, hard in _parsed(quota.spec.hard).items():
        part = "limits" if name.startswith("limits.") else "requests"
        resource = name.removeprefix(f"{part}.").removeprefix("count/")
        amount = sum((each.total(part).get(resource, _ZERO) for each in pods), _ZERO)
        if amount > hard:
            names = " and ".join(each.name for each in pods if resource in each.total(part))
            asked = f"{names} pods {'may use' if part == 'limits' else 'ask for'} {_text(resource, amount)}"
            yield f"{_key(pods[0], resource)}{asked}; {where} has {_text(resource, hard)}"


def _outside_range(pods: Pods, item: Any, where: str) -> Iterator[str]:
    """Compare the container of pods with one item of a LimitRange."""
    least, most, ratios = map(_parsed, (item.min, item.max, item.max_limit_request_ratio))
    for resource, limit in pods.limits.items():
        request, key = pods.requests[resource], _key(pods, resource)
        if resource in most and limit > most[resource]:
            allowed = _text(resource, most[resource])
            yield f"{key}the limit of {pods.name} pods is {_text(resource, limit)}; {where} allows {allowed}"
        if resource in least and request < least[resource]:
            demanded = _text(resource, least[resource])
            yield f"{key}{pods.name} pods ask for {_text(resource, request)}; {where} demands {demanded}"
        if resource in ratios and limit > ratios[resource] * request:
            allowed = f"{ratios[resource].normalize():f} times the request"
            yield (
                f"{key}{pods.name} pods ask for {_text(resource, request)}, and their limit is "
                f"{_text(resource, limit)}; {where} allows {allowed}"
            )


def _key(pods: Pods, resource: str) -> str:
    """Return how a line about a resource of pods begins: with the key to change, if any key changes it."""
    return f"{pods.keys[resource]}: " if resource in pods.keys else ""


def _parsed(amounts: Mapping[str, Any] | None) -> dict[str, Decimal]:
    return {name: parse_quantity(amount) for name, amount in (amounts or {}).items()}


def _texts(amounts: Amounts) -> str:
    return ", ".join(_text(resource, amount) for resource, amount in amounts.items())


def _text(resource: str, amount: Decimal) -> str:
    value = (amount / _GIB if resource == "memory" else amount).quantize(Decimal("0.1")).normalize()
    unit = _UNITS.get(resource, resource)
    return f"{value:f} {unit.removesuffix('s') if value == 1 else unit}"
