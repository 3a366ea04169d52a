"""The manifests and the code mean the same things by the same names."""

from importlib.util import find_spec

import pytest

from components.cluster import kube
from components.cluster.config import ClusterConfig
from components.preflight.config import MOUNT, DeploymentConfig
from components.shared import images
from tests.k8s.rendered import K8S, OVERLAYS, Json, base, one, overlay, pod_templates, render

PODS = pod_templates(base())


def test_volume_is_the_one_that_runs_ask_for() -> None:
    """Its claim in the form, in a job's config and in the runtimes, and where it is mounted."""
    claim = one(base(), "PersistentVolumeClaim", "grpo-pipeline")["metadata"]["name"]
    assert claim == ClusterConfig(image="any").volume == DeploymentConfig().volume
    volumes = [volume for pod in PODS.values() for volume in pod["spec"]["volumes"]]
    claims = [volume["persistentVolumeClaim"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert {each["claimName"] for each in claims} == {claim}
    assert ClusterConfig(image="any").mount == MOUNT == "/work"


@pytest.mark.parametrize("where", PODS)
def test_pod_has_image_command_secret_and_label_of_the_code(where: str) -> None:
    """A kustomization replaces the images that the pipeline is compiled with; modules exist."""
    pod = PODS[where]
    (container,) = pod["spec"]["containers"]
    image = images.LIGHT if where == "grpo-pipeline-reaper" else images.GPU
    assert image.rpartition(":")[0].endswith(container["image"].rpartition(":")[0])
    if "command" in container:
        python, flag, module = container["command"]
        assert (python, flag) == ("python", "-m")
        assert find_spec(module), module
    assert pod["spec"]["imagePullSecrets"] == [{"name": DeploymentConfig().image_pull_secret}]
    assert pod["metadata"]["labels"][kube.MANAGED_BY] == kube.PROJECT


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.endswith("kueue")])
def test_local_queue_refers_to_the_queue_of_the_cluster(name: str) -> None:
    """By the name under which k8s/cluster creates it."""
    local: Json = one(overlay(name), "LocalQueue", "grpo-pipeline")
    assert one(render(K8S / "cluster"), "ClusterQueue", local["spec"]["clusterQueue"])
