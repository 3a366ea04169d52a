"""A run in numbers: the model, the work of a step, and its distribution over GPUs."""

from dataclasses import dataclass
from typing import Literal

from components.policy.config import ALL_LINEAR
from components.preflight.config import Params
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.model import local_model
from components.shared.model_shape import FAMILIES, ModelShape, config_file, shape_of
from pipelines.plan.counted import CountedShape, counted_shape
from pipelines.plan.hardware import GIB

_MEAN_COMPLETION_FRACTION = 0.4
"""Mean length of completions as a fraction of their limit, if not given (assumed)."""
_MEAN_PROMPT_FRACTION = 0.25
"""Mean length of prompts as a fraction of their limit (assumed)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The work of a step, and its distribution over GPUs."""

    shape: ModelShape
    num_gpus: int

    prompts: int
    group_size: int
    prompt_tokens: int
    """Length of the longest prompt."""
    completion_tokens: int
    """Length of the longest completion: some always reach the limit, so sampling takes as many tokens."""
    mean_prompt_tokens: float
    mean_completion_tokens: float
    minibatches: int = 1
    updates: int = 1
    """Passes over a rollout."""
    shared_prompts: bool = True
    """Whether a group stays on one GPU, and its prompt is computed once."""
    padded: bool = False
    """Whether each completion is a separate padded row whose logits exist all at once."""

    zero_stage: int
    element_bytes: int
    gradient_checkpointing: bool
    micro_batch_tokens: int
    offload: Literal["none", "optimizer", "all"] = "none"
    lora_rank: int = 0
    """0 trains all weights."""
    lora_targets: tuple[str, ...] = ()
    quantised: bool = False
    """Whether the frozen matrices of the layers have 4 bits per element."""
    reference: Literal["none", "replicated", "sharded", "offloaded", "adapters"]
    reward_model: bool = False
    """Whether a learned reward model of the same shape is trained as well."""

    sampler: Literal["transformers", "vllm", "vllm_server"]
    max_batch_size: int
    """Completions at once on a GPU; with vLLM and a given `cache_bytes` those that fit the cache."""
    num_server_gpus: int = 0
    """GPUs that only sample; 0 if all GPUs sample and train."""
    tensor_parallel: int = 1
    cache_bytes: float = 0.0
    """vLLM's KV cache on all GPUs of a copy; 0 for as much as needed."""
    compiled: bool = True
    """Whether vLLM runs captured graphs."""
    overlap: bool = False
    """Whether the next rollout is sampled while the policy is updated."""

    @property
    def completions(self) -> int:
        """All completions of a step."""
        return self.prompts * self.group_size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def num_trainers(self) -> int:
        """GPUs that hold the policy and update it."""
        return self.num_gpus - self.num_server_gpus

    @property
    def tokens_at_once(self) -> int:
        """Tokens of the largest micro-batch of a GPU; a longer sequence is a micro-batch by itself."""
        groups = -(-self.prompts // self.minibatches // self.num_trainers)
        rows = self.group_size if self.padded else 1
        available = groups * (rows * self.prompt_tokens + self.group_size * self.completion_tokens)
        return max(self.longest, min(self.micro_batch_tokens, available))

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        if not self.lora_rank:
            return self.shape.num_parameters
        matrices = self.shape.projections
        targets = tuple(matrices) if ALL_LINEAR in self.lora_targets else self.lora_targets
        # An adapter has rank x (inputs + outputs) parameters.
        ends = sum(sum(matrices[name]) for name in targets if name in matrices)
        return self.shape.num_layers * self.lora_rank * ends


def run_of(params: Params, num_gpus: int, mean_completion_tokens: float | None, *, engine_sequences: int = 256) -> Run:
    """Return the run that a params file describes, on `num_gpus` GPUs.

    `engine_sequences` is vLLM's limit on the sequences in a batch, which depends on the GPU.
    """
    config = params.train_grpo
    engine, sampler, limit = config.engine, config.sampler, config.sampling.max_new_tokens
    if mean_completion_tokens is not None and not 0 < mean_completion_tokens <= limit:
        raise PipelineError(
            f"--completion-tokens {mean_completion_tokens:g}: from 1 to sampling.max_new_tokens, {limit}, is accepted"
        )
    servers = sampler.servers
    # Lists of GPUs such as "4,5"; a server whose GPUs are not named takes one.
    devices = (servers.devices or ["0"] * servers.num_servers) if servers else []
    gpus_of_servers = [len(each.split(",")) for each in devices]
    num_server_gpus = sum(gpus_of_servers)
    if num_server_gpus >= num_gpus:
        raise PipelineError(
            f"--gpus {num_gpus}: sampler.servers takes {num_server_gpus} of them and leaves none to train on"
        )
    vllm = servers or sampler.vllm
    model = params.train_sft.model
    file = None if model.scratch else config_file(local_model(model.base))
    is_known = not file or not file.is_file() or jsonl.read_json(file).get("model_type") in FAMILIES
    shape = shape_of(model) if is_known or file is None else counted_shape(file)
    padded = isinstance(shape, CountedShape)
    return Run(
        shape=shape,
        padded=padded,
        shared_prompts=not padded,
        num_gpus=num_gpus,
        prompts=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=params.validate_data.max_prompt_tokens,
        completion_tokens=limit + params.train_sft.model.max_environment_tokens,
        mean_prompt_tokens=_MEAN_PROMPT_FRACTION * params.validate_data.max_prompt_tokens,
        mean_completion_tokens=mean_completion_tokens or _MEAN_COMPLETION_FRACTION * limit,
        minibatches=config.minibatches_per_rollout,
        updates=config.updates_per_rollout,
        zero_stage=engine.zero_stage,
        element_bytes=2 if engine.precision == "bf16" else 4,
        gradient_checkpointing=engine.gradient_checkpointing,
        micro_batch_tokens=engine.micro_batch_tokens,
        offload=engine.offload,
        lora_rank=engine.lora.rank if engine.lora else 0,
        lora_targets=tuple(engine.lora.targets) if engine.lora else (),
        quantised=engine.quantise is not None,
        reference=config.reference_placement if config.loss.kl.coefficient else "none",
        reward_model=config.reward.model is not None,
        sampler="vllm_server" if sampler.servers else "vllm" if vllm else "transformers",
        max_batch_size=engine_sequences if vllm else config.sampling.max_batch_size,
        num_server_gpus=num_server_gpus,
        tensor_parallel=gpus_of_servers[0] if gpus_of_servers else 1,
        cache_bytes=vllm.cache_gib * GIB if vllm else 0.0,
        compiled=vllm.compile if vllm else True,
        overlap=sampler.samples_ahead,
    )
