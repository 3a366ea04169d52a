"""The graph as Kubeflow gets it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "pipelines/grpo_post_training.yaml"
HEAVY = {"exec-train-sft", "exec-train-grpo", "exec-evaluate", "exec-evaluate-2", "exec-evaluate-3"}
LIGHT = {"exec-prepare-data", "exec-validate-data", "exec-report", "exec-register"}


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    """The compiled graph that is committed."""
    spec: dict[str, Any] = yaml.safe_load(GOLDEN.read_text())
    return spec


def test_the_committed_graph_is_what_the_code_compiles_to(tmp_path: Path) -> None:
    """The file that people upload is not older than the code and params.yaml: `make compile` after a change."""
    assert _compile(tmp_path / "new.yaml") == GOLDEN.read_bytes()


def test_the_image_tag_comes_from_the_environment(tmp_path: Path) -> None:
    """A build compiles the graph for its own images, whose tag is the commit."""
    text = _compile(tmp_path / "tagged.yaml", IMAGE_TAG="0c0ffee").decode()
    executors = yaml.safe_load(text)["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"].partition(":")[2] for executor in executors} == {"0c0ffee"}


def test_every_task_says_what_it_needs(graph: dict[str, Any]) -> None:
    """Clusters with quotas refuse pods without cpu and memory; only tasks that run the model hold a GPU."""
    executors = {name: executor["container"] for name, executor in graph["deploymentSpec"]["executors"].items()}
    assert set(executors) == HEAVY | LIGHT
    for name, container in executors.items():
        needs = container["resources"]
        assert {"cpuRequest", "cpuLimit", "memoryRequest", "memoryLimit"} <= set(needs), name
        assert ("accelerator" in needs) == (name in HEAVY), name
        assert ("gpu" in container["image"]) == (name in HEAVY), name


def test_nothing_is_installed_when_a_task_starts(graph: dict[str, Any]) -> None:
    """What a task needs is in its image: clusters without internet run it, and twice the same."""
    for executor in graph["deploymentSpec"]["executors"].values():
        assert "pip install" not in " ".join(executor["container"]["command"])


def test_only_the_data_stages_may_be_served_from_the_cache(graph: dict[str, Any]) -> None:
    """A run that says it trained, measured or registered has done so."""
    cached = {
        name for name, task in graph["root"]["dag"]["tasks"].items() if task["cachingOptions"].get("enableCache", False)
    }
    assert cached == {"prepare-data", "validate-data"}


def _compile(path: Path, **environment: str) -> bytes:
    inherited = {name: value for name, value in os.environ.items() if name != "IMAGE_TAG"}
    code = f"from pipelines.cli import main; main(['compile', '--output', {str(path)!r}])"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**inherited, **environment})
    return path.read_bytes()
