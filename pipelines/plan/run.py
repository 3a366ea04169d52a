"""A run in numbers: its model, the work of a step, and how GPUs share it."""

import math
from dataclasses import dataclass
from typing import Literal

from components.policy.config import ALL_LINEAR
from components.preflight.config import Params
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig, local_model
from components.shared.model_shape import FAMILIES, ModelShape, config_file, shape_of
from pipelines.plan.counted import CountedShape, counted_shape
from pipelines.plan.hardware import GIB

_MEAN_COMPLETION_FRACTION = 0.4
"""Mean length of completions as a fraction of their limit, unless the user says it (assumed)."""
_MEAN_PROMPT_FRACTION = 0.25  # mean length of prompts as a fraction of their limit (assumed)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The numbers of a params file, and the number of GPUs, that memory and time depend on."""

    shape: ModelShape
    num_gpus: int

    prompts: int
    """Prompts of a step, on all GPUs together."""
    group_size: int
    prompt_tokens: int
    """Length of the longest prompt."""
    completion_tokens: int
    """Length of the longest completion: the limit, as some completions always reach it."""
    mean_prompt_tokens: float
    mean_completion_tokens: float
    minibatches: int = 1
    updates: int = 1
    """Passes over a rollout."""
    shared_prompts: bool = True
    """Whether a group stays on one GPU, and its prompt is computed once."""
    padded: bool = False
    """Whether each completion is a separate padded row; the logits of all tokens then exist at once."""

    zero_stage: int
    element_bytes: int
    gradient_checkpointing: bool
    micro_batch_tokens: int
    offload: Literal["none", "optimizer", "all"] = "none"
    lora_rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    lora_targets: tuple[str, ...] = ()
    quantised: bool = False
    """Whether the frozen matrices of the layers have 4 bits per element."""
    reference: Literal["none", "replicated", "sharded", "offloaded", "adapters"]
    reward_model: bool = False
    """Whether a learned reward model of the same shape is trained as well."""

    sampler: Literal["transformers", "vllm", "vllm_server"]
    max_batch_size: int
    """Completions that a GPU samples at once; vLLM with `cache_bytes` samples as many as fit into the cache."""
    num_server_gpus: int = 0
    """GPUs that only sample; 0 if all GPUs sample and train."""
    tensor_parallel: int = 1
    """GPUs of each server."""
    cache_bytes: float = 0.0
    """KV cache of vLLM, on all GPUs of a server together; 0 for as much as needed."""
    compiled: bool = True
    """Whether vLLM runs captured graphs."""
    overlap: bool = False
    """Whether the next rollout is sampled while the policy is updated."""

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
        """Tokens of the largest micro-batch of a GPU; a sequence above the limit is a micro-batch by itself."""
        groups = math.ceil(self.prompts / (self.minibatches * self.num_trainers))
        num_prompt_copies = self.group_size if self.padded else 1
        tokens_per_group = num_prompt_copies * self.prompt_tokens + self.group_size * self.completion_tokens
        return max(self.longest, min(self.micro_batch_tokens, groups * tokens_per_group))

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        if not self.lora_rank:
            return self.shape.num_parameters
        matrices = self.shape.projections
        targets = matrices if ALL_LINEAR in self.lora_targets else self.lora_targets
        inputs_and_outputs = sum(sum(matrices[name]) for name in targets if name in matrices)
        return self.shape.num_layers * self.lora_rank * inputs_and_outputs


def run_of(params: Params, num_gpus: int, mean_completion_tokens: float | None, *, engine_sequences: int = 256) -> Run:
    """Return the run that a params file describes, on `num_gpus` GPUs; PipelineError if an option is out of range.

    `mean_completion_tokens` is None if unknown; `engine_sequences` is vLLM's limit on the sequences in a batch.
    """
    config = params.train_grpo
    engine, sampler, limit = config.engine, config.sampler, config.sampling.max_new_tokens
    if mean_completion_tokens is not None and not 0 < mean_completion_tokens <= limit:
        accepted = f"from 1 to sampling.max_new_tokens, {limit}, is accepted"
        raise PipelineError(f"--completion-tokens {mean_completion_tokens:g}: {accepted}")
    gpus_of_servers: list[int] = []
    if sampler.servers:  # `devices` has a text such as "4,5" for each server; without it, each takes one GPU
        devices = sampler.servers.devices or ["0"] * sampler.servers.num_servers
        gpus_of_servers = [len(each.split(",")) for each in devices]
    num_server_gpus = sum(gpus_of_servers)
    if num_server_gpus >= num_gpus:
        problem = f"sampler.servers takes {num_server_gpus} of them and leaves none to train on"
        raise PipelineError(f"--gpus {num_gpus}: {problem}")
    vllm = sampler.servers or sampler.vllm
    shape = _shape(params.train_sft.model)
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


def _shape(model: ModelConfig) -> ModelShape:
    """Return the shape of a base model, counted from its tensors if it is in a local folder and of another family."""
    file = None if model.scratch else config_file(local_model(model.base))
    if file and file.is_file() and jsonl.read_json(file).get("model_type") not in FAMILIES:
        return counted_shape(file)
    return shape_of(model)
