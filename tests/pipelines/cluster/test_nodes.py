from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.cluster.stages import Stage, planned
from tests.pipelines.cluster.argo import number

LABELS = {"app.kubernetes.io/managed-by": "grpo-pipeline", "grpo-pipeline/task": "any"}
RETRIED = {"retryPolicy": {"maxRetryCount": 3}}


def task(component: str, title: str = "", *after: str, **more: Any) -> dict[str, Any]:
    """A task of a graph."""
    named = {"taskInfo": {"name": title}} if title else {}
    return {"componentRef": {"name": component}, "dependentTasks": list(after), **named, **more}


ROOT = {
    "clean-up": task("plain", "clean-up", "exit-handler-1", **RETRIED),
    "exit-handler-1": task("group"),
}
GROUP = {
    "evaluate-2": task("labelled", "evaluate sft", "preflight", **RETRIED),
    "preflight": task("labelled", "preflight"),
}
EXECUTORS = {"exec-labelled": {"podMetadata": {"labels": LABELS}}, "exec-plain": {}}
SPEC: dict[str, Any] = {
    "pipeline_spec": {
        "root": {"dag": {"tasks": ROOT}},
        "components": {
            "group": {"dag": {"tasks": GROUP}},
            "labelled": {"executorLabel": "exec-labelled"},
            "plain": {"executorLabel": "exec-plain"},
        },
    },
    "platform_spec": {"platforms": {"kubernetes": {"deploymentSpec": {"executors": EXECUTORS}}}},
}


def stages_of(*paths: str, **drivers: str) -> dict[str, Stage]:
    """The stages of a run of which these nodes exist."""
    children = [SimpleNamespace(pod_name=f"wf-{number(path)}") for path in paths]
    details = [SimpleNamespace(display_name="root", child_tasks=children)]
    details += [
        SimpleNamespace(display_name=f"{name}-driver", child_tasks=[], state=state, start_time=None, end_time=None)
        for name, state in drivers.items()
    ]
    run = SimpleNamespace(pipeline_spec=SPEC, run_details=SimpleNamespace(task_details=details))
    return {stage.name: stage for stage in planned(run)}


@pytest.mark.parametrize("numbered", [True, False])
def test_pods_follow_from_the_nodes_that_exist(numbered: bool) -> None:
    """Whether every node is wrapped in retries, as since Kubeflow Pipelines 2.17, or only a task that has them."""
    once = "(0)" if numbered else ""
    group, hook = f"wf{once}.root{once}.exit-handler-1{once}", f"wf{once}.root{once}.exit-handler-1.onExit{once}"
    first, second = (f"{group}.evaluate-2{once}.executor({attempt})" for attempt in range(2))
    preflight, clean_up = f"{group}.preflight{once}.executor{once}", f"{hook}.clean-up{once}.executor(0)"
    driver = f"{group}.preflight-driver{once}"
    parents = [f"wf{once}", f"wf{once}.root{once}", group, hook, f"{group}.preflight{once}", f"{hook}.clean-up{once}"]
    paths = (*parents, f"{group}.evaluate-2{once}", first, second, preflight, clean_up, driver)
    stage = stages_of(*paths)
    retried = "wf-metadata-0-2-retry-system-container-impl-"
    assert stage["evaluate_2"].pods == (f"{retried}{number(first)}", f"{retried}{number(second)}")
    assert stage["preflight"].pods == (f"wf-metadata-0-2-system-container-impl-{number(preflight)}",)
    assert stage["clean_up"].pods == (f"wf-retry-system-container-impl-{number(clean_up)}",)
    unprepared = stages_of(*paths, preflight="FAILED")["preflight"]
    assert unprepared.pods == (f"wf-system-container-driver-{number(driver)}",)


def test_tasks_come_after_those_that_they_depend_on() -> None:
    """Whatever their names; without any node none has a pod."""
    stage = stages_of()
    assert list(stage) == ["preflight", "evaluate_2", "clean_up"]
    assert [each.title for each in stage.values()] == ["preflight", "evaluate sft", "clean_up"]
    assert not any(each.pods or each.state for each in stage.values())
