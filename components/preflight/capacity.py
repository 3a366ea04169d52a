"""Compares the requests of training and evaluation pods with the largest node; the scheduler reports all else."""

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
"""Cores that the evaluation task requests, and its limit."""


def pods_in_words(config: ClusterConfig, evaluation_gpus: int) -> dict[str, str]:
    """Return the number and the requests of training and evaluation pods, such as `2 with 3 CPUs, 1 GPU`."""
    num_pods, words = {"training": config.nodes, "evaluation": 1}, {}
    for name, requests in _requests(config, evaluation_gpus).items():
        words[f"{name} pods"] = f"{num_pods[name]} with {', '.join(_text(*each) for each in requests.items())}"
    return words


def too_large_for_nodes(api: client.ApiClient, config: ClusterConfig, evaluation_gpus: int) -> Iterator[str]:
    """Yield a line for each request that is above the largest node, or if no node has the labels."""
    answer = read("nodes", client.CoreV1Api(api).list_node)
    if not answer or not answer.items or config.autoscaling:
        return
    nodes = [node for node in answer.items if config.labels.items() <= (node.metadata.labels or {}).items()]
    if not nodes:
        yield _missing_labels(config, answer.items)
        return
    for name, requests in _requests(config, evaluation_gpus).items():
        for resource, amount in requests.items():
            size = {node.metadata.name: parse_quantity(node.status.allocatable.get(resource, 0)) for node in nodes}
            largest = max(size, key=lambda node: size[node])
            if size[largest] < amount:
                key = "evaluate_memory_gib" if (name, resource) == ("evaluation", "memory") else _KEYS[resource]
                yield (
                    f"cluster.{key}: each {name} pod asks for {_text(resource, amount)}; the largest node, {largest}, "
                    f"has {_text(resource, size[largest])}; set cluster.autoscaling if such nodes are added when needed"
                )


def _requests(config: ClusterConfig, evaluation_gpus: int) -> dict[str, dict[str, Decimal]]:
    """Return the requests of a training and an evaluation pod by resource: cores, bytes of memory, and GPUs if any."""

    def pod(cpu: int, memory_gib: int, gpus: int) -> dict[str, Decimal]:
        amounts = {"cpu": cpu, "memory": memory_gib * _GIB, GPU_RESOURCE: gpus}
        return {resource: Decimal(amount) for resource, amount in amounts.items() if amount}

    training = config.training_pod
    return {
        "training": pod(training.cpu, training.memory_gib, config.gpus_per_node),
        "evaluation": pod(int(EVALUATION_CPU[0]), config.evaluation_gib, evaluation_gpus),
    }


def _missing_labels(config: ClusterConfig, nodes: list[Any]) -> str:
    """Return a line which says that no node has all labels, with the values that nodes have of one of them."""
    labels = [node.metadata.labels or {} for node in nodes]
    missing = [name for name, value in config.labels.items() if value not in {each.get(name) for each in labels}]
    name = (missing or list(config.labels))[0]  # the first one, if each label is on some node but no node has all
    key = "gpu_type" if name == GPU_TYPE_LABEL and config.gpu_type else "node_selector"
    values = ", ".join(sorted({each[name] for each in labels if name in each})) or "none"
    wanted = ", ".join(f"{name}={value}" for name, value in config.labels.items())
    return f"cluster.{key}: no node has {wanted}; values of {name} on the nodes: {values}"


def _text(resource: str, amount: Decimal) -> str:
    """Return an amount with its unit, such as `1 GPU` or `62.5 GiB of memory`."""
    value = (amount / _GIB if resource == "memory" else amount).quantize(Decimal("0.1")).normalize()
    unit = _UNITS[resource]
    return f"{value:f} {unit.removesuffix('s') if value == 1 else unit}"
