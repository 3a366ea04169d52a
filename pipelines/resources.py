"""What each kind of task asks of the cluster: change cores, memory, time limits, retries and caching here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp import dsl, kubernetes

from components.preflight.config import LONGEST_TRAINING_S, MOUNT, SECRET_KEYS
from components.shared.environment import RUN_ID_VARIABLE, RUN_NAME_VARIABLE

_GPU = "nvidia.com/gpu"
_HOUR_S = 3600
_RUN_FIELDS = {
    RUN_ID_VARIABLE: "metadata.labels['pipeline/runid']",
    RUN_NAME_VARIABLE: "metadata.annotations['pipelines.kubeflow.org/run_name']",
}
"""Where Kubeflow writes down, on each pod, which run it belongs to."""
_RETRY_WINDOW_S = 365 * 24 * _HOUR_S
"""Time from the start of a task's first attempt until Argo begins no other and ends the one that runs: longer than all
attempts together, each of which has a limit of its own. Argo reads 0 as no time at all, and KFP nothing as an hour."""
_SHM = "16Gi"
"""Of the memory limit of a task that runs a model: what its processes share, 64 MiB where nothing is said."""


@dataclass(frozen=True)
class Role:
    """What tasks of one kind need."""

    cpu: tuple[str, str]
    """Cores asked for, and at most."""
    memory: tuple[str, str]
    """Bytes asked for, and at most."""
    timeout_s: int
    """Time after which Kubernetes ends the task."""
    retries: int
    """Attempts after the first, for pods that are lost; Kubeflow Pipelines 2.16 makes them after every failure instead.
    What may pass otherwise, a task tries again itself."""
    cached: bool = False
    """Whether Kubeflow may take the outputs of an earlier task with the same inputs. A run that says it trained,
    measured or registered has done so."""
    model: bool = False
    """Runs a model itself, on a GPU."""
    volume: bool = True
    """Sees the shared volume."""
    secrets: tuple[str, ...] = ()
    told_run: bool = False
    """Has the id and the name of the run in its environment."""


ROLES = {
    # A second try would find the same.
    "check": Role(("500m", "1"), ("1G", "2G"), 600, 0, volume=False, secrets=tuple(SECRET_KEYS)),
    "data": Role(("1", "2"), ("4G", "8G"), 4 * _HOUR_S, 2, cached=True, secrets=("git", "hub", "storage")),
    # Starts a job and watches it. A retry adopts the job that runs. Longer than all of the job's own limits together.
    "launch": Role(("500m", "2"), ("2G", "4G"), LONGEST_TRAINING_S, 3, secrets=("hub",)),
    "model": Role(("4", "16"), ("32G", "128G"), 24 * _HOUR_S, 2, model=True, secrets=("hub",)),
    "report": Role(("1", "2"), ("2G", "4G"), _HOUR_S, 1, volume=False),
    # The verdict of a missed gate is the same the next time, and to Kubeflow every failure is alike.
    "register": Role(
        ("1", "2"), ("4G", "8G"), 6 * _HOUR_S, 0, secrets=("git", "model_registry", "storage"), told_run=True
    ),
    # Never waits for what may not be there: it has to run when preflight has failed.
    "clean_up": Role(("500m", "1"), ("1G", "2G"), 600, 3, volume=False),
}
_ROLE_OF = {
    "preflight": "check",
    "prepare_data": "data",
    "validate_data": "data",
    "train_sft": "launch",
    "train_grpo": "launch",
    "evaluate": "model",
    "report": "report",
    "register": "register",
    "clean_up": "clean_up",
}
_TRAINS_ITSELF = {"train_sft", "train_grpo"}


def on_one_machine(tasks: Mapping[str, dsl.PipelineTask]) -> None:
    """Have every task run by itself, training too, with a GPU for those that run a model."""
    for name, task in tasks.items():
        role = ROLES["model"] if name in _TRAINS_ITSELF else role_of(name)
        _size(task, role)
        if role.model:
            task.set_accelerator_type(_GPU).set_accelerator_limit(1)


def on_cluster(tasks: Mapping[str, dsl.PipelineTask], form: Mapping[str, Any], checked: Mapping[str, Any]) -> None:
    """Give every task what it needs in a shared cluster.

    Args:
        tasks: By name.
        form: The run form, from which images, names of secrets and the like are taken as parameters.
        checked: Outputs of preflight: what the pods that evaluate ask for.
    """
    for name, task in tasks.items():
        role = role_of(name)
        _size(task, role)
        task.set_container_image(form["image_gpu" if role.model else "image_light"])
        if role.retries:
            window = f"{_RETRY_WINDOW_S}s"
            task.set_retry(role.retries, backoff_duration="30s", backoff_factor=2, backoff_max_duration=window)
        kubernetes.set_timeout(task, role.timeout_s)
        kubernetes.set_image_pull_secrets(task, [form["image_pull_secret"]])
        kubernetes.add_pod_label(task, "app.kubernetes.io/managed-by", "grpo-pipeline")
        kubernetes.add_pod_label(task, "grpo-pipeline/task", name.replace(" ", "-").replace("_", "-"))
        for secret in role.secrets:
            keys = {key: key for key in SECRET_KEYS[secret]}
            kubernetes.use_secret_as_env(task, form[f"secret_{secret}"], keys, optional=True)
        for variable, field in _RUN_FIELDS.items() if role.told_run else ():
            kubernetes.use_field_path_as_env(task, variable, field)
        if role.volume:
            kubernetes.mount_pvc(task, form["cluster_volume_claim"], MOUNT)
        if role.model:
            _place(task, form, checked)


def role_of(name: str) -> Role:
    """Return the role of a task: `evaluate sft` is one that evaluates."""
    return ROLES[_ROLE_OF[name.partition(" ")[0]]]


def _size(task: dsl.PipelineTask, role: Role) -> None:
    task.set_cpu_request(role.cpu[0]).set_cpu_limit(role.cpu[1])
    task.set_memory_request(role.memory[0]).set_memory_limit(role.memory[1])
    task.set_caching_options(role.cached)


def _place(task: dsl.PipelineTask, form: Mapping[str, Any], checked: Mapping[str, Any]) -> None:
    """Have a task that runs a model itself on a node with the right GPU."""
    task.set_accelerator_type(_GPU).set_accelerator_limit(checked["evaluate_gpus"])
    kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=_SHM)
    kubernetes.add_toleration_json(task, form["cluster_tolerations"])
    kubernetes.add_node_selector_json(task, checked["evaluate_node_selector"])
