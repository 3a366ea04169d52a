"""Where a stage's training runs on a cluster, and with which resources and limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from components.shared.config import Config
from components.shared.deployment import KubernetesName
from components.shared.images import GPU

GPU_RESOURCE, GPU_TYPE_LABEL = "nvidia.com/gpu", "nvidia.com/gpu.product"
_DAY_S = 24 * 3600
_CPU_PER_GPU, _CPU_LIMIT, _SHM_GIB_PER_GPU = 3, 4, 2
_TRAINING_GIB, _EVALUATION_GIB = 64, 32  # memory of a pod if neither the params nor preflight set it


class Requests(NamedTuple):
    """Resources of a training pod: cores that it requests and that it may use; memory that includes shared memory."""

    cpu: int
    cpu_limit: int
    memory_gib: int
    shm_gib: int


class Toleration(Config):
    """A taint of nodes that pods of the job tolerate, as in Kubernetes."""

    key: str = Field(default="", max_length=317)
    """Key of the taint; empty with `Exists` for every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    """Value of the taint, with `Equal`."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Empty for every effect."""


class ClusterConfig(Config):
    """Where and on what a training job runs, how long each of its phases may take, and when it is removed."""

    namespace: str = ""
    """Namespace of the job; empty for that of the pod that submits it."""
    image: str = Field(GPU, min_length=1)
    """Image of the job's pods, with torch, DeepSpeed and vLLM."""
    nodes: int = Field(default=1, gt=0)
    """Pods that train together; `engine.num_processes` are divided evenly among them."""
    gpus_per_node: int = Field(default=1, ge=0)
    """GPUs of each pod, one for each process; 0 trains on CPUs."""
    gpu_type: str | None = None
    """Value of the node label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3; null for any."""
    cpu_per_node: int | None = Field(default=None, gt=0)
    """CPU cores that each pod requests; it may use up to four in any case. Null for 3 per GPU, or 1 without GPUs."""
    memory_per_node_gib: int | None = Field(default=None, gt=0)
    """GiB of memory of each pod, in addition to shared memory. Null for what the model takes, or for 64 where preflight
    cannot tell its size."""
    shm_gib: int | None = Field(default=None, gt=0)
    """GiB of /dev/shm in each pod; the pod requests them as memory as well. Null for 2 per GPU, or 1 without
    GPUs."""
    evaluate_memory_gib: int | None = Field(default=None, gt=0)
    """GiB of memory of the pod that evaluates. Null for what the model takes, or for 32 where preflight cannot tell its
    size."""
    autoscaling: bool = False
    """Whether the cluster adds nodes for pods that fit no present one; preflight then asks for no node that fits."""
    queue: str | None = None
    """LocalQueue of Kueue; null to run without Kueue."""
    volume: KubernetesName = "grpo-pipeline"
    """Claim of the volume that all pods share."""
    mount: str = Field(default="/work", pattern=r"^/.+")
    """Folder at which every pod has the volume."""
    tolerations: list[Toleration] = Field(default_factory=list)
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    secrets: dict[str, list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]]] = Field(default_factory=dict)
    """Names of secrets, each with those of its keys that become environment variables of the same name."""
    rollout_servers: int = Field(default=0, ge=0)
    """Pods with a vLLM server each, as many as the runtime grpo-torch-vllm has; 0 for the runtime grpo-torch."""
    queue_timeout_s: float = Field(default=_DAY_S, gt=0)
    """Seconds to wait for admission by the queue, each time the job is suspended."""
    start_timeout_s: float = Field(default=1800, gt=0)
    """Seconds from admission until all pods run: scheduling and pulling of images."""
    stall_timeout_s: float = Field(default=3600, gt=0)
    """Seconds for which running pods may print nothing."""
    training_timeout_s: int = Field(default=7 * _DAY_S, gt=0)
    """Seconds that the job may run, counted again from each admission."""
    max_restarts: int = Field(default=3, ge=0)
    """Retries of the step after transient failures: a job that ended because of one (a lost node, an eviction) is
    submitted again; one that still runs when the API server returns is adopted."""

    @property
    def training_pod(self) -> Requests:
        """Resources of each training pod."""
        cpu = self.cpu_per_node or max(1, _CPU_PER_GPU * self.gpus_per_node)
        shm_gib = self.shm_gib or max(1, _SHM_GIB_PER_GPU * self.gpus_per_node)
        # Files in /dev/shm count as memory of the pod: without room for them the kernel kills it.
        memory_gib = (self.memory_per_node_gib or _TRAINING_GIB) + shm_gib
        return Requests(cpu, max(cpu, _CPU_LIMIT), memory_gib, shm_gib)

    @property
    def evaluation_gib(self) -> int:
        """Memory that the evaluation pod requests and may use."""
        return self.evaluate_memory_gib or _EVALUATION_GIB

    @property
    def labels(self) -> dict[str, str]:
        """Labels that a node for training and evaluation must have."""
        gpu_label = {GPU_TYPE_LABEL: self.gpu_type} if self.gpu_type else {}
        return {**self.node_selector, **gpu_label}

    @property
    def deadline_s(self) -> float:
        """Longest time in seconds that the step which submits the job can take, with all restarts."""
        attempt_s = self.queue_timeout_s + self.start_timeout_s + self.training_timeout_s
        return (1 + self.max_restarts) * attempt_s


@dataclass(frozen=True)
class ClusterStage:
    """A stage of a run whose ranks run on a cluster."""

    config: ClusterConfig
    run_id: str
    stage: str
    records: Path
    """Folder for the manifest, events and logs of the stage's jobs; it outlives the run."""
    run_name: str = ""
    """Name of the run on Kubeflow's page; empty if unknown."""


_current: ContextVar[ClusterStage | None] = ContextVar("cluster_stage", default=None)


def current_stage() -> ClusterStage | None:
    """Return the stage whose ranks run on a cluster, or None if ranks run on this machine."""
    return _current.get()


@contextmanager
def on_cluster(stage: ClusterStage) -> Iterator[None]:
    """Make `run_ranks` run the ranks of `stage` on a cluster inside the block."""
    token = _current.set(stage)
    try:
        yield
    finally:
        _current.reset(token)
