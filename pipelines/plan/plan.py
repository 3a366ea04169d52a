"""`grpo-pipeline plan`: what a params file needs on given GPUs, before anything is rented."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from components.preflight.config import load_params
from components.shared.errors import PipelineError
from pipelines.plan.hardware import GIB, Gpu, gpu
from pipelines.plan.job import Job, job_of
from pipelines.plan.memory import fits, memory_of, peak, smallest_change
from pipelines.plan.run import Run, run_of
from pipelines.plan.scaling import Point, draw, limit_of, loss_at, simulate
from pipelines.plan.step_time import CHECKPOINTS, DISK_RATE, OTHER, PHASES, SYNC, StepTime, checkpoint_bytes, critic

_MAX_GPUS = 16_384
_PLOTS = {".png", ".svg", ".pdf"}
_LABELS = {
    "buffers": "buffers of the update",
    "reward_model": "reward model",
    "engine": "vLLM's context and graphs",
    "sampler_weights": "sampler's weights",
    "kv_cache": "KV cache",
    "sampling": "logits while sampling",
    "update_peak": "peak of the update",
    "sampling_peak": "peak while sampling",
}
"""Of parts that are shown under another name."""
_REST = (SYNC, CHECKPOINTS, OTHER)
_SCALING_PHASES = [phase for phase in PHASES if phase not in _REST]


def plan(
    path: Path,
    num_gpus: int,
    gpu_name: str,
    completion_tokens: float | None,
    *,
    disk_gb_per_s: float = DISK_RATE / 1e9,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Print the plan of a params file for people, or as JSON; draw how it scales where a file is given."""
    if not 1 <= num_gpus <= _MAX_GPUS:
        raise PipelineError(f"--gpus {num_gpus}: from 1 to {_MAX_GPUS:,} is accepted")
    if disk_gb_per_s <= 0:
        raise PipelineError(f"--disk {disk_gb_per_s:g}: GB per second are expected, more than 0")
    if plot is not None and plot.suffix not in _PLOTS:
        raise PipelineError(f"--plot {plot}: the name of a file that ends in {', '.join(sorted(_PLOTS))} is accepted")
    device, params = gpu(gpu_name), load_params(path)
    if params.train_grpo.engine.precision == "bf16" and not device.bf16_rate:
        raise PipelineError(f"--gpu {gpu_name}: it has no bfloat16; set train_grpo.engine.precision: fp32")
    run = run_of(params, num_gpus, completion_tokens, engine_sequences=device.engine_sequences)
    job = job_of(params, run, device, 1e9 * disk_gb_per_s)
    print(json.dumps(_figures(path, run, device, job), indent=1) if as_json else _text(path, run, device, job))
    if plot is not None:
        strong, weak = simulate(run, device, "strong"), simulate(run, device, "weak")
        draw({"fixed batch": strong, "batch grows with the GPUs": weak}, plot)


def _figures(path: Path, run: Run, gpu: Gpu, job: Job) -> dict[str, Any]:
    time, enough = job.step, fits(run, gpu)
    return {
        "params": str(path),
        "gpu": gpu.name,
        "num_gpus": run.num_gpus,
        "num_parameters": run.shape.num_parameters,
        "zero_stage": run.zero_stage,
        "usable_bytes": gpu.usable_bytes,
        "memory_bytes": {f"zero_{stage}": memory for stage, memory in _by_stage(run).items()},
        "fits": enough,
        "smallest_change": None if enough else smallest_change(run, gpu),
        "step_s": time.total,
        "phases_s": time.phases,
        "checkpoint_bytes": checkpoint_bytes(run),
        "job_hours": job.hours,
        "job_gpu_hours": job.gpu_hours,
        "ppo": critic(run, gpu),
        "scaling": {scaling: _points(simulate(run, gpu, scaling)) for scaling in ("strong", "weak")},
    }


def _by_stage(run: Run) -> dict[int, dict[str, float]]:
    return {stage: memory_of(replace(run, zero_stage=stage)) for stage in range(4)}


def _points(points: list[Point]) -> dict[str, Any]:
    rows = [
        {
            **{name: value for name, value in asdict(point).items() if name != "time"},
            "step_s": point.time.total,
            "phases_s": point.time.phases,
        }
        for point in points
    ]
    limit = limit_of(points)
    return {"points": rows, "limit": limit and asdict(limit)}


def _text(path: Path, run: Run, gpu: Gpu, job: Job) -> str:
    ppo = critic(run, gpu)
    parts = [
        _heading(path, run, gpu),
        _memory(run, gpu),
        _verdict(run, gpu),
        _time(run, job.step),
        _job(run, job),
        f"Under PPO, a critic of the same shape adds {_gib(ppo['critic_bytes'])} GiB per GPU, "
        f"{ppo['states_share']:.0%} of all models with their\ngradients and optimizers and "
        f"{ppo['peak_share']:.0%} of the peak. "
        f"It adds {ppo['critic_s']:.1f} s to a step, {ppo['time_share']:.0%} of PPO's.",
        _scaling("Strong scaling: the same step on more GPUs", simulate(run, gpu, "strong")),
        _scaling("Weak scaling: prompts grow with the GPUs", simulate(run, gpu, "weak")),
        f"Times are for completions of {run.mean_completion_tokens:,.0f} tokens on average (--completion-tokens), "
        f"the longest of {run.completion_tokens:,},\nand prompts of {run.mean_prompt_tokens:,.0f}. "
        "docs/explanation/planning.md lists the assumptions; docs/scaling.md compares plans with published runs.",
    ]
    return "\n\n".join(parts)


def _heading(path: Path, run: Run, gpu: Gpu) -> str:
    precision = "bf16" if run.element_bytes == 2 else "fp32"
    trained = f" ({run.num_trained / 1e6:,.1f}M trained)" if run.lora_rank else ""
    size = run.shape.num_parameters
    parameters = f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.2f}M"
    return (
        f"{path} on {run.num_gpus} x {gpu.name}: "
        f"{parameters} parameters{trained} in {precision}, ZeRO {run.zero_stage}\n"
        f"{run.prompts:,} prompts x {run.group_size} completions of up to {run.completion_tokens:,} tokens "
        f"per step, sampled by {run.sampler}"
    )


def _memory(run: Run, gpu: Gpu) -> str:
    """The memory of a GPU by part; the stage of the params file is marked."""
    by_stage = _by_stage(run)
    rows = [["Memory of a GPU, GiB", *(f"ZeRO {stage}" + "*" * (stage == run.zero_stage) for stage in by_stage)]]
    for name in by_stage[0]:
        if name != "gathered" and any(memory[name] for memory in by_stage.values()):  # a moment of the peak
            rows.append([_LABELS.get(name, name), *(_gib(memory[name]) for memory in by_stage.values())])
    fit = ("yes" if peak(memory) <= gpu.usable_bytes else "no" for memory in by_stage.values())
    rows.append([f"fits into {_gib(gpu.usable_bytes)}", *fit])
    note = "\n* as in the params file"
    if run.element_bytes == 2:
        note += "; bf16 needs ZeRO 2 or 3, where gradients are summed in fp32"
    return _aligned(rows) + note


def _verdict(run: Run, gpu: Gpu) -> str:
    figures = f"{_gib(peak(memory_of(run)))} of {_gib(gpu.usable_bytes)} usable GiB"
    if fits(run, gpu):
        return f"Fits: {figures}."
    change = smallest_change(run, gpu)
    remedy = f"the smallest change that makes it fit: {change}" if change else "no change of its settings makes it fit"
    return f"Does not fit: {figures}; {remedy}."


def _time(run: Run, time: StepTime) -> str:
    """The phases of a step, and the longest term of each."""
    rows = [["Time of a step", "s", "share", "most of it"]]
    for phase, seconds in time.phases.items():
        terms = {name: value for (of, name), value in time.terms.items() if of == phase}
        longest = max(terms, key=lambda name: terms[name]) if seconds else ""
        rows.append([phase, f"{seconds:.1f}", f"{seconds / time.total:.0%}", longest])
    rows.append(["step", f"{time.total:.1f}", "", "overlapped" if time.overlap else ""])
    rate = run.completions * run.mean_completion_tokens / time.total
    return _aligned(rows) + f"\n{rate:,.0f} completion tokens per second, {rate / run.num_gpus:,.0f} per GPU"


def _job(run: Run, job: Job) -> str:
    """The stages of the whole job, and the size of a checkpoint."""
    rows = [["The whole job", "hours", "GPU-hours"]]
    for stage, hours in job.hours.items():
        rows.append([stage, f"{hours:.1f}", f"{job.gpu_hours[stage]:.1f}"])
    rows.append(["job", f"{sum(job.hours.values()):.1f}", f"{sum(job.gpu_hours.values()):.1f}"])
    size, every = checkpoint_bytes(run), run.checkpoint_every
    return _aligned(rows) + f"\nA checkpoint has {_gib(size)} GiB and is written every {every} steps"


def _scaling(title: str, points: Sequence[Point]) -> str:
    """A row per number of GPUs, and where scaling stops."""
    rows = [[title, "prompts", "step s", *_SCALING_PHASES, "rest", "efficiency", "fits"]]
    for point in points:
        phases = point.time.phases
        rest = sum(phases[phase] for phase in _REST)
        seconds = [point.time.total, *(phases[phase] for phase in _SCALING_PHASES), rest]
        row = [
            f"{point.num_gpus} GPU{'s' * (point.num_gpus > 1)}",
            f"{point.prompts:,}",
            *(f"{each:.1f}" for each in seconds),
        ]
        rows.append([*row, f"{point.efficiency:.0%}", "yes" if point.fits else "no"])
    last, limit = points[-1], limit_of(points)
    loss = limit or loss_at(points[0], last)
    fact = f"falls below 50 % at {loss.num_gpus}" if limit else f"is still {last.efficiency:.0%} on {loss.num_gpus}"
    text = f"Efficiency {fact} GPUs; {loss.share:.0%} of the loss is {loss.phase}, {loss.term}:\n{loss.reason}."
    if last.prompts < last.num_gpus:
        text += f"\nA step has {last.prompts} prompts; more GPUs than that are refused."
    return f"{_aligned(rows)}\n{text}"


def _gib(num_bytes: float) -> str:
    """Bytes as GiB, small amounts with their digits."""
    amount = num_bytes / GIB
    return f"{amount:,.1f}" if amount >= 1 or not amount else f"{amount:.2g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns: the first aligned to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))] for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)
