"""What samples in a run: transformers on the weights under training, or vLLM on a copy of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from components.policy.checkpoint import Checkpoint
from components.policy.engine import PolicyEngine
from components.policy.sequences import TokenSequence
from components.rollout.completion import Generate
from components.rollout.sampler import Sampler
from components.rollout.sharded_engine import ShardedEngine
from components.rollout.transformers_engine import TransformersEngine
from components.rollout.vllm_engine import VllmEngine
from components.rollout.vllm_server import VllmServers
from components.rollout.weight_sync import WeightSync
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.samplers import SERVERS_VARIABLE, WEIGHTS_VARIABLE, dtype_of

AnySampler = Sampler | ShardedEngine | TransformersEngine


@dataclass
class Sampling:
    """What a process samples with, and how its weights are brought up to date."""

    generate: Generate
    sync: Callable[[int], float]
    """Takes the number of steps done; returns the seconds it took."""
    rest: Callable[[], None]
    """Gives memory back until samples are next wanted."""


@contextmanager
def sampler_of_rank(
    config: TrainGRPOConfig, checkpoint: Checkpoint, reference: Path, log: Path
) -> Iterator[AnySampler]:
    """Give what this process samples with, made before the weights of `checkpoint` are cut up."""
    sampler = config.sampler
    if sampler.servers:
        urls = os.environ[SERVERS_VARIABLE].split(",")
        deadlines = {
            "request_deadline_s": sampler.servers.request_deadline_s,
            "lost_deadline_s": sampler.servers.lost_deadline_s,
        }
        weights_by = sampler.servers.weights_by
        with closing(VllmServers(checkpoint, urls, **deadlines, weights_by=weights_by)) as servers:
            yield servers
    elif sampler.vllm:
        with closing(VllmEngine(checkpoint, reference, sampler.vllm, dtype=dtype_of(config), log=log)) as engine:
            yield engine
    elif config.engine.zero_stage == 3:
        yield ShardedEngine(checkpoint, config.sampling.max_batch_size)
    else:
        yield TransformersEngine(checkpoint, config.sampling.max_batch_size)


def attached(
    config: TrainGRPOConfig,
    sampler: AnySampler,
    policy: PolicyEngine,
    checkpoint: Checkpoint,
    probes: list[TokenSequence],
) -> Sampling:
    """Tie what samples to the policy that is trained."""
    if isinstance(sampler, TransformersEngine):
        return Sampling(sampler, _nothing_to_do, _stay)
    if isinstance(sampler, ShardedEngine):
        sampler.whole_weights = policy.whole_weights
        return Sampling(sampler, _nothing_to_do, _stay)
    sync = WeightSync(
        sampler,
        policy,
        checkpoint,
        probes,
        temperature=config.sampling.temperature,
        max_mismatch=config.sampler.max_mismatch,
        folder=Path(os.environ[WEIGHTS_VARIABLE]),
    )
    return Sampling(sampler, sync, sampler.sleep if isinstance(sampler, VllmEngine) else _stay)


def _nothing_to_do(_: int) -> float:
    return 0.0


def _stay() -> None:
    """Hold no memory of its own, or hold it on another GPU."""
