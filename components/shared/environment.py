"""Every environment variable of this project: its name, who sets it and who reads it."""

JOURNAL_VARIABLE = "GRPO_PIPELINE_JOURNAL"
"""File to which each stage appends when it started, finished or failed.
Set by `grpo-pipeline run` (pipelines), read by components.shared.stage."""
WORK_VARIABLE = "GRPO_PIPELINE_WORK"
"""Folder for unfinished work instead of outputs/work. Set by the user, read by components.shared.stage."""
TERMINAL_VARIABLE = "GRPO_PIPELINE_TERMINAL"
"""Terminal to draw progress on when standard output is a pipe, as it is under Kubeflow's local runner.
Set by `grpo-pipeline run`, read by components.shared.progress, removed by components.cluster.rank."""
POD_VARIABLE = "KFP_POD_NAME"
"""Name of the task's pod. Set by Kubeflow Pipelines, read by components.shared.stage and components.cluster."""
JOB_VARIABLE = "GRPO_PIPELINE_JOB"
"""Folder of the job that a vLLM server's pod belongs to.
Set in the TrainJob's manifest, read by components.cluster.servers."""
SERVERS_VARIABLE = "GRPO_PIPELINE_SAMPLERS"
"""Addresses of running vLLM servers, separated by commas.
Set by train_grpo and in the TrainJob's manifest, read by train_grpo's ranks."""
WEIGHTS_VARIABLE = "GRPO_PIPELINE_WEIGHTS"
"""Folder through which weights reach the sampler. Set by train_grpo, read by its ranks."""
KUBECONFIG_VARIABLE = "GRPO_PIPELINE_KUBECONFIG"
"""Kubeconfig to use instead of the pod's service account or kubectl's own.
Set by the user, read by components.cluster."""
REVISION_VARIABLE = "GRPO_PIPELINE_REVISION"
"""Git revision of the code in an image. Set by images/*/Containerfile, read by register."""
RUN_ID_VARIABLE = "GRPO_PIPELINE_RUN_ID"
"""Id of the Kubeflow run. Set in the task's pod (pipelines), read by register."""
RUN_NAME_VARIABLE = "GRPO_PIPELINE_RUN_NAME"
"""Name of the Kubeflow run. Set in the task's pod (pipelines), read by register."""
ENDPOINT_VARIABLES = ("GRPO_PIPELINE_ENDPOINT", "KF_PIPELINES_ENDPOINT")
"""Address of Kubeflow Pipelines. Set by the user, read by `grpo-pipeline cluster`, as are the next five."""
NAMESPACE_VARIABLE = "GRPO_PIPELINE_NAMESPACE"
"""Namespace of runs on a multi-user installation."""
TOKEN_VARIABLE = "GRPO_PIPELINE_TOKEN"
"""Bearer token for Kubeflow Pipelines."""
TOKEN_FILE_VARIABLES = ("GRPO_PIPELINE_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH")
"""File with the bearer token, read again for each request."""
COOKIE_VARIABLE = "GRPO_PIPELINE_COOKIE"
"""Cookies of a browser that has logged in."""
CA_VARIABLE = "GRPO_PIPELINE_CA_FILE"
"""Certificate authorities that the endpoint is verified against."""
CATALOGUE_TOKEN_VARIABLE = "MODEL_REGISTRY_TOKEN"
"""Bearer token for Kubeflow Model Registry. Set by the user or from a secret, read by register, as are the next two."""
CATALOGUE_TOKEN_FILE_VARIABLES = ("MODEL_REGISTRY_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH")
"""File with that token, which is read each time: such files are renewed."""
CATALOGUE_CA_VARIABLE = "MODEL_REGISTRY_CA_FILE"
"""File with the certificates of the authority that the model registry's certificate is from."""
