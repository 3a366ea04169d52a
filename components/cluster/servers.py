"""`python -m components.cluster.servers` becomes the vLLM server of a pod that runs beside a TrainJob's ranks."""

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
    """Become the server of this pod, with the model and the settings of the job that it belongs to."""
    keep_files_in_group()
    job = Job.read_in_pod(Path(os.environ[JOB_VARIABLE]))
    config = validate(ServersConfig, job.config["sampler"]["servers"], name="train_grpo.sampler.servers")
    # The GPUs are the pod's: devices in the params are those of a machine without pods.
    devices = ",".join(map(str, range(torch.cuda.device_count()))) or None
    engine = job.config["engine"]
    reference = Path(job.folders["reference"])
    command = server_command(
        weights_folder(reference),
        config,
        job.config["sampler"]["dtype"] or ("bfloat16" if engine["precision"] == "bf16" else "float32"),
        devices,
        engine["lora"] and LoraConfig.model_validate(engine["lora"]),
        number=zlib.crc32(socket.gethostname().encode()),  # no two pods have the same name
        has_tokenizer=has_tools(reference),
    )
    variables = server_environment(config, devices, tempfile.mkdtemp(prefix="vllm-"))
    address = ["--host=0.0.0.0", f"--port={SERVER_PORT}", f"--middleware={RequireKey.__module__}.{RequireKey.__name__}"]
    os.execve(command[0], [*command, *address], variables)


if __name__ == "__main__":
    serve_in_pod()
