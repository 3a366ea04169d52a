"""Memory of a step of Policy by part, counted from tensors in as many processes as were launched.

Run by torchrun as `-m tests.pipelines.plan_processes FOLDER`; each process leaves what it counted in FOLDER/RANK.json.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_rank
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from components.policy import logprobs
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.policy.packing import MicroBatch, TokenSequence
from components.shared.model_shape import ModelShape
from tests import tiny

SHAPE = ModelShape(320, 960, 6, 5, 1, 64, 2048, tied=False, qk_norm=True)
GROUP_SIZE, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 64, 64
MICRO_BATCH_TOKENS = PROMPT_TOKENS + GROUP_SIZE * COMPLETION_TOKENS
CASES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3, bf16": {"zero_stage": 3, "precision": "bf16"},
    "ZeRO 3, bf16, checkpointing": {"zero_stage": 3, "precision": "bf16", "gradient_checkpointing": True},
}


def _model(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": SHAPE.num_layers, "num_attention_heads": SHAPE.num_heads, "head_dim": SHAPE.head_size}
    sizes |= {"num_key_value_heads": SHAPE.num_kv_heads, "vocab_size": SHAPE.vocabulary_size, "eos_token_id": 0}
    sizes |= {"hidden_size": SHAPE.hidden_size, "intermediate_size": SHAPE.intermediate_size}
    config = Qwen3Config(**sizes, tie_word_embeddings=False, bos_token_id=None)
    model: PreTrainedModel = Qwen3ForCausalLM(config).to(dtype)
    return model


def _one(changes: dict[str, Any]) -> dict[str, float]:
    # GPUs, which the plan is for, compute with the modules of transformers.
    setattr(logprobs, "is_supported_in_training", lambda _: False)  # noqa: B010  # no export, to mypy
    config = tiny.engine_config(micro_batch_tokens=MICRO_BATCH_TOKENS, **changes)
    scorer = LogprobModel(_model(torch.bfloat16 if config.precision == "bf16" else torch.float32), temperature=1.0)
    policy = Policy(scorer, config)
    first, second = _batches()
    activations = _saved(policy, scorer, first)
    policy.step(1e-4)  # the optimizer's state comes with its first step
    policy.backward(-policy(first).logprobs_N.mean())
    # What ZeRO 3 reduces gradients in is there before anything is measured.
    buckets = [each.buffer for each in policy._optimizer.ipg_buckets.values()] if config.zero_stage == 3 else []
    return {
        "weights": _bytes(_weights(scorer)),
        "gradients": _bytes(_gradients(policy, scorer)),
        "optimizer": _bytes(_state(policy)),
        "activations": activations,
        # Of several: a collective may free its buffer in its own thread later than it is done.
        "update": min(_peak_of_pass(policy, second) for _ in range(5)) + _bytes(buckets),
    }


def _batches() -> list[MicroBatch]:
    """Two micro-batches of a group each, full to the last token."""
    generator = torch.Generator().manual_seed(get_rank())
    sequences = []
    for _ in range(2):
        prompt, *completions = (
            tuple(torch.randint(1, SHAPE.vocabulary_size, (length,), generator=generator).tolist())
            for length in (PROMPT_TOKENS, *[COMPLETION_TOKENS] * GROUP_SIZE)
        )
        sequences += [TokenSequence(prompt, completion) for completion in completions]
    return tiny.batches(sequences, MICRO_BATCH_TOKENS)


def _saved(policy: Policy, scorer: LogprobModel, batch: MicroBatch) -> float:
    """Bytes that a forward pass saves for the backward pass; weights are there anyway."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = -policy(batch).logprobs_N.mean()
    weights = {parameter.untyped_storage().data_ptr() for parameter in scorer.parameters()}
    activations = _bytes(tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in weights)
    saved.clear()
    policy.backward(loss)
    return activations


def _bytes(tensors: Iterable[Tensor]) -> float:
    """Bytes of all storages that tensors lie in, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return float(sum(storages.values()))


def _weights(scorer: LogprobModel) -> Iterator[Tensor]:
    for parameter in scorer.parameters():
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor
        if parameter.data.numel():
            yield parameter.data


def _state(policy: Policy) -> Iterator[Tensor]:
    """Moments, and the master copy of what DeepSpeed shards."""
    optimizer = policy._optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from getattr(optimizer, name, [])
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)


def _gradients(policy: Policy, scorer: LogprobModel) -> Iterator[Tensor]:
    optimizer = policy._optimizer
    if policy.config.zero_stage == 3:
        yield optimizer.grad_partitions_flat_buffer
    if policy.config.zero_stage == 2:
        for held in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
            for tensors in held.values():
                yield from tensors or []
    for parameter in scorer.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def _peak_of_pass(policy: Policy, batch: MicroBatch) -> float:
    """The most memory that a forward and backward pass allocates beyond what there was at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        policy.backward(-policy(batch).logprobs_N.mean())
    profiler: Any = profiled.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return float(max(itertools.accumulate(sizes)))


if __name__ == "__main__":
    num_processes = int(os.environ["WORLD_SIZE"])
    results = {name: _one(changes | {"num_processes": num_processes}) for name, changes in CASES.items()}
    (Path(sys.argv[1]) / f"{get_rank()}.json").write_text(json.dumps(results))
