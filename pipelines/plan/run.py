"""A run in plain numbers: a model, the work of a step, and how it is spread over GPUs."""

from dataclasses import dataclass
from typing import Literal

from components.policy.config import ALL_LINEAR, EngineConfig
from components.preflight.config import Params
from components.shared.errors import PipelineError
from components.train_grpo.config import SamplerConfig
from pipelines.plan.hardware import GIB
from pipelines.plan.models import ModelShape, shape_of

Offload = Literal["none", "optimizer", "all"]
Reference = Literal["none", "replicated", "sharded", "offloaded"]
SamplerEngine = Literal["transformers", "vllm", "vllm_server"]

MEAN_COMPLETION_FRACTION = 0.4
"""Mean length of a completion as a fraction of its limit, where it is not given (assumed)."""
MEAN_PROMPT_FRACTION = 0.25
"""The same of prompts (assumed)."""


@dataclass(frozen=True)
class Work:
    """What a step computes."""

    prompts: int
    group_size: int
    prompt_tokens: int
    """The longest prompt."""
    completion_tokens: int
    """The longest completion: some always reach the limit, so this is how long sampling takes."""
    mean_prompt_tokens: float
    mean_completion_tokens: float
    minibatches: int = 1
    """Optimizer steps per rollout."""
    updates: int = 1
    """Passes over a rollout."""
    shared_prompts: bool = True
    """Whether a group stays on one GPU, and its prompt is computed once."""

    @property
    def completions(self) -> int:
        """All completions of a step."""
        return self.prompts * self.group_size


@dataclass(frozen=True)
class Engine:
    """How the policy is sharded and updated."""

    zero_stage: int
    element_bytes: int
    """Bytes of a weight or activation: 2 for bf16, 4 for fp32."""
    gradient_checkpointing: bool
    micro_batch_tokens: int
    offload: Offload = "none"
    lora_rank: int = 0
    """0 trains all weights."""
    lora_targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampler:
    """How completions are sampled."""

    engine: SamplerEngine
    max_batch_size: int
    """Completions at once on a GPU; vLLM has as many as its cache has room for, if that is given."""
    num_servers: int = 0
    """GPUs that do nothing but sample; 0 where all do both."""
    tensor_parallel: int = 1
    """GPUs that hold a copy of the weights together."""
    cache_bytes: float = 0.0
    """vLLM's KV cache on all GPUs of a copy; 0 for as much as is needed."""
    overlap: bool = False
    """Whether the next rollout is sampled while the policy is updated."""


@dataclass(frozen=True)
class Run:
    """All of it."""

    shape: ModelShape
    num_gpus: int
    work: Work
    engine: Engine
    sampler: Sampler
    reference: Reference

    @property
    def num_trainers(self) -> int:
        """GPUs that hold the policy and update it."""
        return self.num_gpus - self.sampler.num_servers

    @property
    def tokens_at_once(self) -> int:
        """Tokens of the largest micro-batch of a GPU."""
        work = self.work
        longest = work.prompt_tokens + work.completion_tokens
        groups = -(-work.prompts // work.minibatches // self.num_trainers)
        available = groups * (work.prompt_tokens + work.group_size * work.completion_tokens)
        # A sequence that is longer than a micro-batch gets one of its own.
        return max(longest, min(self.engine.micro_batch_tokens, available))

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        rank, layers = self.engine.lora_rank, self.shape.num_layers
        if not rank:
            return self.shape.num_parameters
        sizes = self.shape.projections
        targets = sizes if ALL_LINEAR in self.engine.lora_targets else self.engine.lora_targets
        return layers * rank * sum(sum(sizes[target]) for target in targets if target in sizes)


def run_of(params: Params, num_gpus: int, mean_completion_tokens: float | None) -> Run:
    """Return the run that a params file describes, on this many GPUs."""
    config, limit = params.train_grpo, params.train_grpo.sampling.max_new_tokens
    if mean_completion_tokens is not None and not 0 < mean_completion_tokens <= limit:
        raise PipelineError(
            f"--completion-tokens {mean_completion_tokens:g}: from 1 to sampling.max_new_tokens, {limit}, is accepted"
        )
    longest_prompt = params.max_prompt_tokens
    work = Work(
        prompts=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=longest_prompt,
        completion_tokens=limit,
        mean_prompt_tokens=MEAN_PROMPT_FRACTION * longest_prompt,
        mean_completion_tokens=mean_completion_tokens or MEAN_COMPLETION_FRACTION * limit,
        minibatches=config.minibatches_per_rollout,
        updates=config.updates_per_rollout,
    )
    overlap = config.sampler.overlap
    sampler = _sampler(config.sampler, config.sampling.max_batch_size, overlap=overlap)
    if sampler.num_servers >= num_gpus:
        raise PipelineError(
            f"--gpus {num_gpus}: sampler.servers takes {sampler.num_servers} of them and leaves none to train on"
        )
    return Run(
        shape=shape_of(params.train_sft.model),
        num_gpus=num_gpus,
        work=work,
        engine=_engine(config.engine),
        sampler=sampler,
        reference=config.reference.value if config.loss.kl.coefficient else "none",
    )


def _engine(config: EngineConfig) -> Engine:
    return Engine(
        zero_stage=config.zero_stage,
        element_bytes=2 if config.precision == "bf16" else 4,
        gradient_checkpointing=config.gradient_checkpointing,
        micro_batch_tokens=config.micro_batch_tokens,
        offload=config.offload,
        lora_rank=config.lora.rank if config.lora else 0,
        lora_targets=tuple(config.lora.targets) if config.lora else (),
    )


def _sampler(config: SamplerConfig, max_batch_size: int, *, overlap: bool) -> Sampler:
    if config.servers:
        devices = config.servers.devices or ["0"] * config.servers.num_servers
        return Sampler(
            engine="vllm_server",
            max_batch_size=max_batch_size,
            num_servers=sum(len(each.split(",")) for each in devices),
            tensor_parallel=len(devices[0].split(",")),
            cache_bytes=config.servers.cache_gib * GIB,
            overlap=overlap,
        )
    if config.vllm:
        return Sampler("vllm", max_batch_size, cache_bytes=config.vllm.cache_gib * GIB, overlap=overlap)
    return Sampler("transformers", max_batch_size, overlap=overlap)
