"""The graph as a cluster runs it: what each task asks of Kubernetes, in what order tasks run, and what the form has."""

import re

import pytest
from pydantic import ValidationError

from components.cluster.config import ClusterConfig
from components.preflight.config import DEPLOYMENT, load_params
from components.preflight.form import OVERRIDES, PRESET, form_of, parameters
from components.preflight.preflight import DEADLINE_S
from components.preflight.resources import shape_of_base, with_memory
from components.shared.deployment import OPTIONAL_SECRET_KEYS, SECRET_KEYS, DeploymentConfig
from components.shared.environment import IMAGE_VARIABLE
from pipelines import dvc_graph
from pipelines.parameter_table import page
from tests.pipelines.compiled import COMMITTED, compile_graph, graph
from tests.presets import ROOT

MODEL = {"evaluate"}
DATA = {"prepare-data", "validate-data"}
TRAINING = {"train-sft", "train-grpo"}
TASKS = MODEL | DATA | TRAINING | {"preflight", "report", "register"}


def test_what_is_committed_is_what_the_code_compiles_to() -> None:
    """Kubeflow's graph, DVC's and the page of parameters are not older than the code: `make compile`."""
    assert COMMITTED.read_text() == graph().text
    assert (ROOT / "docs/parameters.md").read_text() == page()
    assert (ROOT / "dvc.yaml").read_text() == dvc_graph.text()


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_asks_for_what_it_needs(task: str) -> None:
    """Nothing is unlimited, and the last attempt has as much time as the first; pods have labels and no root user."""
    asked, settings = graph().containers[task]["resources"], graph().settings(task)
    assert 0 < asked["cpuRequest"] <= asked["cpuLimit"]
    if task in MODEL:
        computed = "{{$.inputs.parameters['pipelinechannel--preflight-evaluate_memory']}}"
        assert asked["resourceMemoryRequest"] == asked["resourceMemoryLimit"] == computed
    else:
        assert 0 < asked["memoryRequest"] <= asked["memoryLimit"]
    labels = {"app.kubernetes.io/managed-by": "grpo-pipeline", "grpo-pipeline/task": task}
    assert settings["podMetadata"]["labels"] == labels
    assert settings["securityContext"] == {"runAsNonRoot": True}
    assert len(settings["imagePullSecret"]) == 1
    if task in TRAINING:  # Kubernetes must not end a step while the job's own limits let the job go on
        assert int(settings["activeDeadlineSeconds"]) > ClusterConfig(image="gpu").deadline_s
    policy = graph().tasks[task].get("retryPolicy")
    assert (policy is None) == (task in {"preflight", "register"})
    if policy:
        # The deadline of all attempts: each may wait a day for a node and then run into its time limit.
        window_s, retries = int(policy["backoffMaxDuration"].removesuffix("s")), policy["maxRetryCount"]
        assert window_s >= (retries + 1) * (int(settings["activeDeadlineSeconds"]) + 24 * 3600) + 30 * retries


def test_only_tasks_that_run_a_model_have_gpu_shared_memory_and_nodes_of_their_own() -> None:
    """A task that trains waits for its job, whose pods have the GPUs; 64 MiB of /dev/shm would end NCCL."""
    for task in TASKS:
        settings, asked = graph().settings(task), graph().containers[task]["resources"]
        assert ("accelerator" in asked) == (task in MODEL)
        mounts = [(each["mountPath"], each["medium"]) for each in settings.get("emptyDirMounts", [])]
        assert mounts == [("/dev/shm", "Memory")] * (task in MODEL)
    settings, asked = graph().settings("evaluate"), graph().containers["evaluate"]["resources"]["accelerator"]
    assert asked["resourceType"] == "nvidia.com/gpu"
    assert asked["resourceCount"] == "{{$.inputs.parameters['pipelinechannel--preflight-evaluate_gpus']}}"
    selector = settings["nodeSelector"]["nodeSelectorJson"]["taskOutputParameter"]
    (toleration,) = (each["tolerationJson"]["taskOutputParameter"] for each in settings["tolerations"])
    assert selector["outputParameterKey"] == "evaluate_node_selector"
    assert toleration["outputParameterKey"] == "evaluate_tolerations"


def test_only_the_data_stages_may_be_served_from_the_cache() -> None:
    """A run that says it trained, measured or registered has done so; the inputs of the data stages have a commit."""
    tasks = graph().tasks
    assert {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache", False)} == DATA
    for name in DATA:
        assert tasks[name]["inputs"]["parameters"]["config"]["taskOutputParameter"]["producerTask"] == "preflight"


def test_secrets_are_named_and_never_contained() -> None:
    """A task has the secrets it needs as environment variables, if they exist; beside them its image."""
    kinds = {f"grpo-pipeline-{kind.replace('_', '-')}": kind for kind in SECRET_KEYS}
    for task in TASKS:
        for secret in graph().settings(task).get("secretAsEnv", []):
            kind = kinds[secret["secretNameParameter"]["runtimeValue"]["constant"]]
            keys = {key["secretKey"]: key["envVar"] for key in secret["keyToEnv"]}
            assert keys == {key: key for key in (*SECRET_KEYS[kind], *OPTIONAL_SECRET_KEYS.get(kind, ()))}
            assert secret["optional"]
        container = graph().containers[task]
        assert container["env"] == [{"name": IMAGE_VARIABLE, "value": container["image"]}]


def test_what_differs_between_clusters_comes_from_the_deployment() -> None:
    """Images, the volume and the names of secrets: another params file, another compilation."""
    secrets = {kind: f"my-{kind.replace('_', '-')}" for kind in SECRET_KEYS}
    images = {"image_light": "registry.example/light:1", "image_gpu": "registry.example/gpu:1"}
    deployment = {**images, "image_pull_secret": "pull", "volume": "shared", "secrets": secrets}
    for wrong in ({"volume": "Team Models"}, {"secrets": {"git": ""}}):
        with pytest.raises(ValidationError, match="a name that Kubernetes accepts"):
            DeploymentConfig.model_validate(wrong)
    changes = {"deployment": DeploymentConfig.model_validate(deployment)}
    made = compile_graph(load_params(ROOT / "params.yaml").model_copy(update=changes))
    for task in TASKS:
        assert made.containers[task]["image"] == deployment["image_gpu" if task in MODEL else "image_light"]
    constants = {each for task in TASKS for each in re.findall(r"'constant': '(.*?)'", str(made.settings(task)))}
    assert constants == {"pull", "shared", *secrets.values()}
    task = made.tasks["preflight"]["inputs"]["parameters"][DEPLOYMENT]
    assert task["runtimeValue"]["constant"] == deployment
    assert "grpo-pipeline-git" not in made.text
    assert not re.search(r"serviceAccount|kubeflow\.svc|\.svc\.cluster|namespace", made.text), "the user's is used"


def test_a_run_that_cannot_start_fails_within_two_minutes() -> None:
    """Within a pull, the checks and twenty seconds of drivers; a missing volume claim would keep its pod pending."""
    assert DEADLINE_S + 20 <= int(graph().settings("preflight")["activeDeadlineSeconds"]) <= 120 - 20
    assert {task for task in TASKS if "pvcMount" in graph().settings(task)} == TASKS - {"preflight"}


def test_the_graph_fits_on_a_page() -> None:
    """One level, few tasks in few rows, and an artifact for each task and each page; Kubeflow draws all of them."""
    components, tasks = graph().spec["components"], graph().tasks
    assert not any("dag" in component for component in components.values())
    artifacts = {
        name: set(components[task["componentRef"]["name"]].get("outputDefinitions", {}).get("artifacts", {}))
        for name, task in tasks.items()
    }
    pages = {"preflight": {"configuration"}, "validate-data": {"data_page"}, "report": {"metrics", "report_page"}}
    pages["register"] = {"registration_page"}
    for name, task in tasks.items():  # nothing is spent before everything is checked
        assert name == "preflight" or "preflight" in task["dependentTasks"], name
    for name, made in artifacts.items():
        assert len(made - pages.get(name, set())) == (name != "preflight"), name
    assert set(tasks) == TASKS
    assert sum(map(len, artifacts.values())) <= 12

    def row(name: str) -> int:
        """The row in which Kubeflow draws a task: below the tasks it depends on, and the artifacts it takes."""
        taken = [each["taskOutputArtifact"] for each in tasks[name]["inputs"].get("artifacts", {}).values()]
        above = [row(before) for before in tasks[name].get("dependentTasks", [])]
        return 1 + max([*above, *(1 + row(each["producerTask"]) for each in taken)], default=0)

    assert max(map(row, tasks)) + 1 <= 10  # with one more, names are smaller than nine pixels


def test_a_run_that_would_change_nothing_ends_green_after_preflight() -> None:
    """Kubeflow skips prepare_data, the only task with a condition, and never reaches the others: all depend on it."""
    tasks = graph().tasks
    (name,) = (name for name, task in tasks.items() if "triggerPolicy" in task)
    assert name == "prepare-data"
    assert tasks[name]["triggerPolicy"] == {"condition": "inputs.parameter_values['unchanged'] == false"}
    source = {"producerTask": "preflight", "outputParameterKey": "unchanged"}
    assert tasks[name]["inputs"]["parameters"]["unchanged"] == {"taskOutputParameter": source}

    def depends(task: str) -> bool:
        return task == name or any(map(depends, tasks[task].get("dependentTasks", [])))

    assert {task for task in tasks if not depends(task)} == {"preflight"}


def test_tasks_know_their_run() -> None:
    """Logs, trackers and the registry name it as Kubeflow's page does; pods have only its id, as a label."""
    (field,) = graph().settings("register")["fieldPathAsEnv"]
    assert field == {"name": "GRPO_PIPELINE_RUN_ID", "fieldPath": "metadata.labels['pipeline/runid']"}
    for task in ("train-sft", "train-grpo", "register"):
        named = graph().tasks[task]["inputs"]["parameters"]["run_name"]
        assert named == {"runtimeValue": {"constant": "{{$.pipeline_job_name}}"}}


def test_the_form_is_short_and_opens_ready_to_run() -> None:
    """A dozen typed keys, a flag and a text that is empty, each with type, default and description."""
    actual = graph().spec["root"]["inputDefinitions"]["parameters"]
    assert set(actual) == set(parameters())
    assert len(actual) <= 14
    assert (actual[OVERRIDES]["parameterType"], actual[OVERRIDES]["defaultValue"]) == ("STRING", "")
    preset = graph().tasks["preflight"]["inputs"]["parameters"][PRESET]["runtimeValue"]["constant"]
    assert preset == form_of(load_params(ROOT / "params.yaml"))[PRESET]
    for name, parameter in actual.items():
        assert parameter["description"].endswith((".", ")")), name
        assert parameter["isOptional"], name
        assert "defaultValue" in parameter, name
        choices = [False, True] if parameter["parameterType"] == "BOOLEAN" else None
        assert parameter.get("literals") == choices, name


@pytest.mark.parametrize("name", ["params.yaml", "params/smoke.yaml"])
def test_a_first_run_fits_beside_kubeflow_on_a_small_node(name: str) -> None:
    """Of 4 CPUs and 16 GiB Kubeflow itself has 2 and 6: room for any task, and for a training pod with its launcher."""
    params = load_params(ROOT / name)
    params = params.model_copy(update={"cluster": params.cluster.model_copy(update={"gpus_per_node": 0})})
    config = with_memory(params, shape_of_base(params))
    asked = {task: graph().containers[task]["resources"] for task in TASKS}
    launcher = asked["train-sft"]
    assert config.training_pod.cpu + launcher["cpuRequest"] <= 2
    assert config.training_pod.memory_gib + launcher["memoryRequest"] <= 10
    assert all(each["cpuRequest"] <= 2 for each in asked.values())
    assert all(each.get("memoryRequest", config.evaluation_gib) <= 10 for each in asked.values())
