"""Estimates the memory of pods that run a model from the model's shape, if the params do not set it."""

import math
from contextlib import suppress

from components.cluster.config import ClusterConfig
from components.policy.config import EngineConfig
from components.preflight.config import Params
from components.shared.errors import PipelineError
from components.shared.model import model_config
from components.shared.model_shape import ModelShape, shape_of

_GIB = 2**30
_POD_GIB, _PROCESS_GIB, _GPU_PROCESS_GIB, _VLLM_GIB = 2, 2, 4, 4
"""Code and buffers of a pod, of a training process on CPUs (0.6 GiB of code alone) or on a GPU, and of vLLM."""
_FP32, _BF16 = 4, 2  # bytes of a number
_OPTIMIZER_BYTES = 16  # bytes for each parameter: two moments, the master weight and the gradient, all in fp32
_CHECKPOINT_BYTES = 12  # bytes for each parameter: two moments and the weight in fp32
_ON_CPU_BYTES = 32  # bytes for each parameter on CPUs: weights, gradient, optimizer, the reference and a checkpoint
_MARGIN = 1.25  # factor for what evaluation takes beside weights, cache and logits: activations and completions


def shape_of_base(params: Params) -> ModelShape | None:
    """Return the shape of the base model; None if it is on the volume, unreachable, or of an unknown family."""
    model = params.train_sft.model
    with suppress(PipelineError):
        return shape_of(model)
    if not model.base.startswith(("/", ".")):
        with suppress(PipelineError):
            model_config(model.base)  # downloads the config into the local cache, which `shape_of` reads
            return shape_of(model)
    return None


def with_memory(params: Params, shape: ModelShape | None) -> ClusterConfig:
    """Return the section `cluster` with the memory of its pods filled in, unless it is set or `shape` is None."""
    config = params.cluster
    if shape is None:
        return config
    memory = {
        "memory_per_node_gib": config.memory_per_node_gib or _training_gib(params, shape.num_parameters),
        "evaluate_memory_gib": config.evaluate_memory_gib or _evaluation_gib(params, shape),
    }
    return config.model_copy(update=memory)


def _training_gib(params: Params, num_parameters: int) -> int:
    """Return the GiB of a training pod, enough for SFT as well as for GRPO."""
    grpo, config = params.train_grpo, params.cluster
    num_processes = max(1, config.gpus_per_node)
    num_models = 2 if grpo.reward.model else 1  # a learned reward model is as large, and is trained, too
    num_engines = num_processes if grpo.sampler.vllm else 0
    if not config.gpus_per_node:
        cache_gib = grpo.sampler.vllm.cache_gib if grpo.sampler.vllm else 0.0
        states_gib = num_models * _ON_CPU_BYTES * num_parameters / _GIB
        return math.ceil(_POD_GIB + num_processes * _PROCESS_GIB + num_engines * (_VLLM_GIB + cache_gib) + states_gib)
    # All bytes are those for each parameter.
    model_bytes = _host_bytes(grpo.engine, num_processes)
    if grpo.reference == "offloaded" and grpo.loss.kl.coefficient > 0:
        model_bytes += num_processes * _weight_bytes(grpo.engine)
    sleeping_bytes = num_engines * _weight_bytes(grpo.engine)  # vLLM's weights while the policy is updated
    grpo_bytes = num_models * model_bytes + sleeping_bytes
    max_bytes = max(_host_bytes(params.train_sft.engine, num_processes), grpo_bytes)
    code_gib = _POD_GIB + num_processes * _GPU_PROCESS_GIB + num_engines * _VLLM_GIB
    return math.ceil(code_gib + max_bytes * num_parameters / _GIB)


def _host_bytes(engine: EngineConfig, num_processes: int) -> float:
    """Return the bytes of host memory for each parameter; LoRA counts as if all weights were trained."""
    weight = _weight_bytes(engine)
    offloaded = {"none": 0, "optimizer": _OPTIMIZER_BYTES, "all": _OPTIMIZER_BYTES + weight}[engine.offload]
    # At the start every process loads all weights; later the first one gathers a checkpoint. Each offloads its shard.
    return max(num_processes * weight, _CHECKPOINT_BYTES) + num_processes * offloaded / engine.num_processes


def _weight_bytes(engine: EngineConfig) -> int:
    return _BF16 if engine.precision == "bf16" else _FP32


def _evaluation_gib(params: Params, shape: ModelShape) -> int:
    """Return the GiB of the evaluation pod: each engine loads all weights, and without a GPU the KV cache, too."""
    evaluate, weight_bytes = params.evaluate, _evaluation_bytes(params)
    num_engines = evaluate.vllm.num_engines if evaluate.vllm else 1
    weights_gib = num_engines * weight_bytes * shape.num_parameters / _GIB
    code_gib = _POD_GIB + (num_engines * _VLLM_GIB if evaluate.vllm else 0)
    if params.cluster.gpus_per_node:
        return math.ceil(code_gib + evaluate.num_gpus * _GPU_PROCESS_GIB + weights_gib)
    if evaluate.vllm:
        return math.ceil(code_gib + _MARGIN * weights_gib + num_engines * evaluate.vllm.cache_gib)
    max_tokens = params.validate_data.max_prompt_tokens + evaluate.max_new_tokens
    if params.evaluation_tools:
        max_tokens += params.evaluation_tools.max_environment_tokens
    cache_bytes = evaluate.max_batch_size * max_tokens * shape.kv_bytes_per_token(weight_bytes)
    logit_bytes = 3 * _FP32 * evaluate.max_batch_size * shape.vocabulary_size  # with copies made by sampling
    return math.ceil(code_gib + _MARGIN * (weights_gib + (cache_bytes + logit_bytes) / _GIB))


def _evaluation_bytes(params: Params) -> int:
    """Return the bytes of a weight in evaluation: the most of the base, the SFT and the GRPO model."""
    if params.evaluate.dtype != "auto":
        return _FP32 if params.evaluate.dtype == "float32" else _BF16
    trained = max(_weight_bytes(params.train_sft.engine), _weight_bytes(params.train_grpo.engine))
    if params.train_sft.model.scratch:
        return trained
    try:
        config = model_config(params.train_sft.model.base)
    except PipelineError:  # on the volume, or unreachable: most models are published in 16 bits
        return max(trained, _BF16)
    levels = (config.get("text_config") or {}, config)
    dtypes = [level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key)]
    published = dtypes[0] if dtypes else "float32"  # as components/policy loads a model without a dtype
    return max(trained, _FP32 if published == "float32" else _BF16)
