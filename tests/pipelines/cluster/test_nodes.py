from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.cluster.stages import Leaf, leaves

LABELS = {"app.kubernetes.io/managed-by": "grpo-pipeline", "grpo-pipeline/task": "any"}
RETRIED = {"retryPolicy": {"maxRetryCount": 3}}
SPEC: dict[str, Any] = {
    "pipeline_spec": {
        "root": {
            "dag": {
                "tasks": {
                    "clean-up": {
                        "componentRef": {"name": "plain"},
                        "dependentTasks": ["exit-handler-1"],
                        "taskInfo": {"name": "clean-up"},
                        **RETRIED,
                    },
                    "exit-handler-1": {"componentRef": {"name": "group"}},
                }
            }
        },
        "components": {
            "group": {
                "dag": {
                    "tasks": {
                        "evaluate-2": {
                            "componentRef": {"name": "labelled"},
                            "dependentTasks": ["preflight"],
                            "taskInfo": {"name": "evaluate sft"},
                            **RETRIED,
                        },
                        "preflight": {"componentRef": {"name": "labelled"}, "taskInfo": {"name": "preflight"}},
                    }
                }
            },
            "labelled": {"executorLabel": "exec-labelled"},
            "plain": {"executorLabel": "exec-plain"},
        },
    },
    "platform_spec": {
        "platforms": {
            "kubernetes": {
                "deploymentSpec": {
                    "executors": {"exec-labelled": {"podMetadata": {"labels": LABELS}}, "exec-plain": {}},
                }
            }
        }
    },
}


def number(path: str) -> int:
    """The hash by which Argo names a node, as in Go's hash/fnv."""
    hashed = 2166136261
    for byte in path.encode():
        hashed = (hashed ^ byte) * 16777619 % 2**32
    return hashed


def found(*paths: str) -> dict[str, Leaf]:
    """The tasks of a run of which these nodes exist."""
    children = [SimpleNamespace(pod_name=f"wf-{number(path)}") for path in paths]
    return {leaf.name: leaf for leaf in leaves(SPEC, [SimpleNamespace(child_tasks=children)])}


def test_a_node_has_the_number_that_a_real_cluster_gave_it() -> None:
    """Recorded of Argo 4.0.8."""
    path = "grpo-post-training-on-cluster-k9sp2(0).root(0).exit-handler-1(0).train-grpo(0).executor(1)"
    assert number(path) == 2640444821


@pytest.mark.parametrize("numbered", [True, False])
def test_pods_follow_from_the_nodes_that_exist(numbered: bool) -> None:
    """Whether every node is wrapped in retries, as since Kubeflow Pipelines 2.17, or only a task that has them."""
    once = "(0)" if numbered else ""
    group, hook = f"wf{once}.root{once}.exit-handler-1{once}", f"wf{once}.root{once}.exit-handler-1.onExit{once}"
    first, second = (f"{group}.evaluate-2{once}.executor({attempt})" for attempt in range(2))
    preflight, clean_up = f"{group}.preflight{once}.executor{once}", f"{hook}.clean-up{once}.executor(0)"
    driver = f"{group}.preflight-driver{once}"
    parents = [f"wf{once}", f"wf{once}.root{once}", group, hook, f"{group}.preflight{once}", f"{hook}.clean-up{once}"]
    leaf = found(*parents, f"{group}.evaluate-2{once}", first, second, preflight, clean_up, driver)
    retried = "wf-metadata-0-2-retry-system-container-impl-"
    assert leaf["evaluate-2"].pods == (f"{retried}{number(first)}", f"{retried}{number(second)}")
    assert leaf["preflight"].pods == (f"wf-metadata-0-2-system-container-impl-{number(preflight)}",)
    assert leaf["preflight"].driver_pods == (f"wf-system-container-driver-{number(driver)}",)
    assert leaf["clean-up"].pods == (f"wf-retry-system-container-impl-{number(clean_up)}",)


def test_tasks_come_after_those_that_they_depend_on() -> None:
    """Whatever their names; without any node none has a pod."""
    leaf = found()
    assert list(leaf) == ["preflight", "evaluate-2", "clean-up"]
    assert [each.title for each in leaf.values()] == ["preflight", "evaluate sft", "clean_up"]
    assert not any(each.pods or each.driver_pods or each.has_no_attempt for each in leaf.values())


def test_a_container_that_was_passed_over_has_no_pod() -> None:
    """Its node is there, without an attempt: the cache had its outputs."""
    group = "wf(0).root(0).exit-handler-1(0)"
    task = f"{group}.evaluate-2(0)"
    leaf = found("wf(0)", "wf(0).root(0)", group, task, f"{task}.executor")["evaluate-2"]
    assert (leaf.pods, leaf.has_no_attempt) == ((), True)
