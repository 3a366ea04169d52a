"""`grpo-pipeline plan`: what a params file needs on given GPUs, before anything is rented."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.preflight.config import load_params
from components.shared.errors import PipelineError
from pipelines.plan import text
from pipelines.plan.fit import fits, smallest_change
from pipelines.plan.hardware import Gpu, gpu, usable_bytes
from pipelines.plan.memory import Memory, at_stage, memory_of
from pipelines.plan.run import Run, run_of
from pipelines.plan.scaling import Point, draw, limit_of, simulate
from pipelines.plan.step_time import Critic, StepTime, critic, step_time

_MAX_GPUS = 16_384
_PLOTS = {".png", ".svg", ".pdf"}


@dataclass(frozen=True)
class Plan:
    """All that is predicted of a run."""

    path: Path
    run: Run
    gpu: Gpu
    memory: dict[int, Memory]
    """For each stage of ZeRO."""
    fits: bool
    change: str | None
    """The smallest one that makes it fit, where it does not."""
    time: StepTime
    ppo: Critic
    strong: list[Point]
    weak: list[Point]


def plan(path: Path, *, num_gpus: int, gpu_name: str, completion_tokens: float | None) -> Plan:
    """Return the plan of a params file."""
    if not 1 <= num_gpus <= _MAX_GPUS:
        raise PipelineError(f"--gpus {num_gpus}: from 1 to {_MAX_GPUS:,} is accepted")
    device = gpu(gpu_name)
    run = run_of(load_params(path), num_gpus, completion_tokens)
    enough = fits(run, device)
    return Plan(
        path=path,
        run=run,
        gpu=device,
        memory={stage: memory_of(at_stage(run, stage)) for stage in range(4)},
        fits=enough,
        change=None if enough else smallest_change(run, device),
        time=step_time(run, device),
        ppo=critic(run, device),
        strong=simulate(run, device, "strong"),
        weak=simulate(run, device, "weak"),
    )


def show(planned: Plan, *, as_json: bool, plot: Path | None) -> None:
    """Print a plan for people, or as JSON; draw how it scales where a file is given."""
    if plot is not None and plot.suffix not in _PLOTS:
        raise PipelineError(f"--plot {plot}: the name of a file that ends in {', '.join(sorted(_PLOTS))} is accepted")
    print(json.dumps(_figures(planned), indent=1) if as_json else _text(planned))
    if plot is not None:
        draw({"fixed batch": planned.strong, "batch grows with the GPUs": planned.weak}, plot)


def _text(planned: Plan) -> str:
    parts = [
        text.heading(planned.path, planned.run, planned.gpu),
        text.memory(planned.memory, planned.run, planned.gpu),
        _verdict(planned),
        text.time(planned.time, planned.run),
        text.ppo(planned.ppo),
        text.scaling("Strong scaling: the same step on more GPUs", planned.strong),
        text.scaling("Weak scaling: prompts grow with the GPUs", planned.weak),
        text.assumptions(planned.run),
    ]
    return "\n\n".join(parts)


def _verdict(planned: Plan) -> str:
    needed, usable = planned.memory[planned.run.engine.zero_stage].peak, usable_bytes(planned.gpu)
    figures = f"{text.gib(needed)} of {text.gib(usable)} usable GiB"
    if planned.fits:
        return f"Fits: {figures}."
    if planned.change:
        return f"Does not fit: {figures}; the smallest change that makes it fit: {planned.change}."
    return f"Does not fit: {figures}; no change of its settings makes it fit."


def _figures(planned: Plan) -> dict[str, Any]:
    run = planned.run
    return {
        "params": str(planned.path),
        "gpu": planned.gpu.name,
        "num_gpus": run.num_gpus,
        "num_parameters": run.shape.num_parameters,
        "zero_stage": run.engine.zero_stage,
        "usable_bytes": usable_bytes(planned.gpu),
        "memory_bytes": {f"zero_{stage}": _bytes(memory) for stage, memory in planned.memory.items()},
        "fits": planned.fits,
        "smallest_change": planned.change,
        "step_s": planned.time.total,
        "phases_s": planned.time.phases,
        "ppo": asdict(planned.ppo),
        "scaling": {"strong": _points(planned.strong), "weak": _points(planned.weak)},
    }


def _bytes(memory: Memory) -> dict[str, float]:
    parts = {name: value for name, value in asdict(memory).items() if not isinstance(value, bool)}
    return {**parts, "update_peak": memory.update_peak, "sampling_peak": memory.sampling_peak}


def _points(points: list[Point]) -> dict[str, Any]:
    limit = limit_of(points)
    rows = [
        {
            "num_gpus": point.num_gpus,
            "prompts": point.prompts,
            "step_s": point.time.total,
            "efficiency": point.efficiency,
            "fits": point.fits,
            "phases_s": point.time.phases,
        }
        for point in points
    ]
    return {"points": rows, "limit": None if limit is None else {**asdict(limit), "reason": limit.reason}}
