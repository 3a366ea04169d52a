"""What samples in a run: transformers on the weights under training, or vLLM on a copy of them."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from components.policy.checkpoint import Checkpoint
from components.rollout.sampler import Sampler
from components.rollout.transformers_sampler import ShardedSampler, TransformersSampler
from components.rollout.vllm.engine import VllmEngine
from components.rollout.vllm.sampler import Engine, VllmSampler
from components.rollout.vllm.servers import VllmServers
from components.shared.environment import SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.train_grpo.config import TrainGRPOConfig


@contextmanager
def sampler_of_rank(config: TrainGRPOConfig, checkpoint: Checkpoint, reference: Path, log: Path) -> Iterator[Sampler]:
    """Give what this process samples with, made before the weights of `checkpoint` are sharded."""
    if config.sampler.servers or config.sampler.vllm:
        with closing(vllm_sampler(config, checkpoint, _engine(config, checkpoint, reference, log))) as sampler:
            yield sampler
    elif config.engine.zero_stage == 3:
        yield ShardedSampler(checkpoint, config.sampling.max_batch_size)
    else:
        yield TransformersSampler(checkpoint, config.sampling.max_batch_size)


def vllm_sampler(config: TrainGRPOConfig, checkpoint: Checkpoint, engine: Engine) -> VllmSampler:
    """Return a sampler on an engine with weights of its own, which go by way of the run's folder."""
    return VllmSampler(
        engine,
        checkpoint,
        temperature=config.sampling.temperature,
        max_mismatch=config.sampler.max_mismatch,
        folder=Path(os.environ[WEIGHTS_VARIABLE]),
    )


def _engine(config: TrainGRPOConfig, checkpoint: Checkpoint, reference: Path, log: Path) -> Engine:
    if config.sampler.servers:
        return VllmServers(checkpoint, os.environ[SERVERS_VARIABLE].split(","), config.sampler.servers)
    assert config.sampler.vllm is not None
    return VllmEngine(checkpoint, reference, config.sampler.vllm, dtype=config.engine.dtype, log=log)
