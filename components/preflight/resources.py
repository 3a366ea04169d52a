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
_MARGIN = 1.25  # factor for what is not counted in evaluation: activations, and the completions themselves


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
    """Return the cluster's section with the memory of its pods filled in, except where it is set or `shape` is None."""
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
    processes = max(1, config.gpus_per_node)
    num_models = 2 if grpo.reward.model else 1  # a learned reward model is as large, and is trained, too
    engines = processes if grpo.sampler.vllm else 0
    if not config.gpus_per_node:
        cache_gib = grpo.sampler.vllm.cache_gib if grpo.sampler.vllm else 0.0
        states_gib = num_models * _ON_CPU_BYTES * num_parameters / _GIB
        return math.ceil(_POD_GIB + processes * _PROCESS_GIB + engines * (_VLLM_GIB + cache_gib) + states_gib)
    model_bytes = _host_bytes(grpo.engine, processes)  # for each parameter, as are all bytes below
    if grpo.reference == "offloaded" and grpo.loss.kl.coefficient > 0:
        model_bytes += processes * _weight_bytes(grpo.engine)
    sleeping_bytes = engines * _weight_bytes(grpo.engine)  # vLLM's weights while the policy is updated
    grpo_bytes = num_models * model_bytes + sleeping_bytes
    per_parameter = max(_host_bytes(params.train_sft.engine, processes), grpo_bytes)
    code_gib = _POD_GIB + processes * _GPU_PROCESS_GIB + engines * _VLLM_GIB
    return math.ceil(code_gib + per_parameter * num_parameters / _GIB)


def _host_bytes(engine: EngineConfig, processes: int) -> float:
    """Return the bytes of host memory for each parameter; LoRA counts as if all weights were trained."""
    weight = _weight_bytes(engine)
    offloaded = {"none": 0, "optimizer": _OPTIMIZER_BYTES, "all": _OPTIMIZER_BYTES + weight}[engine.offload]
    # At the start every process loads all weights; later the first one gathers a checkpoint. Each offloads its shard.
    return max(processes * weight, _CHECKPOINT_BYTES) + processes * offloaded / engine.num_processes


def _weight_bytes(engine: EngineConfig) -> int:
    return _BF16 if engine.precision == "bf16" else _FP32


def _evaluation_gib(params: Params, shape: ModelShape) -> int:
    """Return the GiB of the evaluation pod: each engine loads all weights, and without a GPU the KV cache, too."""
    evaluate, element = params.evaluate, _evaluation_bytes(params)
    engines = evaluate.vllm.num_engines if evaluate.vllm else 1
    weights_gib = engines * element * shape.num_parameters / _GIB
    code_gib = _POD_GIB + (engines * _VLLM_GIB if evaluate.vllm else 0)
    if params.cluster.gpus_per_node:
        return math.ceil(code_gib + evaluate.num_gpus * _GPU_PROCESS_GIB + weights_gib)
    if evaluate.vllm:
        return math.ceil(code_gib + _MARGIN * weights_gib + engines * evaluate.vllm.cache_gib)
    prompt_tokens = params.validate_data.max_prompt_tokens
    from_environment = params.evaluation_tools.max_environment_tokens if params.evaluation_tools else 0
    tokens = evaluate.max_batch_size * (prompt_tokens + evaluate.max_new_tokens + from_environment)
    logits = 3 * _FP32 * evaluate.max_batch_size * shape.vocabulary_size  # with copies made by sampling
    held_gib = weights_gib + (tokens * shape.kv_bytes_per_token(element) + logits) / _GIB
    return math.ceil(code_gib + _MARGIN * held_gib)


def _evaluation_bytes(params: Params) -> int:
    """Return the bytes of a weight in evaluation: of the base, SFT or GRPO model, whichever has the widest."""
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
    published = next(iter(dtypes), "float32")  # as the policy takes a model without a dtype
    return max(trained, _FP32 if published == "float32" else _BF16)
