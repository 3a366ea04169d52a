"""The manifests and the code mean the same things by the same names."""

from importlib.util import find_spec

import pytest

from components.cluster import kube
from components.cluster.config import ClusterConfig
from components.preflight.config import MOUNT, DeploymentConfig
from components.shared import images
from tests.k8s.rendered import OVERLAYS, Json, one, overlay, pod_templates

PODS = ("grpo-pipeline-reaper", "grpo-torch/node", "grpo-torch-vllm/rollout", "grpo-torch-vllm/node")
each_pod = pytest.mark.parametrize("where", PODS)


def templates() -> dict[str, Json]:
    """Every pod template, by where it stands."""
    return dict(each for document in overlay("standalone") for each in pod_templates(document))


def test_every_pod_is_looked_at() -> None:
    """A new one is too."""
    assert sorted(templates()) == sorted(PODS)


def test_the_volume_is_the_one_that_runs_ask_for() -> None:
    """Its claim in the form, in a job's config and in the runtimes; and where it is mounted."""
    claim = one(overlay("standalone"), "PersistentVolumeClaim", "grpo-pipeline")["metadata"]["name"]
    assert claim == ClusterConfig(image="any").volume == DeploymentConfig().volume
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for template in templates().values()
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {claim}
    assert ClusterConfig(image="any").mount == MOUNT == "/work"


@each_pod
def test_images_are_those_of_the_code(where: str) -> None:
    """The names that `images:` of a kustomization replaces are those that the pipeline is compiled with."""
    (container,) = templates()[where]["spec"]["containers"]
    expected = images.LIGHT if where == "grpo-pipeline-reaper" else images.GPU
    assert _name(container["image"]) == _name(expected)


@each_pod
def test_pods_pull_images_with_the_secret_of_the_deployment(where: str) -> None:
    """It need not exist, where the registry asks for none."""
    assert templates()[where]["spec"]["imagePullSecrets"] == [{"name": DeploymentConfig().image_pull_secret}]


def test_what_containers_start_is_there() -> None:
    """A module that was renamed would be found missing by the first cluster otherwise."""
    commands = [
        container.get("command") for template in templates().values() for container in template["spec"]["containers"]
    ]
    started = [command for command in commands if command]
    assert started
    for python, flag, module in started:
        assert (python, flag) == ("python", "-m")
        assert find_spec(module), module


def test_pods_carry_the_label_by_which_what_is_ours_is_found() -> None:
    """As everything that a run makes."""
    for where, template in templates().items():
        assert template["metadata"]["labels"][kube.MANAGED_BY] == kube.PROJECT, where


@pytest.mark.parametrize("overlay_name", [name for name in OVERLAYS if name.endswith("kueue")])
def test_the_queue_leads_to_the_queue_of_the_cluster(overlay_name: str) -> None:
    """By the name under which k8s/cluster makes it."""
    from tests.k8s.rendered import K8S, render

    local: Json = one(overlay(overlay_name), "LocalQueue", "grpo-pipeline")
    assert one(render(K8S / "cluster"), "ClusterQueue", local["spec"]["clusterQueue"])


def _name(image: str) -> str:
    return image.rpartition(":")[0].split("/", 1)[-1] if image.count("/") > 1 else image.rpartition(":")[0]
