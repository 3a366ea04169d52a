"""Memory of the pods that run a model, where the params leave it open: what the model takes, by its shape.

Measured: a process that trains a model of 0.2 million parameters on CPUs holds 0.6 GiB, all of it code.
"""

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
"""Code and buffers: of the pod as a whole, of each process that trains, of one that drives a GPU, and of vLLM."""
_FP32, _BF16 = 4, 2
_OPTIMIZER_BYTES = 16
"""Bytes for each parameter: two moments, the master weight and the gradient, all in fp32."""
_CHECKPOINT_BYTES = 12
"""Bytes for each parameter: two moments and the weight in fp32."""
_ON_CPU_BYTES = 32
"""Bytes for each parameter on CPUs: weights, gradient, optimizer, the reference and a checkpoint."""
_MARGIN = 1.25
"""Over what is counted in evaluation: activations, and the completions themselves."""


def shape_of_base(params: Params) -> ModelShape | None:
    """Return the shape of the base model; None where it is on the volume, unreachable, or of an unknown family."""
    model = params.train_sft.model
    with suppress(PipelineError):
        return shape_of(model)
    if not model.base.startswith(("/", ".")):
        with suppress(PipelineError):
            model_config(model.base)  # into the local cache
            return shape_of(model)
    return None


def with_memory(params: Params, shape: ModelShape | None) -> ClusterConfig:
    """Return the cluster's section with the memory of its pods; what is set there, or cannot be told, stays."""
    config = params.cluster
    if shape is None:
        return config
    memory = {
        "memory_per_node_gib": config.memory_per_node_gib or _training_gib(params, shape.num_parameters),
        "evaluate_memory_gib": config.evaluate_memory_gib or _evaluation_gib(params, shape),
    }
    return config.model_copy(update=memory)


def _training_gib(params: Params, num_parameters: int) -> int:
    grpo, config = params.train_grpo, params.cluster
    processes = max(1, config.gpus_per_node)
    copies = 2 if grpo.reward.model else 1  # a learned reward model is as large, and is trained too
    engines = processes if grpo.sampler.vllm else 0
    if not config.gpus_per_node:
        cache_gib = grpo.sampler.vllm.cache_gib if grpo.sampler.vllm else 0.0
        states_gib = copies * _ON_CPU_BYTES * num_parameters / _GIB
        return math.ceil(_POD_GIB + processes * _PROCESS_GIB + engines * (_VLLM_GIB + cache_gib) + states_gib)
    of_grpo = _host_bytes(grpo.engine, processes)
    if grpo.reference == "offloaded" and grpo.loss.kl.coefficient > 0:
        of_grpo += processes * _bytes(grpo.engine)
    asleep = engines * _bytes(grpo.engine)  # vLLM's weights while the policy is updated
    per_parameter = max(_host_bytes(params.train_sft.engine, processes), copies * of_grpo + asleep)
    code_gib = _POD_GIB + processes * _GPU_PROCESS_GIB + engines * _VLLM_GIB
    return math.ceil(code_gib + per_parameter * num_parameters / _GIB)


def _host_bytes(engine: EngineConfig, processes: int) -> float:
    """Bytes of the host for each parameter, with adapters as if all weights were trained."""
    # At the start every process loads the weights; later the first one collects a checkpoint, and each holds its shard.
    offloaded = {"none": 0, "optimizer": _OPTIMIZER_BYTES, "all": _OPTIMIZER_BYTES + _bytes(engine)}[engine.offload]
    return max(processes * _bytes(engine), _CHECKPOINT_BYTES) + processes * offloaded / engine.num_processes


def _bytes(engine: EngineConfig) -> int:
    return _BF16 if engine.precision == "bf16" else _FP32


def _evaluation_gib(params: Params, shape: ModelShape) -> int:
    """GiB of the pod that evaluates, where each engine loads all weights; without a GPU it holds the cache as well."""
    evaluate, element = params.evaluate, _evaluation_bytes(params)
    engines = evaluate.vllm.num_engines if evaluate.vllm else 1
    weights_gib = engines * element * shape.num_parameters / _GIB
    code_gib = _POD_GIB + (engines * _VLLM_GIB if evaluate.vllm else 0)
    if params.cluster.gpus_per_node:
        return math.ceil(code_gib + evaluate.num_gpus * _GPU_PROCESS_GIB + weights_gib)
    if evaluate.vllm:
        return math.ceil(code_gib + _MARGIN * weights_gib + engines * evaluate.vllm.cache_gib)
    observed = params.evaluation_tools.max_environment_tokens if params.evaluation_tools else 0
    tokens = evaluate.max_batch_size * (params.max_prompt_tokens + evaluate.max_new_tokens + observed)
    logits = 3 * _FP32 * evaluate.max_batch_size * shape.vocabulary_size
    held_gib = weights_gib + (tokens * shape.kv_bytes_per_token(element) + logits) / _GIB
    return math.ceil(code_gib + _MARGIN * held_gib)


def _evaluation_bytes(params: Params) -> int:
    """Bytes of a weight where a model is evaluated, for whichever of base, SFT and GRPO has the larger ones."""
    if params.evaluate.dtype != "auto":
        return _FP32 if params.evaluate.dtype == "float32" else _BF16
    trained = max(_bytes(params.train_sft.engine), _bytes(params.train_grpo.engine))
    if params.train_sft.model.scratch:
        return trained
    try:
        config = model_config(params.train_sft.model.base)
    except PipelineError:  # on the volume, or unreachable: well-known models are published in 16 bits
        return max(trained, _BF16)
    texts = (config.get("text_config") or {}, config)
    published = [each[key] for each in texts for key in ("dtype", "torch_dtype") if each.get(key)]
    return max(trained, _FP32 if published[:1] in ([], ["float32"]) else _BF16)
