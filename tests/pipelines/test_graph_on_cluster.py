"""The graph as a cluster runs it: what each task asks of Kubernetes, and what may be set without compiling again."""

import re
from typing import Any

import pytest

from components.cluster.config import ClusterConfig
from components.preflight.config import SECRET_KEYS, SECRET_NAMES
from components.preflight.form import KEYS
from pipelines.grpo_post_training_on_cluster import FORM
from tests.pipelines.compiled import CLUSTER_FORMS, FULL, MINIMAL, graph

MODEL = {"evaluate", "evaluate-2", "evaluate-3"}
LIGHT = {"preflight", "prepare-data", "validate-data", "train-sft", "train-grpo", "report", "register", "clean-up"}
TASKS = MODEL | LIGHT
PREFIXES = {"base", "cluster", "data", "grpo", "image", "registry", "run", "secret", "section"}


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_every_task_has_its_settings(variant: str) -> None:
    """No task is forgotten: labels to find its pod by, a time limit, a pull secret."""
    found = graph(variant)
    assert set(found.tasks) == TASKS
    for task in TASKS:
        settings = found.settings(task)
        labels = settings["podMetadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "grpo-pipeline"
        assert int(settings["activeDeadlineSeconds"]) > 0
        assert len(settings["imagePullSecret"]) == 1
    assert len({found.settings(task)["podMetadata"]["labels"]["grpo-pipeline/task"] for task in TASKS}) == len(TASKS)


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_gpus_come_from_a_parameter(variant: str) -> None:
    """Whether evaluation has a GPU follows from the form; the kind of GPU is a label of the node."""
    for name in MODEL:
        accelerator = graph(variant).containers[f"exec-{name}"]["resources"]["accelerator"]
        assert accelerator["resourceType"] == "nvidia.com/gpu"
        assert accelerator["resourceCount"] == "{{$.inputs.parameters['pipelinechannel--preflight-evaluate_gpus']}}"
        selector = graph(variant).settings(name)["nodeSelector"]["nodeSelectorJson"]
        assert selector["taskOutputParameter"]["outputParameterKey"] == "evaluate_node_selector"


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_tasks_that_run_a_model_share_memory(variant: str) -> None:
    """64 MiB of /dev/shm end data loaders and NCCL with a bus error."""
    for task in TASKS:
        mounts = graph(variant).settings(task).get("emptyDirMounts", [])
        assert [(each["mountPath"], each["medium"]) for each in mounts] == [("/dev/shm", "Memory")] * (task in MODEL)


def test_what_belongs_to_a_cluster_is_a_parameter() -> None:
    """Tolerations, selectors, queue, images, secrets, volume and registries: none of them needs another compilation."""
    found = graph(FULL)
    wanted = {"cluster_tolerations", "cluster_node_selector", "cluster_queue", "cluster_volume_claim", "image_gpu"}
    wanted |= {"image_light", "image_pull_secret", "registry_repository", "registry_weights_remote", *SECRET_NAMES}
    assert wanted <= set(found.parameters)
    for task in TASKS:
        for value in _values(found.settings(task)):
            assert "constant" not in value, task
        assert set(found.settings(task).get("secretAsEnv", [{}])[0]) <= {"keyToEnv", "optional", "secretNameParameter"}
    for task in MODEL:
        (toleration,) = found.settings(task)["tolerations"]
        assert toleration == {"tolerationJson": {"componentInputParameter": "pipelinechannel--cluster_tolerations"}}


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_nothing_of_a_namespace_is_compiled_in(variant: str) -> None:
    """The same file runs as any user, in any namespace, under any service account."""
    assert not re.search(r"serviceAccount|kubeflow\.svc|\.svc\.cluster|namespace: ", str(graph(variant).spec))
    assert not re.search(r"serviceAccount|namespace", str(graph(variant).kubernetes))


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_secrets_are_there_by_name_alone(variant: str) -> None:
    """A task has the secrets it needs as environment variables; no parameter holds what is in one."""
    found = graph(variant)
    kinds = {
        "preflight": tuple(SECRET_KEYS),
        **dict.fromkeys(("prepare-data", "validate-data"), ("git", "hub", "storage")),
        **dict.fromkeys(("train-sft", "train-grpo", *MODEL), ("hub",)),
        "register": ("git", "model_registry", "storage"),
        **dict.fromkeys(("report", "clean-up"), ()),
    }
    assert set(kinds) == TASKS
    for task, expected in kinds.items():
        settings = found.settings(task)
        assert _secrets(settings) == {key for kind in expected for key in SECRET_KEYS[kind]}, task
        for secret in settings.get("secretAsEnv", []):
            name = str(secret["secretNameParameter"]).replace("-", "_")
            kind = next(kind for kind in SECRET_KEYS if kind in name)
            assert {key["secretKey"] for key in secret["keyToEnv"]} == set(SECRET_KEYS[kind]), task
            assert all(key["secretKey"] == key["envVar"] for key in secret["keyToEnv"]), task
    secret = re.compile(r"password|credential|access_?key|secret", re.IGNORECASE)
    assert {name for name in found.parameters if secret.search(name)} <= {*SECRET_NAMES, "image_pull_secret"}
    for name, parameter in found.parameters.items():
        assert name in {*SECRET_NAMES, "image_pull_secret"} or not secret.search(str(parameter["defaultValue"])), name
    assert not any("env" in container for container in found.containers.values())


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_retries_fit_what_a_task_does(variant: str) -> None:
    """What is wrong with a form is wrong the next time too, and so is a missed gate; training goes on after a loss."""
    tasks = graph(variant).tasks
    retries = {name: task["retryPolicy"]["maxRetryCount"] for name, task in tasks.items() if "retryPolicy" in task}
    data, evaluations = dict.fromkeys(("prepare-data", "validate-data"), 2), dict.fromkeys(MODEL, 2)
    assert retries == {**data, **evaluations, "train-sft": 3, "train-grpo": 3, "report": 1, "clean-up": 3}
    assert set(tasks) - set(retries) == {"preflight", "register"}


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_retries_wait_longer_each_time(variant: str) -> None:
    """Half a minute first, and twice as long before each further attempt."""
    for name, task in graph(variant).tasks.items():
        policy = task.get("retryPolicy")
        assert policy is None or (policy["backoffDuration"], policy["backoffFactor"]) == ("30s", 2), name


SIZES = {
    # Cores and gigabytes asked for and at most, and hours until Kubernetes ends the task.
    "preflight": (0.5, 1, 1, 2, 1 / 6),
    "prepare-data": (1, 2, 4, 8, 4),
    "validate-data": (1, 2, 4, 8, 4),
    "train-sft": (0.5, 2, 2, 4, 60 * 24),
    "train-grpo": (0.5, 2, 2, 4, 60 * 24),
    **dict.fromkeys(MODEL, (4, 16, 32, 128, 24)),
    "report": (1, 2, 2, 4, 1),
    "register": (1, 2, 4, 8, 6),
    "clean-up": (0.5, 1, 1, 2, 1 / 6),
}


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_every_task_asks_for_what_it_needs(variant: str) -> None:
    """Too little has it killed for memory or time in mid-work; too much keeps it waiting for a node."""
    found = graph(variant)
    for task, (cpu, most_cpu, memory, most_memory, hours) in SIZES.items():
        asked = found.containers[f"exec-{task}"]["resources"]
        assert (asked["cpuRequest"], asked["cpuLimit"]) == (cpu, most_cpu), task
        assert (asked["memoryRequest"], asked["memoryLimit"]) == (memory, most_memory), task
        assert int(found.settings(task)["activeDeadlineSeconds"]) == hours * 3600, task
    assert set(SIZES) == TASKS


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_the_step_of_a_job_outlives_the_job(variant: str) -> None:
    """Kubernetes must not end a step while the job's own limits let it go on: the job would run for nobody."""
    limits = {task: int(graph(variant).settings(task)["activeDeadlineSeconds"]) for task in TASKS}
    for task in ("train-sft", "train-grpo"):
        assert limits[task] > ClusterConfig(image="gpu").deadline_s
    assert limits["preflight"] <= 600
    assert limits["clean-up"] <= 600


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_preflight_and_clean_up_wait_for_nothing_that_may_be_missing(variant: str) -> None:
    """A volume claim that is not there would keep a pod pending for ever, and with it the run."""
    with_volume = {task for task in TASKS if "pvcMount" in graph(variant).settings(task)}
    assert with_volume == TASKS - {"preflight", "report", "clean-up"}
    for task in TASKS:
        secrets = graph(variant).settings(task).get("secretAsEnv", [])
        assert all(secret["optional"] for secret in secrets), task


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_every_stage_waits_for_preflight(variant: str) -> None:
    """Nothing is spent before everything is checked."""
    for name, task in graph(variant).tasks.items():
        if name not in {"preflight", "report", "clean-up"}:
            assert "preflight" in task["dependentTasks"], name


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_clean_up_runs_whatever_becomes_of_the_stages(variant: str) -> None:
    """It is the exit handler of all other tasks, and is told how they ended and which run it is."""
    root = graph(variant).spec["root"]["dag"]["tasks"]
    assert set(root) == {"clean-up", "exit-handler-1"}
    task = root["clean-up"]
    assert task["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    inputs = task["inputs"]["parameters"]
    assert inputs["status"] == {"taskFinalStatus": {"producerTask": "exit-handler-1"}}
    assert inputs["run_id"]["runtimeValue"]["constant"] == "{{$.pipeline_job_uuid}}"


def test_registration_knows_its_run() -> None:
    """The registry is told by which run a version was made; the run's name is not in the graph but on the pod."""
    fields = {each["name"]: each["fieldPath"] for each in graph(FULL).settings("register")["fieldPathAsEnv"]}
    assert fields == {
        "GRPO_PIPELINE_RUN_ID": "metadata.labels['pipeline/runid']",
        "GRPO_PIPELINE_RUN_NAME": "metadata.annotations['pipelines.kubeflow.org/run_name']",
    }


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_data_are_cached_by_commit(variant: str) -> None:
    """The inputs of cached tasks are what preflight resolved: a commit, never the name of a branch."""
    tasks = graph(variant).tasks
    for name in ("prepare-data", "validate-data"):
        config = tasks[name]["inputs"]["parameters"]["config"]
        assert config["taskOutputParameter"]["producerTask"] == "preflight"
        assert not {"pipelinechannel--data_revision"} & set(tasks[name]["inputs"]["parameters"])
    assert not tasks["preflight"]["cachingOptions"].get("enableCache", False)


def test_parameters_are_grouped_by_prefix() -> None:
    """The form is in alphabetical order: what belongs together stands together, JSON last."""
    names = sorted(graph(FULL).parameters)
    assert {name.partition("_")[0] for name in names} == PREFIXES
    assert set(names) == set(FORM)
    assert set(KEYS) < set(names)
    assert [name.partition("_")[0] for name in names[-8:]] == ["section"] * 8


def test_the_short_form_is_short() -> None:
    """A dozen parameters, each of which the long form has too, with the same type, default and description."""
    short, long = graph(MINIMAL).parameters, graph(FULL).parameters
    assert len(short) <= 12
    assert short == {name: long[name] for name in short}


@pytest.mark.parametrize("variant", CLUSTER_FORMS)
def test_every_parameter_is_typed_described_and_has_a_default(variant: str) -> None:
    """A run can be started from the form as it opens, and the form can be explained."""
    for name, parameter in graph(variant).parameters.items():
        assert parameter["description"].endswith((".", ")")), name
        assert parameter["isOptional"], name
        assert "defaultValue" in parameter, name


def _values(value: Any) -> list[dict[str, Any]]:
    """Every mapping inside a value."""
    if isinstance(value, dict):
        return [value, *(each for item in value.values() for each in _values(item))]
    return [each for item in value for each in _values(item)] if isinstance(value, list) else []


def _secrets(settings: dict[str, Any]) -> set[str]:
    """The environment variables that a task has from secrets."""
    return {key["envVar"] for secret in settings.get("secretAsEnv", []) for key in secret["keyToEnv"]}
