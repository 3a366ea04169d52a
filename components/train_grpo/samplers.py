"""What the processes of a run share for sampling, run beside them: servers, and the way of the weights to them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.launch.memory_folder import memory_folder
from components.rollout.vllm_config import Dtype
from components.train_grpo.config import TrainGRPOConfig

SERVERS_VARIABLE = "GRPO_PIPELINE_SAMPLERS"
"""Names the addresses of vLLM servers that run already, with commas between them."""
WEIGHTS_VARIABLE = "GRPO_PIPELINE_WEIGHTS"
"""Names the folder by which weights reach the sampler."""


@contextmanager
def samplers_running(config: TrainGRPOConfig, reference: Path, work: Path) -> Iterator[None]:
    """Have what processes share for sampling while the block runs: servers, and the way of the weights to them.

    Servers that run already, elsewhere, are taken as they are.
    """
    servers = config.sampler.servers
    if servers is None and config.sampler.vllm is None:
        yield
        return
    with memory_folder(reference, work / "weights") as folder, _told(WEIGHTS_VARIABLE, str(folder)):
        if servers is None or SERVERS_VARIABLE in os.environ:
            yield
            return
        from components.launch.servers import vllm_servers

        with (
            vllm_servers(reference, servers, dtype=dtype_of(config), logs=work / "launch") as urls,
            _told(SERVERS_VARIABLE, ",".join(urls)),
        ):
            yield


@contextmanager
def _told(variable: str, value: str) -> Iterator[None]:
    """Tell the processes that are started in the block, unless somebody else has told them."""
    if variable in os.environ:
        yield
        return
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]


def dtype_of(config: TrainGRPOConfig) -> Dtype:
    """Return the type of the weights that a sampler holds."""
    return "bfloat16" if config.engine.precision == "bf16" else "float32"
