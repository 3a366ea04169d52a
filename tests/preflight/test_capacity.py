"""Preflight names what no node can hold and no quota admits, with amounts and key; what is busy is no problem."""

import copy
from typing import Any

import pytest

from components.preflight.form import Form
from components.preflight.preflight import preflight
from components.shared.errors import PipelineError
from tests.fake_cluster import ApiServer, kinds
from tests.fake_cluster.schemas import problems
from tests.preflight.conftest import DEPLOYMENT, ready, with_overrides

Json = dict[str, Any]
_GPU, _TYPE = "nvidia.com/gpu", "nvidia.com/gpu.product"
_SMALL = {"cpu": "3920m", "memory": "15Gi"}
_TAINT = {"key": "team", "value": "search", "effect": "NoSchedule"}


def _object(kind: kinds.Kind, name: str, spec: Json, **metadata: Any) -> Json:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }


def node(name: str, allocatable: Json, *taints: Json, **labels: str) -> Json:
    """A node as the cluster has it; with GPUs it has their type as a label."""
    gpu = {_TYPE: "NVIDIA-H200"} if _GPU in allocatable else {}
    document = _object(kinds.NODES, name, {"taints": list(taints)}, labels={"pool": "a", **gpu, **labels})
    return {**document, "status": {"allocatable": {"pods": "110", **allocatable}}}


def quota(hard: Json, *scopes: str) -> Json:
    """A ResourceQuota."""
    return _object(kinds.QUOTAS, "team-quota", {"hard": hard, **({"scopes": list(scopes)} if scopes else {})})


def limits(**item: Any) -> Json:
    """A LimitRange with one item."""
    return _object(kinds.LIMIT_RANGES, "team-limits", {"limits": [{"type": "Container", **item}]})


_H200 = {"cpu": "200", "memory": "2Ti", _GPU: "8"}
_BIG = [node("gpu-0", _H200, {"key": _GPU, "value": "present", "effect": "NoSchedule"}), node("cpu-0", _SMALL)]


def _lines(form: Form, **cluster: Any) -> list[str]:
    with pytest.raises(PipelineError) as raised:
        preflight(with_overrides(form, cluster=cluster), DEPLOYMENT, deadline_s=20.0)
    first, *lines = str(raised.value).splitlines()
    return lines or [first]


def test_the_first_run_fits_a_small_node(server: ApiServer, form: Form) -> None:
    """Without GPUs, 4 CPUs and 16 GiB are enough, of which Kubeflow itself has 2 and 6; the page says what is asked."""
    server.cluster.add(node("laptop", {"cpu": "2", "memory": "10Gi"}))
    made = ready(form | {"cluster_gpus_per_node": 0})
    assert made.outputs["evaluate_memory"] == "3Gi"
    assert made.outputs["evaluate_gpus"] == "0"
    for asked in ("1 with 1 CPU, 6 GiB of memory", "1 with 1 CPU, 3 GiB of memory"):
        assert asked in made.page


@pytest.mark.parametrize(
    ("values", "cluster", "lines"),
    [
        (
            {"cluster_gpus_per_node": 16},
            {},
            ["cluster_gpus_per_node: each training pod asks for 16 GPUs; the largest node, gpu-0, has 8 GPUs; set "],
        ),
        (
            {"cluster_gpus_per_node": 8, "cluster_nodes": 2},
            {},
            ["cluster_nodes: 2 training pods run together, each with 24 CPUs, 51 GiB of memory, 8 GPUs; the "],
        ),
        (
            {},
            {"memory_per_node_gib": 4000, "evaluate_memory_gib": 3000},
            [
                "overrides.cluster.memory_per_node_gib: each training pod asks for 4002 GiB of memory; the largest",
                "overrides.cluster.evaluate_memory_gib: each evaluation pod asks for 3000 GiB of memory; the large",
            ],
        ),
        (
            {"cluster_gpu_type": "NVIDIA-H100"},
            {},
            [
                f"cluster_gpu_type: {name} pods need a node with {_TYPE}=NVIDIA-H100, and there is none; nodes have "
                f"for {_TYPE}: NVIDIA-H200"
                for name in ("training", "evaluation")
            ],
        ),
        (
            {"cluster_gpus_per_node": 0},
            {"node_selector": {"pool": "b"}},
            [
                f"overrides.cluster.node_selector: {name} pods need a node with pool=b, and there is none; nodes have "
                "for pool: a"
                for name in ("training", "evaluation")
            ],
        ),
    ],
    ids=["gpus", "nodes", "memory", "gpu type", "selector"],
)
def test_what_no_node_holds_is_named(
    server: ApiServer, form: Form, values: Form, cluster: Json, lines: list[str]
) -> None:
    """The largest node that pods may run on, how many of them there is room for, labels that no node has."""
    server.cluster.add(*copy.deepcopy(_BIG))
    form |= values
    reported = _lines(form, **cluster)
    assert len(reported) == len(lines)
    for line, beginning in zip(reported, lines, strict=True):
        assert line.startswith(beginning)
    if "gpu_type" not in lines[0] and "selector" not in lines[0]:
        assert all(line.endswith("set cluster.autoscaling if such nodes are added when needed") for line in reported)
    ready(form, cluster={**cluster, "autoscaling": True})


def test_two_nodes_that_each_lack_something_are_not_one(server: ApiServer, form: Form) -> None:
    """Each amount exists somewhere; no node has all of them."""
    server.cluster.add(node("wide", {"cpu": "64", "memory": "4Gi"}), node("high", {"cpu": "500m", "memory": "64Gi"}))
    (line, _) = _lines(form | {"cluster_gpus_per_node": 0}, evaluate_memory_gib=5)
    assert line.startswith(
        "overrides.cluster.memory_per_node_gib: each training pod asks for 1 CPU, 6 GiB of memory; no node has all"
    )


def test_taints_keep_pods_away_unless_tolerated_or_temporary(server: ApiServer, form: Form) -> None:
    """A toleration is needed for good taints; a node that is cordoned or not ready comes back."""
    cordoned = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    preferred = {**_TAINT, "effect": "PreferNoSchedule"}
    form |= {"cluster_gpus_per_node": 0}
    server.cluster.add(node("a", _SMALL, _TAINT), node("b", _SMALL, _TAINT, cordoned))
    assert _lines(form) == [
        f"overrides.cluster.tolerations: {name} pods tolerate none of the 2 nodes that they could run on, which have "
        "the taints team=search:NoSchedule"
        for name in ("training", "evaluation")
    ]
    for toleration in ({"operator": "Exists"}, {"key": "team", "value": "search"}):
        ready(form, cluster={"tolerations": [toleration]})
    for toleration in ({"key": "team", "value": "ads"}, {"key": "team", "operator": "Exists", "effect": "NoExecute"}):
        assert len(_lines(form, tolerations=[toleration])) == 2
    server.cluster.add(node("c", _SMALL, cordoned, preferred))
    ready(form)


@pytest.mark.parametrize(
    ("document", "line"),
    [
        (quota({"requests.nvidia.com/gpu": "4"}), "cluster_gpus_per_node: training pods ask for 16 GPUs; the Resource"),
        (
            quota({"memory": "100Gi"}),
            "overrides.cluster.memory_per_node_gib: training and launcher pods ask for 103.9 GiB of",
        ),
        (
            quota({"limits.cpu": "40"}),
            "overrides.cluster.cpu_per_node: training and launcher pods may use 50 CPUs; the",
        ),
        (
            quota({"count/pods": "1"}),
            "cluster_nodes: training and launcher pods ask for 3 pods; the ResourceQuota team-",
        ),
        (
            limits(max={"cpu": "16"}),
            "overrides.cluster.cpu_per_node: the limit of training pods is 24 CPUs; the LimitRange team-limits of "
            "namespace team allows 16 CPUs",
        ),
        (
            limits(min={"memory": "4Gi"}),
            "launcher pods ask for 1.9 GiB of memory; the LimitRange team-limits of namespace team demands 4 GiB",
        ),
        (
            limits(maxLimitRequestRatio={"memory": "1.5"}),
            "launcher pods ask for 1.9 GiB of memory, and their limit is 3.7 GiB of memory; the LimitRange team-limits "
            "of namespace team allows 1.5 times the request",
        ),
    ],
)
def test_what_a_namespace_never_admits_is_named(server: ApiServer, form: Form, document: Json, line: str) -> None:
    """All pods of a job count together against a quota, each by itself against a range."""
    server.cluster.add(copy.deepcopy(document))
    (reported,) = _lines(form | {"cluster_gpus_per_node": 8, "cluster_nodes": 2})
    assert reported.startswith(line)


@pytest.mark.parametrize(
    "document",
    [
        quota({"requests.nvidia.com/gpu": "16", "persistentvolumeclaims": "0", "requests.storage": "1Gi"}),
        {**quota({"memory": "1Ti"}), "status": {"hard": {"memory": "1Ti"}, "used": {"memory": "1Ti"}}},
        quota({"pods": "0"}, "BestEffort"),
        limits(max={"cpu": "24", "memory": "1Ti"}, min={"cpu": "500m"}),
        {**limits(), "spec": {"limits": [{"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}}]}},
    ],
)
def test_what_is_in_use_or_for_other_objects_is_no_problem(server: ApiServer, form: Form, document: Json) -> None:
    """Quotas that are full now, or for pods and objects of another kind."""
    server.cluster.add(copy.deepcopy(document))
    ready(form | {"cluster_gpus_per_node": 8, "cluster_nodes": 2})


def test_servers_are_compared_as_their_runtime_has_them(server: ApiServer, form: Form) -> None:
    """Their number and size are set there; with training pods they share the quota of the namespace."""
    server.cluster.add_runtime("grpo-torch-vllm", jobs=("rollout", "node"))
    runtime = server.cluster.store.get(kinds.TRAINING_RUNTIMES, "team", "grpo-torch-vllm")
    assert runtime
    rollout = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    rollout["replicas"] = 3
    amounts = {"cpu": "4", "memory": "48Gi", _GPU: "2"}
    rollout["template"]["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": amounts}
    with server.cluster.store.clock.changed:
        server.cluster.store.replace(runtime)
    server.cluster.add(
        quota({"requests.nvidia.com/gpu": "6"}), node("gpu-0", {"cpu": "9", "memory": "90Gi", _GPU: "7"})
    )
    room, total = sorted(_lines(form, rollout_servers=3))[::-1]
    assert total.startswith("cluster_gpus_per_node: training and grpo-torch-vllm server pods ask for 7 GPUs; the Resou")
    assert room.startswith("overrides.cluster.rollout_servers: 3 grpo-torch-vllm server pods run together, eac")


def test_without_the_right_to_look_runs_start_all_the_same(
    server: ApiServer, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes belong to no namespace, so a role of steps may not permit reading them; a line says so."""
    every = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    server.cluster.add(node("tiny", {"cpu": "1", "memory": "1Gi"}))
    server.access.rules = [every]
    form |= {"cluster_gpus_per_node": 0}
    ready(form)
    assert "preflight: no permission to read nodes; going on without\n" in capsys.readouterr().out
    server.access.cluster_rules = [every]
    assert len(_lines(form)) == 2


def test_objects_of_these_tests_are_valid() -> None:
    """By Kubernetes' own schemas."""
    for document in (*_BIG, node("a", _SMALL, _TAINT), quota({"pods": "1"}, "BestEffort"), limits(min={"cpu": "1"})):
        assert problems(document) == []
