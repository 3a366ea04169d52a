"""The graphs as Kubeflow gets them: what is committed is what the code makes, and what holds for every variant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.shared import images
from tests.pipelines.compiled import CLUSTER_FORMS, FOLDER, LAPTOP, VARIANTS, graph

ROOT = Path(__file__).parents[2]
MODEL = {"exec-evaluate", "exec-evaluate-2", "exec-evaluate-3"}
TRAINING = {"exec-train-sft", "exec-train-grpo"}


@pytest.mark.slow
def test_the_committed_graphs_are_what_the_code_compiles_to(tmp_path: Path) -> None:
    """The files that people upload are not older than the code and params.yaml: `make compile` after a change."""
    _compile(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(VARIANTS)
    for name in VARIANTS:
        assert (tmp_path / f"{name}.yaml").read_bytes() == (FOLDER / f"{name}.yaml").read_bytes(), name


@pytest.mark.slow
def test_registry_and_tag_of_the_images_come_from_the_environment(tmp_path: Path) -> None:
    """A build compiles the graphs for its own images, whose tag is the commit."""
    _compile(tmp_path, IMAGE_TAG="0c0ffee", IMAGE_REGISTRY="registry.example:5000/ml")
    for name in VARIANTS:
        for document in yaml.safe_load_all((tmp_path / f"{name}.yaml").read_text()):
            for image in _images(yaml.safe_dump(document)):
                assert image.startswith("registry.example:5000/ml/grpo-pipeline/python-"), name
                assert image.endswith(":0c0ffee"), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_task_says_what_it_needs(variant: str) -> None:
    """Clusters with quotas refuse pods without cpu and memory."""
    for name, container in graph(variant).containers.items():
        needs = container["resources"]
        sizes = ("resourceCpuRequest", "resourceCpuLimit", "resourceMemoryRequest", "resourceMemoryLimit")
        assert all(needs[size] for size in sizes), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_tasks_that_run_a_model_hold_a_gpu(variant: str) -> None:
    """On a cluster a task that trains waits for its job, whose pods have the GPUs."""
    with_gpu = {
        name for name, container in graph(variant).containers.items() if "accelerator" in container["resources"]
    }
    assert with_gpu == (MODEL | TRAINING if variant == LAPTOP else MODEL)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_installed_when_a_task_starts(variant: str) -> None:
    """What a task needs is in its image: clusters without internet run it, and twice the same."""
    for name, container in graph(variant).containers.items():
        assert "pip install" not in " ".join(container["command"]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_images_are_those_of_one_table(variant: str) -> None:
    """Two images run everything, each with a tag that names one build; a cluster may be told others."""
    table = {images.LIGHT, images.GPU}
    found = {container["image"] for container in graph(variant).containers.values()}
    parameters = graph(variant).parameters
    if "image_light" in parameters:
        named = {parameters[name]["defaultValue"] for name in ("image_light", "image_gpu")}
        prefix = "{{$.inputs.parameters['pipelinechannel--"
        assert found == {f"{prefix}image_light']}}}}", f"{prefix}image_gpu']}}}}"}
        found = named
    assert found == table
    assert not any(image.endswith(":latest") for image in found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_data_stages_may_be_served_from_the_cache(variant: str) -> None:
    """A run that says it trained, measured or registered has done so."""
    tasks = graph(variant).tasks
    cached = {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache", False)}
    assert cached == {"prepare-data", "validate-data"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_stage_is_skipped(variant: str) -> None:
    """There is no condition in the graph: a gate that is missed is a red stage, not a branch that nobody sees."""
    for name, task in graph(variant).tasks.items():
        assert "triggerPolicy" not in task or name == "clean-up", name


@pytest.mark.slow
def test_kubeflow_reads_both_documents(tmp_path: Path) -> None:
    """The files load as Kubeflow's own client loads them, with Kubernetes' settings; manifests can be made too."""
    code = f"""
from kfp import compiler, components
from kfp.compiler.compiler_utils import KubernetesManifestOptions
for name in {VARIANTS!r}:
    loaded = components.load_component_from_file(f"pipelines/{{name}}.yaml")
    print(name, len(loaded.platform_spec.platforms))
    options = KubernetesManifestOptions(pipeline_name="grpo", namespace="team", include_pipeline_manifest=True)
    compiler.Compiler().compile(
        loaded, f"{tmp_path}/{{name}}.yaml", kubernetes_manifest_format=True, kubernetes_manifest_options=options
    )
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert dict(line.split() for line in done.stdout.splitlines()) == {
        name: "1" if name in CLUSTER_FORMS else "0" for name in VARIANTS
    }
    for name in VARIANTS:
        documents = list(yaml.safe_load_all((tmp_path / f"{name}.yaml").read_text()))
        assert [each["kind"] for each in documents] == ["Pipeline", "PipelineVersion"]
        assert ("platformSpec" in documents[1]["spec"]) == (name in CLUSTER_FORMS)


def _compile(folder: Path, **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("IMAGE_")}
    code = f"from pipelines.cli import main; main(['compile', '--output', {str(folder)!r}])"
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=ROOT, env={**inherited, **environment}, stdout=subprocess.DEVNULL)


def _images(text: str) -> set[str]:
    """Everything in a text that names an image of ours."""
    words = (word.strip("'\"") for word in text.split())
    return {word for word in words if "grpo-pipeline/python-" in word}
