"""What a training job asks of a cluster."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.shared.config import Config

_DAY_S = 24 * 3600


class Toleration(Config):
    """A taint of nodes that pods of the job put up with; in Kubernetes' own words."""

    key: str = Field(default="", max_length=317)
    """Taint; empty with `Exists` for every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    """Of the taint, with `Equal`."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Empty for every effect."""

    @model_validator(mode="after")
    def _is_one_of_kubernetes(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise ValueError("operator: Exists takes no value")
        if self.operator == "Equal" and not self.key:
            raise ValueError("operator: Equal needs a key")
        return self


class ClusterConfig(Config):
    """Where and on what a training job runs, how long each of its phases may take, and what becomes of it."""

    namespace: str = ""
    """Of the job; empty for that of the pod which submits it."""
    image: str = Field(min_length=1)
    """With torch, DeepSpeed and vLLM, for the pods of the job."""
    nodes: int = Field(default=1, gt=0)
    """Pods that train together. With those of `engine.num_processes` each runs as many processes."""
    gpus_per_node: int = Field(default=1, ge=0)
    """GPUs of each pod, one for each process; 0 trains on processors."""
    gpu_type: str | None = None
    """Value of the node label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3; null for any."""
    cpu_per_node: int = Field(default=8, gt=0)
    """Cores of each pod."""
    memory_per_node_gib: int = Field(default=64, gt=0)
    """GiB of each pod, without the shared memory."""
    shm_gib: int = Field(default=16, gt=0)
    """GiB of /dev/shm in each pod, which counts towards its memory."""
    queue: str | None = None
    """LocalQueue of Kueue; null for none."""
    volume: str = Field(default="grpo-pipeline", min_length=1)
    """Claim of the volume that all pods share."""
    mount: str = Field(default="/work", pattern=r"^/.+")
    """Folder at which every pod has the volume."""
    tolerations: list[Toleration] = Field(default_factory=list)
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    secrets: dict[str, list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]]] = Field(default_factory=dict)
    """Names of secrets, each with its keys that become environment variables of the same name."""
    service_account: str = ""
    """Of the job's pods; empty for that of the runtime."""
    rollout_servers: int = Field(default=0, ge=0)
    """Pods with a vLLM server each, as many as the runtime grpo-torch-vllm has; 0 for the runtime without."""
    queue_timeout_s: float = Field(default=_DAY_S, gt=0)
    """Longest wait for admission by the queue, each time the job is suspended."""
    start_timeout_s: float = Field(default=1800, gt=0)
    """Longest wait from admission until all pods run: scheduling and pulling of images."""
    stall_timeout_s: float = Field(default=3600, gt=0)
    """Longest time in which running pods neither print nor end."""
    training_timeout_s: int = Field(default=7 * _DAY_S, gt=0)
    """Longest run of the job, counted again from each admission."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that a step goes on by itself after what may pass: a job that ended for such a cause (a lost node, an
    eviction) is submitted again, one that runs while the API server is away is adopted."""
    delete: Literal["always", "on_success", "never"] = "always"
    """When the job is removed once it has ended and its logs are kept."""

    @property
    def deadline_s(self) -> float:
        """Time within which the step that submits the job has ended, whatever happens."""
        once = self.queue_timeout_s + self.start_timeout_s + self.training_timeout_s
        return (1 + self.max_restarts) * once
