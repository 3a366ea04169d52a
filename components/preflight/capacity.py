"""Requests of the pods that run a model against the largest node of the cluster that they may run on.

What is in use now, quotas, taints and how many pods fit together are left to the scheduler and to Kueue, which say so.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kubernetes import client
from kubernetes.utils.quantity import parse_quantity

from components.cluster.config import GPU_RESOURCE, GPU_TYPE_LABEL, ClusterConfig
from components.preflight.cluster import read

_GIB = 2**30
_UNITS = {"cpu": "CPUs", "memory": "GiB of memory", GPU_RESOURCE: "GPUs"}
_KEYS = {"cpu": "cpu_per_node", "memory": "memory_per_node_gib", GPU_RESOURCE: "gpus_per_node"}
EVALUATION_CPU = ("1", "4")
"""Cores that the task which evaluates requests, and its limit."""


def described(config: ClusterConfig, evaluation_gpus: int) -> dict[str, str]:
    """Return what the pods that run a model ask for, for people."""
    numbers = {"training": config.nodes, "evaluation": 1}
    return {
        f"{name} pods": f"{numbers[name]} with {', '.join(_text(*each) for each in requests.items())}"
        for name, requests in _requests(config, evaluation_gpus).items()
    }


def too_large_for_nodes(api: client.ApiClient, config: ClusterConfig, evaluation_gpus: int) -> Iterator[str]:
    """Yield a line for each amount that no node has, with the key to change, or one for labels that no node has."""
    listed = read("nodes", client.CoreV1Api(api).list_node)
    if not listed or not listed.items or config.autoscaling:
        return
    nodes = [node for node in listed.items if config.labels.items() <= (node.metadata.labels or {}).items()]
    if not nodes:
        yield _without_node(config, listed.items)
        return
    for name, requests in _requests(config, evaluation_gpus).items():
        for resource, amount in requests.items():
            has = {node.metadata.name: parse_quantity(node.status.allocatable.get(resource, 0)) for node in nodes}
            largest = max(has, key=lambda node: has[node])
            if has[largest] < amount:
                key = "evaluate_memory_gib" if (name, resource) == ("evaluation", "memory") else _KEYS[resource]
                yield (
                    f"cluster.{key}: each {name} pod asks for {_text(resource, amount)}; the largest node, {largest}, "
                    f"has {_text(resource, has[largest])}; set cluster.autoscaling if such nodes are added when needed"
                )


def _requests(config: ClusterConfig, evaluation_gpus: int) -> dict[str, dict[str, Decimal]]:
    """Return what each pod that trains or evaluates asks for: cores, bytes and devices, by the name of the resource."""
    training = config.training_pod
    asked: dict[str, tuple[int | str, int, int]] = {
        "training": (training.cpu, training.memory_gib, training.gpus),
        "evaluation": (EVALUATION_CPU[0], config.evaluation_gib, evaluation_gpus),
    }
    return {
        name: {"cpu": Decimal(cpu), "memory": Decimal(gib * _GIB), **({GPU_RESOURCE: Decimal(gpus)} if gpus else {})}
        for name, (cpu, gib, gpus) in asked.items()
    }


def _without_node(config: ClusterConfig, nodes: list[Any]) -> str:
    labels = [node.metadata.labels or {} for node in nodes]
    missing = [name for name, value in config.labels.items() if value not in {each.get(name) for each in labels}]
    name = (missing or [*config.labels])[0]
    key = "gpu_type" if name == GPU_TYPE_LABEL and config.gpu_type else "node_selector"
    values = ", ".join(sorted({each[name] for each in labels if name in each})) or "none"
    wanted = ", ".join(f"{name}={value}" for name, value in config.labels.items())
    return f"cluster.{key}: no node has {wanted}; values of {name} on the nodes: {values}"


def _text(resource: str, amount: Decimal) -> str:
    value = (amount / _GIB if resource == "memory" else amount).quantize(Decimal("0.1")).normalize()
    unit = _UNITS[resource]
    return f"{value:f} {unit.removesuffix('s') if value == 1 else unit}"
