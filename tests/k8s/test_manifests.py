import os
import re
import subprocess
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml

from components.cluster import kube
from components.cluster.config import ClusterConfig
from components.cluster.manifest import SERVER_PORT
from components.preflight.config import load_params
from components.shared import images
from components.shared.deployment import MOUNT, DeploymentConfig
from components.shared.errors import PipelineError
from tests.fake_cluster.schemas import problems
from tests.k8s.rendered import K8S, NAMESPACES, OVERLAYS, ROOT, STEPS, Json, base, one, overlay, pod_templates, render
from tests.presets import FILES

PODS = pod_templates(base())
HOUSEKEEPING = ("grpo-pipeline-collector", "grpo-pipeline-reaper")
"""Those that talk to the API server; the others run what a model wrote."""
STEP_PODS: Json = list(yaml.safe_load_all((ROOT / "pipelines/grpo_post_training.yaml").read_text()))[1]["platforms"][
    "kubernetes"
]["deploymentSpec"]["executors"]
"""What the graph says of the pods of its steps; Kubeflow makes the rest."""
each_pod = pytest.mark.parametrize("where", PODS)
each_runtime = pytest.mark.parametrize("runtime", ["grpo-torch", "grpo-torch-vllm"])


def faults(document: Json) -> list[str]:
    """Return what is wrong with a document; Kueue's kinds are validated by the definitions of its releases."""
    return [] if "kueue" in document["apiVersion"] else problems(document)


def _job_set(runtime: str) -> Json:
    spec: Json = one(base(), "TrainingRuntime", runtime)["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_gives_steps_their_role_and_changes_no_pod(name: str) -> None:
    """Every overlay is tested here and elsewhere."""
    assert sorted(path.name for path in (K8S / "overlays").iterdir()) == sorted(OVERLAYS)
    assert "Secret" not in {document["kind"] for document in overlay(name)}, "secrets are created by hand"
    binding = one(overlay(name), "RoleBinding", "grpo-pipeline-launcher")
    assert [subject["name"] for subject in binding["subjects"]] == [STEPS[NAMESPACES[name]]]
    for document in overlay(name):
        if document["kind"] in ("CronJob", "NetworkPolicy", "TrainingRuntime"):
            assert document["spec"] == one(base(), document["kind"], document["metadata"]["name"])["spec"]


@each_pod
def test_pods_meet_the_restricted_standard_and_quotas(where: str) -> None:
    """Namespaces that enforce the strictest pod security level, a quota or a service mesh take all pods."""
    template = PODS[where]
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false", "a sidecar keeps jobs from ending"
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers", "initContainers"} & set(spec)
    volumes = {key for volume in spec["volumes"] for key in volume} - {"name"}
    assert volumes <= {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "projected"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in context
        assert all("hostPort" not in port for port in container.get("ports", []))
        for part in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][part])
        assert re.fullmatch(r"grpo-pipeline/python-(light|gpu):(?!latest)[\w.-]+", container["image"])
    assert spec["automountServiceAccountToken"] == (where in HOUSEKEEPING), "training runs what a model wrote"


@each_runtime
def test_runtime_is_what_trainer_and_torchrun_need(runtime: str) -> None:
    """Trainer finds its job by label and container name, JobSet restarts, and memory and volume are shared."""
    document = one(base(), "TrainingRuntime", runtime)
    assert document["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert document["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
    job_set = _job_set(runtime)
    assert "ttlSecondsAfterFinished" not in job_set, "after it, a failed job would be created again"
    assert (job_set["failurePolicy"]["restartStrategy"], job_set["failurePolicy"]["maxRestarts"]) == ("Recreate", 3)
    node = job_set["replicatedJobs"][-1]
    labels = node["template"]["metadata"]["labels"]
    assert (node["name"], labels["trainer.kubeflow.org/trainjob-ancestor-step"]) == ("node", "trainer")
    assert node["template"]["spec"]["backoffLimit"] == 0
    for job in job_set["replicatedJobs"]:
        spec = job["template"]["spec"]["template"]["spec"]
        assert [container["name"] for container in spec["containers"]] == [job["name"]]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["/work"]["persistentVolumeClaim"]["claimName"] == "grpo-pipeline"
    params = [load_params(path) for path in FILES]
    longest_s = max(stage.checkpoint.grace_s for each in params for stage in (each.train_sft, each.train_grpo))
    limit_s = node["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert limit_s >= longest_s + 30, "Kubernetes would kill ranks that write their last checkpoint"


@each_runtime
def test_disruption_is_no_failure_and_a_wrong_config_is_final(runtime: str) -> None:
    """Disruptions are not counted; exit code 2 alone fails the job at once, without a restart."""
    job_set = _job_set(runtime)
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": "node", "operator": "In", "values": [PipelineError.exit_code]}
    for job in job_set["replicatedJobs"]:
        final = [{"action": "FailJob", "onExitCodes": codes}] if job["name"] == "node" else []
        assert job["template"]["spec"]["podFailurePolicy"]["rules"] == [ignore, *final]
        # Kubernetes accepts such a policy only for pods that are not restarted in place.
        assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job_set["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_training_waits_for_its_servers_and_ends_without_them() -> None:
    """VLLM servers are ready before ranks start, and do not keep the job from completing."""
    job_set = _job_set("grpo-torch-vllm")
    rollout, node = job_set["replicatedJobs"]
    assert (rollout["name"], "dependsOn" in rollout) == ("rollout", False)
    assert node["dependsOn"] == [{"name": "rollout", "status": "Ready"}]
    assert job_set["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    (server,) = rollout["template"]["spec"]["template"]["spec"]["containers"]
    assert server["ports"] == [{"name": "http", "containerPort": SERVER_PORT}]
    for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert server["resources"]["requests"]["nvidia.com/gpu"] == server["resources"]["limits"]["nvidia.com/gpu"]
    # Trainer's webhook demands a single replica of jobs with this label.
    labels = rollout["template"].get("metadata", {}).get("labels", {})
    assert "trainer.kubeflow.org/trainjob-ancestor-step" not in labels


def test_network_policies_admit_what_each_kind_of_pod_needs() -> None:
    """Training pods and DNS; the API server; nobody. What several policies allow adds up, so one selects each pod."""
    policies = {each["metadata"]["name"]: each["spec"] for each in base() if each["kind"] == "NetworkPolicy"}
    training, housekeeping = policies["grpo-pipeline-training"], policies["grpo-pipeline-housekeeping"]
    steps = policies["grpo-pipeline-steps"]
    expected = {where: training if where.startswith("grpo-torch") else housekeeping for where in PODS}
    labels = {where: template["metadata"]["labels"] for where, template in PODS.items()}
    for step, executor in STEP_PODS.items():
        expected[step], labels[step] = steps, executor["podMetadata"]["labels"]
    for where, policy in expected.items():
        assert [each for each in policies.values() if _selects(each["podSelector"], labels[where])] == [policy], where
    dns = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    among = [{"podSelector": training["podSelector"]}]
    assert training["policyTypes"] == housekeeping["policyTypes"] == ["Ingress", "Egress"]
    assert training["ingress"] == [{"from": among}]
    assert training["egress"] == [{"to": among}, dns]
    assert housekeeping.get("ingress", []) == steps.get("ingress", []) == []
    # The API server is in no namespace that could be selected.
    ports = [{"port": port, "protocol": "TCP"} for port in (443, 6443, 8443, 16443)]
    assert housekeeping["egress"] == [dns, {"ports": ports}]
    assert steps["policyTypes"] == ["Ingress"]


def test_hub_access_leaves_out_the_addresses_of_clusters() -> None:
    """Private, shared and link-local ones, of pods, services, nodes and a cloud's metadata."""
    (policy,) = yaml.safe_load_all((K8S / "components/hub-access/network-policy.yaml").read_text())
    (rule,) = policy["spec"]["egress"]
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    blocks = [each["ipBlock"] for each in rule["to"]]

    def is_reached(address: str) -> bool:
        return any(
            ip_address(address) in ip_network(block["cidr"])
            and not any(ip_address(address) in ip_network(each) for each in block["except"])
            for block in blocks
        )

    inside = ("10.96.0.1", "172.18.0.2", "192.168.1.1", "100.64.0.1", "169.254.169.254", "fd00::1", "fe80::1")
    assert [address for address in inside if is_reached(address)] == []
    assert is_reached("3.167.112.25")
    assert is_reached("2600:9000::1")


def _selects(selector: Json, labels: Json) -> bool:
    """Tell whether a selector of pods chooses one with these labels."""
    expressions = selector.get("matchExpressions", [])
    assert {each["operator"] for each in expressions} <= {"In", "Exists"}
    matches = all(
        each["key"] in labels and labels[each["key"]] in each.get("values", labels.values()) for each in expressions
    )
    return matches and selector["matchLabels"].items() <= labels.items()


def test_volume_is_the_one_that_runs_ask_for() -> None:
    """By the name of its claim in the form, in a job's config and in all pods; all nodes share it."""
    document = one(base(), "PersistentVolumeClaim", "grpo-pipeline")
    assert document["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes = [volume for pod in PODS.values() for volume in pod["spec"]["volumes"]]
    claims = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
    assert {document["metadata"]["name"]} == claims == {ClusterConfig().volume, DeploymentConfig().volume}
    assert ClusterConfig().mount == MOUNT == "/work"


@each_pod
def test_pod_has_image_command_secret_and_label_of_the_code(where: str) -> None:
    """A kustomization replaces the images that the pipeline is compiled with; modules exist."""
    pod = PODS[where]
    (container,) = pod["spec"]["containers"]
    image = images.LIGHT if where in HOUSEKEEPING else images.GPU
    assert image.rpartition(":")[0].endswith(container["image"].rpartition(":")[0])
    if "command" in container:
        python, flag, module = container["command"]
        assert (python, flag) == ("python", "-m")
        assert find_spec(module), module
    assert pod["spec"]["imagePullSecrets"] == [{"name": DeploymentConfig().image_pull_secret}]
    assert pod["metadata"]["labels"][kube.MANAGED_BY] == kube.PROJECT


@pytest.mark.parametrize(
    ("folder", "namespace", "components"),
    [
        ("one-machine", "kubeflow", ()),
        ("one-machine", "kubeflow", ("kueue", "hub-access")),
        ("overlays/standalone", "kubeflow", ()),
        ("overlays/standalone-kueue", "kubeflow", ("hub-access",)),
        ("overlays/multi-user", "team-a", ()),
        ("overlays/multi-user-kueue", "team-a", ("hub-access", "capacity")),
    ],
)
def test_all_of_a_site_is_in_its_namespace(
    folder: str, namespace: str, components: tuple[str, ...], tmp_path: Path
) -> None:
    """As the guide writes its kustomization, with what the guides say to add; it sets images and storage class."""
    (clone := tmp_path / "clone").mkdir()
    (clone / "k8s").symlink_to(K8S)
    guide = (ROOT / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^mkdir.*?^END$", guide, re.DOTALL | re.MULTILINE)
    settings = {"OVERLAY": f"k8s/{folder}", "NAMESPACE": namespace, "STORAGE_CLASS": "nfs", "VOLUME_SIZE": "1Ti"}
    built = {"IMAGE_REGISTRY": "registry.example.com", "IMAGE_TAG": "0123abc"}
    subprocess.run(["bash", "-euc", block], cwd=clone, env=os.environ | settings | built, check=True)
    with (tmp_path / "grpo-site/kustomization.yaml").open("a") as file:
        file.write(f"components: [{', '.join(f'../clone/k8s/components/{name}' for name in components)}]\n")
    documents = render(tmp_path / "grpo-site")
    of_cluster = ("ClusterRole", "ClusterRoleBinding", "PersistentVolume")
    assert {each["metadata"].get("namespace") for each in documents if each["kind"] not in of_cluster} == {namespace}
    assert {subject["namespace"] for each in documents for subject in each.get("subjects", [])} == {namespace}
    assert [faults(document) for document in documents] == [[]] * len(documents)
    kinds = [each["kind"] for each in documents]
    assert kinds.count("LocalQueue") == ("kueue" in folder or "kueue" in components)
    for queue in (each for each in documents if each["kind"] == "LocalQueue"):
        assert one(render(K8S / "cluster"), "ClusterQueue", queue["spec"]["clusterQueue"])
    assert pod_templates(documents).keys() == PODS.keys()
    assert kinds.count("NetworkPolicy") == 3 + ("hub-access" in components)
    images = {each["image"] for pod in pod_templates(documents).values() for each in pod["spec"]["containers"]}
    assert images == {f"registry.example.com/grpo-pipeline/python-{kind}:0123abc" for kind in ("light", "gpu")}
    assert one(documents, "PersistentVolumeClaim", "grpo-pipeline")["spec"]["storageClassName"] == "nfs"
