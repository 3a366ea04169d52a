"""The graph as it compiles now, for tests to look at; tests/pipelines/test_graph.py compares it with the file."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.preflight.config import Params, load_params
from pipelines.graph import write
from tests.presets import ROOT

COMMITTED = ROOT / "pipelines/grpo_post_training.yaml"


class Graph(NamedTuple):
    """The compiled graph."""

    text: str
    spec: dict[str, Any]
    """The first document: Kubeflow's intermediate representation."""
    kubernetes: dict[str, Any]
    """Of the second document: the settings of each executor."""

    @property
    def containers(self) -> dict[str, Any]:
        """Image, command and resources of each task."""
        executors = self.spec["deploymentSpec"]["executors"]
        return {name.removeprefix("exec-"): executor["container"] for name, executor in executors.items()}

    @property
    def tasks(self) -> dict[str, Any]:
        """Every task, by its name."""
        return dict(self.spec["root"]["dag"]["tasks"])

    def settings(self, task: str) -> dict[str, Any]:
        """What Kubernetes is told of a task."""
        return dict(self.kubernetes[f"exec-{task}"])


def compile_graph(params: Params) -> Graph:
    """Compile the graph."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.yaml"
        write(path, params)
        text = path.read_text()
    spec, platforms = yaml.load_all(text, yaml.CSafeLoader)
    return Graph(text, spec, platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"])


@cache
def graph() -> Graph:
    """The graph with the params of params.yaml, as it is committed."""
    return compile_graph(load_params(ROOT / "params.yaml"))
