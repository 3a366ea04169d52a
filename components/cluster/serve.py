"""A vLLM server in a pod of its own: `python -m components.cluster.serve`, beside a job that samples from it.

The job says which model and with which settings; its folder is named in the environment.
"""

import os
import tempfile
from pathlib import Path

import torch

from components.cluster.job import Job
from components.cluster.servers import server_command, server_environment
from components.cluster.trainjob.manifest import SERVER_PORT
from components.policy.config import Dtype
from components.rollout.vllm.config import ServersConfig
from components.shared.config import validate
from components.shared.environment import JOB_VARIABLE
from components.shared.task import keep_files_in_group


def main() -> None:
    """Become the server."""
    keep_files_in_group()
    job = Job.read(Path(os.environ[JOB_VARIABLE]))
    # Its GPUs are the pod's: the devices that the params name are those of a machine without pods.
    settings = {**job.config["sampler"]["servers"], "devices": None}
    config = validate(ServersConfig, settings, name="train_grpo.sampler.servers")
    devices = ",".join(map(str, range(torch.cuda.device_count()))) or None
    dtype: Dtype = "bfloat16" if job.config["engine"]["precision"] == "bf16" else "float32"
    command = server_command(Path(job.folders["reference"]), config, dtype, devices)
    environment = server_environment(config, devices, tempfile.mkdtemp(prefix="vllm-"))
    os.execve(command[0], [*command, "--host=0.0.0.0", f"--port={SERVER_PORT}"], environment)


if __name__ == "__main__":
    main()
