"""Whether a run fits, and the smallest change that makes it fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any

from pipelines.plan.hardware import Gpu, usable_bytes
from pipelines.plan.memory import memory_of
from pipelines.plan.run import Run

_MAX_GPUS = 4096
_MIN_ZERO_STAGE = {"none": 0, "optimizer": 1, "all": 3}
"""What is offloaded has to be sharded."""


@dataclass(frozen=True)
class _Change:
    """Another value of a key of `train_grpo`."""

    text: str
    cost: float
    """A judgement: what makes steps slower costs more."""
    apply: Callable[[Run], Run]


def fits(run: Run, gpu: Gpu) -> bool:
    """Tell whether a run fits on GPUs of this kind: those that train, and those that only sample."""
    enough = memory_of(run).peak <= usable_bytes(gpu)
    return enough and (not run.sampler.num_servers or _server_bytes(run) <= usable_bytes(gpu))


def _server_bytes(run: Run) -> float:
    """What a GPU needs that only samples: weights, and a cache for at least one completion."""
    work, size = run.work, run.engine.element_bytes
    completion = (work.prompt_tokens + work.completion_tokens) * run.shape.kv_bytes_per_token(size)
    return (run.shape.num_parameters * size + max(completion, run.sampler.cache_bytes)) / run.sampler.tensor_parallel


def smallest_change(run: Run, gpu: Gpu) -> str | None:
    """Return the cheapest change that makes a run fit, as keys of the params file; None where none does."""
    combinations = [list(filter(None, choice)) for choice in product(*([None, *options] for options in _options(run)))]
    for changes in sorted(combinations, key=lambda changes: (sum(each.cost for each in changes), len(changes))):
        changed = reduce(lambda so_far, change: change.apply(so_far), changes, run)
        if changed.engine.zero_stage >= _MIN_ZERO_STAGE[changed.engine.offload] and fits(changed, gpu):
            return ", ".join(change.text for change in changes)
    num_gpus = 2 * run.num_gpus
    while num_gpus <= min(_MAX_GPUS, run.work.prompts):
        if fits(replace(run, num_gpus=num_gpus), gpu):
            return f"--gpus {num_gpus}"
        num_gpus *= 2
    return None


def _options(run: Run) -> list[list[_Change]]:
    """The changes of each key, of which at most one is applied."""
    engine, longest = run.engine, run.work.prompt_tokens + run.work.completion_tokens
    tokens = [engine.micro_batch_tokens >> n for n in range(1, 12) if engine.micro_batch_tokens >> n >= longest]
    placements = [("sharded", 1.5), ("offloaded", 3.0)] if run.reference == "replicated" else []
    offloads = [("optimizer", 6.0), ("all", 9.0)] if engine.offload == "none" else []
    return [
        [_engine("micro_batch_tokens", number, 1 + i / 10) for i, number in enumerate(tokens)],
        [_engine("gradient_checkpointing", True, 2)] * (not engine.gradient_checkpointing),
        [_engine("zero_stage", stage, 1 + stage / 2) for stage in range(engine.zero_stage + 1, 4)],
        _samplers(run) if run.sampler.engine == "transformers" else [],
        [_reference(placement, cost) for placement, cost in placements],
        [_engine("offload", part, cost) for part, cost in offloads],
    ]


def _engine(key: str, value: Any, cost: float) -> _Change:
    text = f"engine.{key}: {str(value).lower()}"
    return _Change(text, cost, lambda run: replace(run, engine=replace(run.engine, **{key: value})))


def _reference(placement: Any, cost: float) -> _Change:
    return _Change(f"reference: {placement}", cost, lambda run: replace(run, reference=placement))


def _samplers(run: Run) -> list[_Change]:
    """Smaller batches, or vLLM, beside the trainer or on half of the GPUs."""
    sizes = [size for n in range(1, 12) if (size := run.sampler.max_batch_size >> n) >= run.work.group_size]
    changes = [
        _sampler(f"sampling.max_batch_size: {size}", 2 + i / 10, max_batch_size=size) for i, size in enumerate(sizes)
    ]
    changes.append(_sampler("sampler.vllm", 3.5, engine="vllm"))
    if servers := run.num_gpus // 2:
        text = f"sampler.servers on {servers} of the GPUs"
        changes.append(_sampler(text, 5, engine="vllm_server", num_servers=servers))
    return changes


def _sampler(text: str, cost: float, **values: Any) -> _Change:
    return _Change(text, cost, lambda run: replace(run, sampler=replace(run.sampler, **values)))
