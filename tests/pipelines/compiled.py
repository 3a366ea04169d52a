"""The committed graphs as the tests look at them; tests/pipelines/test_graph.py sees that they are the code's."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "pipelines"
LAPTOP, FULL, MINIMAL = "grpo_post_training", "grpo_post_training_on_cluster", "grpo_post_training_minimal"
VARIANTS = (LAPTOP, FULL, MINIMAL)
CLUSTER_FORMS = (FULL, MINIMAL)


@dataclass(frozen=True)
class Graph:
    """One compiled graph."""

    spec: dict[str, Any]
    """The first document: Kubeflow's intermediate representation."""
    kubernetes: dict[str, Any]
    """Of the second document: the settings of each executor; empty where there is none."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The run form."""
        found: dict[str, Any] = self.spec["root"]["inputDefinitions"]["parameters"]
        return found

    @property
    def containers(self) -> dict[str, Any]:
        """Image, command and resources of each executor."""
        executors = self.spec["deploymentSpec"]["executors"]
        return {name: executor["container"] for name, executor in executors.items()}

    @property
    def tasks(self) -> dict[str, Any]:
        """Every task that runs something, wherever it is in the graph."""
        dags = [self.spec["root"]["dag"], *(each["dag"] for each in self.spec["components"].values() if "dag" in each)]
        tasks = {name: task for dag in dags for name, task in dag["tasks"].items()}
        return {name: task for name, task in tasks.items() if not name.startswith("exit-handler")}

    def settings(self, task: str) -> dict[str, Any]:
        """What Kubernetes is told of a task."""
        found: dict[str, Any] = self.kubernetes[f"exec-{task}"]
        return found


@cache
def graph(variant: str) -> Graph:
    """The committed graph of a variant."""
    spec, *platforms = yaml.safe_load_all((FOLDER / f"{variant}.yaml").read_text())
    executors = platforms[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platforms else {}
    return Graph(spec, executors)
