"""Where a stage's training runs on a cluster, and with which resources and limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.shared.config import Config
from components.shared.images import GPU

_DAY_S = 24 * 3600


class Toleration(Config):
    """A taint of nodes that pods of the job tolerate, as in Kubernetes."""

    key: str = Field(default="", max_length=317)
    """Key of the taint; empty with `Exists` for every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    """Value of the taint, with `Equal`."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Empty for every effect."""

    @model_validator(mode="after")
    def _check_operator(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise ValueError("operator: Exists takes no value")
        if self.operator == "Equal" and not self.key:
            raise ValueError("operator: Equal needs a key")
        return self


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
    cpu_per_node: int = Field(default=8, gt=0)
    """CPU cores of each pod."""
    memory_per_node_gib: int = Field(default=64, gt=0)
    """GiB of memory of each pod, in addition to shared memory."""
    shm_gib: int = Field(default=16, gt=0)
    """GiB of /dev/shm in each pod; the pod requests them as memory as well."""
    queue: str | None = None
    """LocalQueue of Kueue; null to run without Kueue."""
    volume: str = Field(default="grpo-pipeline", min_length=1)
    """Claim of the volume that all pods share."""
    mount: str = Field(default="/work", pattern=r"^/.+")
    """Folder at which every pod has the volume."""
    tolerations: list[Toleration] = Field(default_factory=list)
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    secrets: dict[str, list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]]] = Field(default_factory=dict)
    """Names of secrets, each with those of its keys that become environment variables of the same name."""
    service_account: str = ""
    """Service account of the job's pods; empty for that of the runtime."""
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
    delete: Literal["always", "on_success", "never"] = "always"
    """When a job that has ended is removed; its logs are kept in any case."""

    @property
    def deadline_s(self) -> float:
        """Seconds within which the step that submits the job ends, whatever happens."""
        once = self.queue_timeout_s + self.start_timeout_s + self.training_timeout_s
        return (1 + self.max_restarts) * once


@dataclass(frozen=True)
class ClusterStage:
    """A stage of a run whose ranks run on a cluster."""

    config: ClusterConfig
    run_id: str
    stage: str
    records: Path
    """Folder for the manifest, events and logs of the stage's jobs; it outlives the run."""


_current: ContextVar[ClusterStage | None] = ContextVar("cluster_stage", default=None)


def current_stage() -> ClusterStage | None:
    """Return the stage whose ranks run on a cluster, or None where ranks run on this machine."""
    return _current.get()


@contextmanager
def on_cluster(stage: ClusterStage) -> Iterator[None]:
    """Have ranks that are launched in the block run on a cluster."""
    before = _current.set(stage)
    try:
        yield
    finally:
        _current.reset(before)
