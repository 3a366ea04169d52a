import copy
from typing import Any

import pytest

from components.preflight.form import Form
from tests.fake_cluster import ApiServer
from tests.preflight.conftest import node, ready, refused, with_overrides

Json = dict[str, Any]
_TYPE = "nvidia.com/gpu.product"
_BIG = [
    node("gpu-0", {"cpu": "200", "memory": "2Ti", "nvidia.com/gpu": "8"}),
    node("cpu-0", {"cpu": "3920m", "memory": "15Gi"}),
]


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
            [f"cluster_gpu_type: no node has {_TYPE}=NVIDIA-H100; values of {_TYPE} on the nodes: NVIDIA-H200"],
        ),
        (
            {"cluster_gpus_per_node": 0},
            {"node_selector": {"pool": "b"}},
            ["overrides.cluster.node_selector: no node has pool=b; values of pool on the nodes: "],
        ),
    ],
)
def test_what_no_node_holds_is_named(
    server: ApiServer, form: Form, values: Form, cluster: Json, lines: list[str]
) -> None:
    """The largest node that pods may run on, and labels that no node has."""
    server.cluster.add(*copy.deepcopy(_BIG))
    form |= values
    reported = refused(with_overrides(form, cluster=cluster))
    assert len(reported) == len(lines)
    for line, beginning in zip(reported, lines, strict=True):
        assert line.startswith(beginning)
    ready(form, cluster={**cluster, "autoscaling": True})


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
    assert len(refused(form)) == 2
