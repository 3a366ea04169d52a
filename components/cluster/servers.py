"""The vLLM server of a pod that runs beside a TrainJob's ranks: `python -m components.cluster.servers`."""

import os
import socket
import tempfile
import zlib
from pathlib import Path

import torch

from components.cluster.job import Job
from components.cluster.manifest import SERVER_PORT
from components.policy.config import LoraConfig
from components.rollout.vllm.config import ServersConfig
from components.rollout.vllm.process import server_command, server_environment
from components.rollout.vllm.servers import RequireKey
from components.shared.config import validate
from components.shared.environment import JOB_VARIABLE
from components.shared.model import has_tools, weights_folder
from components.shared.stage import keep_files_in_group


def serve_in_pod() -> None:
    """Replace this process by the pod's server, with the model and the settings of its job."""
    keep_files_in_group()
    job = Job.read_in_pod(Path(os.environ[JOB_VARIABLE]))
    config = validate(ServersConfig, job.config["sampler"]["servers"], name="train_grpo.sampler.servers")
    # All GPUs of the pod: `devices` in the params are for runs on one machine.
    devices = ",".join(map(str, range(torch.cuda.device_count()))) or None
    engine = job.config["engine"]
    dtype_of_engine = "bfloat16" if engine["precision"] == "bf16" else "float32"
    reference = Path(job.folders["reference"])
    command = server_command(
        weights_folder(reference),
        config,
        job.config["sampler"]["dtype"] or dtype_of_engine,
        devices,
        LoraConfig.model_validate(engine["lora"]) if engine["lora"] else None,
        number=zlib.crc32(socket.gethostname().encode()),  # no two pods have the same name
        has_tokenizer=has_tools(reference),
    )
    variables = server_environment(config, devices, tempfile.mkdtemp(prefix="vllm-"))
    address = ["--host=0.0.0.0", f"--port={SERVER_PORT}", f"--middleware={RequireKey.__module__}.{RequireKey.__name__}"]
    os.execve(command[0], [*command, *address], variables)


if __name__ == "__main__":
    serve_in_pod()
