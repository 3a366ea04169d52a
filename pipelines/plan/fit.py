"""Whether a run fits, and the smallest change that makes it fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pipelines.plan.hardware import Gpu, usable_bytes
from pipelines.plan.memory import memory_of
from pipelines.plan.run import Run

_MAX_GPUS = 4096


@dataclass(frozen=True)
class _Change:
    """Other values of keys of `train_grpo`."""

    text: str
    part: str
    """Of the run: engine, sampler, or run for what is the run's own."""
    values: dict[str, int | str]
    cost: float
    """How unwelcome it is, by judgement: what makes steps slower costs more."""


def fits(run: Run, gpu: Gpu) -> bool:
    """Tell whether a run fits on GPUs of this kind: those that train, and those that only sample."""
    enough = memory_of(run).peak <= usable_bytes(gpu)
    return enough and (not run.sampler.num_servers or server_bytes(run) <= usable_bytes(gpu))


def server_bytes(run: Run) -> float:
    """Return what a GPU needs that only samples: weights, and its cache, at the least that of one completion."""
    work, size = run.work, run.engine.element_bytes
    completion = (work.prompt_tokens + work.completion_tokens) * run.shape.kv_bytes_per_token(size)
    return (run.shape.num_parameters * size + max(completion, run.sampler.cache_bytes)) / run.sampler.tensor_parallel


def smallest_change(run: Run, gpu: Gpu) -> str | None:
    """Return the cheapest change that makes a run fit, as keys of the params file; None where none does."""
    for changes in sorted(_combinations(run), key=_cost):
        changed = _changed(run, changes)
        if _accepted(changed) and fits(changed, gpu):
            return ", ".join(change.text for change in changes)
    num_gpus = 2 * run.num_gpus
    while num_gpus <= min(_MAX_GPUS, run.work.prompts):
        if fits(replace(run, num_gpus=num_gpus), gpu):
            return f"--gpus {num_gpus}"
        num_gpus *= 2
    return None


def _combinations(run: Run) -> Iterator[tuple[_Change, ...]]:
    for choice in product(*_knobs(run)):
        changes = tuple(change for change in choice if change is not None)
        if changes:
            yield changes


def _cost(changes: Sequence[_Change]) -> tuple[float, int]:
    return sum(change.cost for change in changes), len(changes)


def _accepted(run: Run) -> bool:
    """Tell whether the config is: what is offloaded has to be sharded."""
    return run.engine.zero_stage >= {"none": 0, "optimizer": 1, "all": 3}[run.engine.offload]


def _knobs(run: Run) -> list[list[_Change | None]]:
    """For each key, to leave it or to change it."""
    engine, longest = run.engine, run.work.prompt_tokens + run.work.completion_tokens
    tokens = [engine.micro_batch_tokens >> n for n in range(1, 12) if engine.micro_batch_tokens >> n >= longest]
    held = [("sharded", 1.5), ("offloaded", 3.0)] if run.reference == "replicated" else []
    offload = [("optimizer", 6.0), ("all", 9.0)] if engine.offload == "none" else []
    knobs = [
        [_of_engine("micro_batch_tokens", number, 1 + i / 10) for i, number in enumerate(tokens)],
        [_of_engine("gradient_checkpointing", True, 2)] * (not engine.gradient_checkpointing),
        [_of_engine("zero_stage", stage, 1 + stage / 2) for stage in range(engine.zero_stage + 1, 4)],
        _samplers(run),
        [_Change(f"reference: {place}", "run", {"reference": place}, cost) for place, cost in held],
        [_of_engine("offload", place, cost) for place, cost in offload],
    ]
    return [[None, *options] for options in knobs]


def _of_engine(key: str, value: int | str, cost: float) -> _Change:
    return _Change(f"engine.{key}: {str(value).lower()}", "engine", {key: value}, cost)


def _samplers(run: Run) -> list[_Change]:
    """Smaller batches, or vLLM, beside the trainer or on half of the GPUs."""
    if run.sampler.engine != "transformers":
        return []
    rows = [run.sampler.max_batch_size >> n for n in range(1, 12)]
    changes = [
        _Change(f"sampling.max_batch_size: {number}", "sampler", {"max_batch_size": number}, 2 + i / 10)
        for i, number in enumerate(rows)
        if number >= run.work.group_size
    ]
    changes.append(_Change("sampler.vllm", "sampler", {"engine": "vllm"}, 3.5))
    if servers := run.num_gpus // 2:
        values: dict[str, int | str] = {"engine": "vllm_server", "num_servers": servers}
        changes.append(_Change(f"sampler.servers on {servers} of the GPUs", "sampler", values, 5))
    return changes


def _changed(run: Run, changes: Iterable[_Change]) -> Run:
    values: dict[str, dict[str, Any]] = {"engine": {}, "sampler": {}, "run": {}}
    for change in changes:
        values[change.part] |= change.values
    engine, sampler = replace(run.engine, **values["engine"]), replace(run.sampler, **values["sampler"])
    return replace(run, engine=engine, sampler=sampler, **values["run"])
