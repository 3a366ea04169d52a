"""What the processes of a run share for sampling, run beside them: servers, and the way of the weights to them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.cluster.config import current_stage
from components.cluster.watchdog import memory_folder
from components.shared.environment import SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.train_grpo.config import TrainGRPOConfig


@contextmanager
def samplers_running(config: TrainGRPOConfig, reference: Path, work: Path) -> Iterator[None]:
    """Have what processes share for sampling while the block runs: servers, and the way of the weights to them.

    Servers that run already, elsewhere, are taken as they are. On a cluster they are pods of the job, and weights go by
    way of the volume.
    """
    servers = config.sampler.servers
    if servers is None and config.sampler.vllm is None:
        yield
        return
    stage = current_stage()
    if stage is not None:
        if servers is not None and not stage.config.rollout_servers:
            raise PipelineError("sampler.servers needs pods to run in: set cluster.rollout_servers to their number")
        (work / "weights").mkdir(exist_ok=True)
        with _told(WEIGHTS_VARIABLE, str(work / "weights")):
            yield
        return
    with memory_folder(reference, work / "weights") as folder, _told(WEIGHTS_VARIABLE, str(folder)):
        if servers is None or SERVERS_VARIABLE in os.environ:
            yield
            return
        from components.cluster.servers import vllm_servers

        with (
            vllm_servers(reference, servers, dtype=config.engine.dtype, logs=work / "servers") as urls,
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
