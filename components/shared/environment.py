"""Every environment variable of this project, with who sets it and who reads it, and the cores of a process."""

import math
import os
import sys
from pathlib import Path

# Set by the user.
WORK_VARIABLE = "GRPO_PIPELINE_WORK"  # folder for unfinished work instead of outputs/work; shared.stage
KUBECONFIG_VARIABLE = "GRPO_PIPELINE_KUBECONFIG"  # instead of the pod's service account or kubectl's own; cluster
# Set by the user to reach Kubeflow Pipelines, read by `grpo-pipeline cluster`.
ENDPOINT_VARIABLES = ("GRPO_PIPELINE_ENDPOINT", "KF_PIPELINES_ENDPOINT")  # its address
NAMESPACE_VARIABLE = "GRPO_PIPELINE_NAMESPACE"  # of runs on a multi-user installation
TOKEN_VARIABLE = "GRPO_PIPELINE_TOKEN"  # bearer token
TOKEN_FILE_VARIABLES = ("GRPO_PIPELINE_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH")  # read for each request
COOKIE_VARIABLE = "GRPO_PIPELINE_COOKIE"  # cookies of a browser that has logged in
CA_VARIABLE = "GRPO_PIPELINE_CA_FILE"  # certificate authorities that the endpoint is verified against
# Set by the user or from a secret to reach Kubeflow Model Registry, read by register.
CATALOGUE_TOKEN_VARIABLE = "MODEL_REGISTRY_TOKEN"  # bearer token
CATALOGUE_TOKEN_FILE_VARIABLES = ("MODEL_REGISTRY_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH")  # read for each request
CATALOGUE_CA_VARIABLE = "MODEL_REGISTRY_CA_FILE"  # certificate authorities that its certificate is verified against
# Set by the user or from a secret, with S3's keys: read by DVC, and by register for the config of a new registry.
S3_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # address of a server other than Amazon's
S3_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Set by `grpo-pipeline run`.
JOURNAL_VARIABLE = "GRPO_PIPELINE_JOURNAL"  # file to which shared.stage appends when a stage started, finished, failed
# Set in every pod, by Kubernetes.
CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"  # shared.progress, pipelines.cluster
# Set in a task's pod, by Kubeflow Pipelines and by pipelines.
POD_VARIABLE = "KFP_POD_NAME"  # read by shared.stage and cluster
RUN_ID_VARIABLE = "GRPO_PIPELINE_RUN_ID"  # of the Kubeflow run; shared.execution, register
RUN_NAME_VARIABLE = "GRPO_PIPELINE_RUN_NAME"  # of the Kubeflow run, by the component; shared, register
IMAGE_VARIABLE = "GRPO_PIPELINE_IMAGE"  # reference of the task's image; shared.execution
# Set in a task's pod by Kubeflow's plugin for MLflow: the run that it has begun for the task; shared.live
MLFLOW_RUN_VARIABLE = "MLFLOW_RUN_ID"
MLFLOW_URI_VARIABLE = "MLFLOW_TRACKING_URI"
MLFLOW_WORKSPACE_VARIABLE = "MLFLOW_WORKSPACE"
# Set in the pods of a TrainJob where Kubeflow Trainer takes its progress: an address and two files; policy.tracking
TRAINER_VARIABLES = tuple(f"KUBEFLOW_TRAINER_SERVER_{each}" for each in ("URL", "CA_CERT", "TOKEN"))
# Set in the images.
REVISION_VARIABLE = "GRPO_PIPELINE_REVISION"  # git revision of the code; shared.execution
LOCK_VARIABLE = "GRPO_PIPELINE_LOCK"  # SHA-256 of requirements.lock; shared.execution
# Set for the ranks of one machine.
STORE_VARIABLE = "GRPO_PIPELINE_STORE"  # URL of the store at which they meet, instead of torchrun's
# Set by train_grpo or in the TrainJob's manifest for its ranks and servers.
TRAIN_JOB_VARIABLE = "GRPO_PIPELINE_TRAIN_JOB"  # name of the TrainJob that a pod belongs to; cluster.job
JOB_VARIABLE = "GRPO_PIPELINE_JOB"  # folder of the job that a vLLM server's pod belongs to; cluster.servers
SERVERS_VARIABLE = "GRPO_PIPELINE_SAMPLERS"  # addresses of running vLLM servers, separated by commas
KEY_VARIABLE = "GRPO_PIPELINE_KEY"  # without which the vLLM servers of a TrainJob refuse a request
WEIGHTS_VARIABLE = "GRPO_PIPELINE_WEIGHTS"  # folder through which weights reach the sampler

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
"""Variables for processes of one machine, which would otherwise listen on the interface of the host's name."""
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""CPU time per period in microseconds, of a container with a limit: `200000 100000` are two cores."""


def limit_spin() -> None:
    """Make OpenMP threads spin only briefly while they wait for one another, unless the user has set how long.

    With libgomp's default of 300,000 iterations, a step next to one or two busy processes takes 2 to 20 times as long.
    1,000 avoid that, but cost 4 to 23 % of a step on idle cores (benchmarks/busy.py). Torch's libgomp reads it once.
    """
    if os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def available_cores() -> int:
    """Return the cores that this process may use, within the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = _CPU_LIMIT.read_text("utf-8") if _CPU_LIMIT.is_file() else "max"
    limit, _, period = text.partition(" ")
    if limit == "max":
        return cores
    return max(1, min(cores, math.ceil(int(limit) / int(period))))


def cores_per_rank(num_ranks: int | None = None) -> int:
    """Return the cores of each of `num_ranks` processes, by default those that torchrun started on this machine."""
    return max(1, available_cores() // (num_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
