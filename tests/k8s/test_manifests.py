import copy
import re
from pathlib import Path

import jsonschema
import pytest

from components.cluster.manifest import SERVER_PORT
from components.preflight.config import load_params
from components.shared.errors import PipelineError
from tests.cluster.releases import needs_upstream, refused
from tests.fake_cluster.schemas import problems
from tests.k8s.kueue_schemas import SCHEMAS
from tests.k8s.rendered import K8S, NAMESPACES, OVERLAYS, STEPS, Json, one, overlay, pod_templates, render
from tests.presets import FILES

ROOTS = [*(K8S / "overlays" / name for name in OVERLAYS), K8S / "cluster"]
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def faults(document: Json) -> list[str]:
    """What is wrong with a document, of whatever kind."""
    if document["kind"] in SCHEMAS:
        validator = jsonschema.Draft202012Validator(SCHEMAS[document["kind"]])
        return [error.message for error in validator.iter_errors(document)]
    return [str(problem) for problem in problems(document)]


@pytest.mark.parametrize("root", ROOTS, ids=lambda path: path.name)
def test_every_kustomization_renders_to_valid_objects(root: Path) -> None:
    """No key is unknown and none is missing, for the kinds of Kubernetes, Trainer and Kueue alike."""
    for document in render(root):
        assert faults(document) == [], (document["kind"], document["metadata"]["name"])


@needs_upstream
@pytest.mark.parametrize("release", ["kueue-0.17.3", "kueue-0.19.2"])
def test_every_release_of_kueue_takes_our_queues(release: str) -> None:
    """Strictly, by the definitions that the releases ship."""
    documents = [*render(K8S / "cluster"), one(overlay("standalone-kueue"), "LocalQueue", "grpo-pipeline")]
    assert {document["kind"]: refused(release, document) for document in documents} == {
        "ClusterQueue": [],
        "LocalQueue": [],
        "ResourceFlavor": [],
    }


def test_every_overlay_is_among_those_tested() -> None:
    """A new overlay is validated too."""
    assert sorted(path.name for path in (K8S / "overlays").iterdir()) == sorted(OVERLAYS)


def test_a_typing_error_would_be_found() -> None:
    """The validation names a key that the server would drop without a word."""
    documents = overlay("standalone-kueue")
    for kind, name, wrong in (
        ("TrainingRuntime", "grpo-torch", {"podSpecOverrides": []}),
        ("CronJob", "grpo-pipeline-reaper", {"concurrencypolicy": "Forbid"}),
        ("LocalQueue", "grpo-pipeline", {"clusterqueue": "x"}),
    ):
        document = copy.deepcopy(one(documents, kind, name))
        document["spec"] |= wrong
        assert any(next(iter(wrong)) in fault for fault in faults(document)), kind


@each_overlay
def test_everything_is_in_the_namespace_of_its_overlay(name: str) -> None:
    """Objects and the service accounts that are bound: a subject left in another namespace would bind nothing."""
    namespace = NAMESPACES[name]
    for document in overlay(name):
        assert document["metadata"]["namespace"] == namespace, document["metadata"]["name"]
        for subject in document.get("subjects", []):
            assert subject["namespace"] == namespace
    binding = one(overlay(name), "RoleBinding", "grpo-pipeline-launcher")
    assert [subject["name"] for subject in binding["subjects"]] == [STEPS[namespace]]


@each_overlay
def test_every_pod_meets_the_restricted_standard(name: str) -> None:
    """A namespace that enforces Kubernetes' strictest pod security level takes all pods."""
    for where, template in _templates(name):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec), where
        kinds = {key for volume in spec["volumes"] for key in volume} - {"name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "projected"}, where
        for container in spec["containers"] + spec.get("initContainers", []):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert "privileged" not in context, where
            assert all("hostPort" not in port for port in container.get("ports", [])), where


@each_overlay
def test_every_container_says_what_it_needs(name: str) -> None:
    """A namespace with a quota refuses pods without requests and limits for cpu and memory."""
    for where, template in _templates(name):
        for container in template["spec"]["containers"]:
            for part in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][part]), where


@each_overlay
def test_pods_are_out_of_the_service_mesh(name: str) -> None:
    """A sidecar would keep jobs from ending and ranks from meeting."""
    for where, template in _templates(name):
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false", where


@each_overlay
def test_only_the_reaper_has_a_token_of_the_api_server(name: str) -> None:
    """Training pods run what a model wrote; nothing in them may speak for the namespace."""
    tokens = {where: template["spec"]["automountServiceAccountToken"] for where, template in _templates(name)}
    assert [where for where, mounted in tokens.items() if mounted] == ["grpo-pipeline-reaper"]


@each_overlay
def test_no_secret_and_no_moving_image_is_in_the_tree(name: str) -> None:
    """Secrets are made by hand and named; an image's tag names one build for good."""
    documents = overlay(name)
    assert "Secret" not in {document["kind"] for document in documents}
    for where, template in _templates(name):
        for container in template["spec"]["containers"]:
            assert re.fullmatch(r"grpo-pipeline/python-(light|gpu):(?!latest)[\w.-]+", container["image"]), where


@pytest.mark.parametrize("runtime", ["grpo-torch", "grpo-torch-vllm"])
def test_runtimes_are_what_the_trainer_and_torchrun_need(runtime: str) -> None:
    """The trainer finds its job by label and container name, restarts are JobSet's, and memory is shared."""
    document = one(overlay("standalone"), "TrainingRuntime", runtime)
    assert document["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert document["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
    job_set = document["spec"]["template"]["spec"]
    assert "ttlSecondsAfterFinished" not in job_set, "after it a failed job would be made again"
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


@pytest.mark.parametrize("runtime", ["grpo-torch", "grpo-torch-vllm"])
def test_ranks_have_the_time_to_end_that_every_preset_gives_them(runtime: str) -> None:
    """Kubernetes kills a pod when its grace period is over: the last checkpoint would be lost."""
    params = [load_params(path) for path in FILES]
    longest_s = max(each.checkpoint.grace_s for one in params for each in (one.train_sft, one.train_grpo))
    node = one(overlay("standalone"), "TrainingRuntime", runtime)["spec"]["template"]["spec"]["replicatedJobs"][-1]
    assert node["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= longest_s + 30


@pytest.mark.parametrize("runtime", ["grpo-torch", "grpo-torch-vllm"])
def test_an_evicted_pod_is_no_failure_and_a_wrong_config_is_final(runtime: str) -> None:
    """Disruptions are not counted; exit code 2 fails the job at once, and what fails by policy is not restarted."""
    job_set = one(overlay("standalone"), "TrainingRuntime", runtime)["spec"]["template"]["spec"]
    for job in job_set["replicatedJobs"]:
        first = job["template"]["spec"]["podFailurePolicy"]["rules"][0]
        assert first == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        # Kubernetes takes such a policy only of pods that are not restarted in place.
        assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    _, final = job_set["replicatedJobs"][-1]["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = {"containerName": "node", "operator": "In", "values": [PipelineError.exit_code]}
    assert final == {"action": "FailJob", "onExitCodes": codes}
    (rule,) = job_set["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_training_waits_for_its_servers_and_ends_without_them() -> None:
    """The vLLM servers come first, are ready before a trainer starts, and do not keep the job from being complete."""
    job_set = one(overlay("standalone"), "TrainingRuntime", "grpo-torch-vllm")["spec"]["template"]["spec"]
    rollout, node = job_set["replicatedJobs"]
    assert (rollout["name"], "dependsOn" in rollout) == ("rollout", False)
    assert node["dependsOn"] == [{"name": "rollout", "status": "Ready"}]
    assert job_set["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    (server,) = rollout["template"]["spec"]["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in server["ports"]] == [SERVER_PORT]
    assert _port_of(server) == SERVER_PORT
    # One whose engine is dead goes on while requests wait for it; it is ended, but not while it starts.
    for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] == "/health"
    assert server["resources"]["requests"]["nvidia.com/gpu"] == server["resources"]["limits"]["nvidia.com/gpu"]
    # The trainer's webhook demands one replica of jobs with this label only.
    assert "trainer.kubeflow.org/trainjob-ancestor-step" not in rollout["template"].get("metadata", {}).get(
        "labels", {}
    )


def test_the_reaper_runs_alone_and_leaves_little_behind() -> None:
    """No two at once, none that hangs, no endless list of old ones."""
    cron = one(overlay("standalone"), "CronJob", "grpo-pipeline-reaper")["spec"]
    assert cron["schedule"] == "*/5 * * * *"
    assert cron.get("suspend", False) is False
    assert (cron["concurrencyPolicy"], cron["timeZone"]) == ("Forbid", "Etc/UTC")
    assert cron["startingDeadlineSeconds"] < 300
    assert (cron["successfulJobsHistoryLimit"], cron["failedJobsHistoryLimit"]) == (1, 3)
    assert cron["jobTemplate"]["spec"]["activeDeadlineSeconds"] <= 120


def test_training_pods_talk_to_one_another_and_to_nobody_else() -> None:
    """The policy chooses every pod of the runtimes, and lets in and out only such pods, and names to be looked up."""
    policy = one(overlay("standalone"), "NetworkPolicy", "grpo-pipeline-training")["spec"]
    chosen = policy["podSelector"]["matchLabels"]
    for where, template in _templates("standalone"):
        covered = chosen.items() <= template["metadata"]["labels"].items()
        assert covered == where.startswith("grpo-torch"), where
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    among = [{"podSelector": {"matchLabels": chosen}}]
    assert policy["ingress"] == [{"from": among}]
    names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    assert policy["egress"] == [{"to": among}, {"ports": names}]


@each_overlay
def test_no_other_policy_opens_what_is_closed(name: str) -> None:
    """What several policies allow adds up: there is one for training pods, and one for the reaper."""
    policies = {each["metadata"]["name"]: each["spec"] for each in overlay(name) if each["kind"] == "NetworkPolicy"}
    assert set(policies) == {"grpo-pipeline-training", "grpo-pipeline-reaper"}
    reaper = policies["grpo-pipeline-reaper"]
    assert reaper["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "reaper"
    assert (reaper["policyTypes"], reaper.get("ingress", [])) == (["Ingress", "Egress"], [])
    (rule,) = reaper["egress"]
    assert "to" not in rule
    assert {53, 443, 6443} <= {port["port"] for port in rule["ports"]}


def test_the_volume_is_for_many_nodes() -> None:
    """Every pod of a run writes to it, on whichever node."""
    claim = one(overlay("standalone"), "PersistentVolumeClaim", "grpo-pipeline")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_site_can_set_namespace_images_storage_and_servers_from_outside(tmp_path: Path) -> None:
    """A kustomization on top of an overlay reaches all of them, the images inside the runtimes too."""
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "k8s").symlink_to(K8S)
    (site / "kustomization.yaml").write_text(_SITE)
    documents = render(site)
    assert {document["metadata"]["namespace"] for document in documents} == {"team-a"}
    assert {subject["namespace"] for each in documents for subject in each.get("subjects", [])} == {"team-a"}
    images = {c["image"] for each in documents for _, t in pod_templates(each) for c in t["spec"]["containers"]}
    assert images == {f"registry.example.com/grpo-pipeline/python-{kind}:0123abc" for kind in ("light", "gpu")}
    assert one(documents, "PersistentVolumeClaim", "grpo-pipeline")["spec"]["storageClassName"] == "nfs"
    runtime = one(documents, "TrainingRuntime", "grpo-torch-vllm")
    assert runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["replicas"] == 4
    assert "NetworkPolicy/grpo-pipeline-hub-access" in {f"{d['kind']}/{d['metadata']['name']}" for d in documents}
    assert [faults(document) for document in documents] == [[]] * len(documents)


_SITE = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../k8s/overlays/multi-user]
components: [../k8s/components/hub-access]
images:
  - {name: grpo-pipeline/python-light, newName: registry.example.com/grpo-pipeline/python-light, newTag: 0123abc}
  - {name: grpo-pipeline/python-gpu, newName: registry.example.com/grpo-pipeline/python-gpu, newTag: 0123abc}
patches:
  - target: {kind: PersistentVolumeClaim, name: grpo-pipeline}
    patch: |
      - {op: add, path: /spec/storageClassName, value: nfs}
  - target: {kind: TrainingRuntime, name: grpo-torch-vllm}
    patch: |
      - {op: replace, path: /spec/template/spec/replicatedJobs/0/replicas, value: 4}
transformers:
  - |-
    apiVersion: builtin
    kind: NamespaceTransformer
    metadata: {name: profile, namespace: team-a}
    setRoleBindingSubjects: allServiceAccounts
"""


def _port_of(container: Json) -> int:
    """The port that a container's readiness is asked at, which may be named."""
    port = container["readinessProbe"]["httpGet"]["port"]
    named = {each.get("name"): each["containerPort"] for each in container["ports"]}
    found: int = named.get(port, port)
    return found


def _templates(name: str) -> list[tuple[str, Json]]:
    return [template for document in overlay(name) for template in pod_templates(document)]
