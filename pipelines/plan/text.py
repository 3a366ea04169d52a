"""A plan as aligned text for people."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.plan.hardware import GIB, Gpu, usable_bytes
from pipelines.plan.memory import Memory
from pipelines.plan.run import Run
from pipelines.plan.scaling import Point, limit_of, loss_at
from pipelines.plan.step_time import OTHER, PHASES, SYNC, Critic, StepTime

_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "reference": "reference",
    "activations": "activations",
    "buffers": "buffers of the update",
    "sampler_weights": "sampler's weights",
    "kv_cache": "KV cache",
    "sampling": "logits while sampling",
    "update_peak": "peak of the update",
    "sampling_peak": "peak while sampling",
}
_SCALING_PHASES = [phase for phase in PHASES if phase not in (SYNC, OTHER)]


def gib(num_bytes: float) -> str:
    """Return bytes as GiB, small amounts with their digits."""
    amount = num_bytes / GIB
    return f"{amount:,.1f}" if amount >= 1 or not amount else f"{amount:.2g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns: the first aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def heading(path: Path, run: Run, gpu: Gpu) -> str:
    """Return what is planned, in two lines."""
    work, engine = run.work, run.engine
    precision = "bf16" if engine.element_bytes == 2 else "fp32"
    trained = f" ({run.num_trained / 1e6:,.1f}M trained)" if engine.lora_rank else ""
    size = run.shape.num_parameters
    parameters = f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.2f}M"
    return (
        f"{path} on {run.num_gpus} x {gpu.name}: "
        f"{parameters} parameters{trained} in {precision}, ZeRO {engine.zero_stage}\n"
        f"{work.prompts:,} prompts x {work.group_size} completions of up to {work.completion_tokens:,} tokens "
        f"per step, sampled by {run.sampler.engine}"
    )


def memory(by_stage: Mapping[int, Memory], run: Run, gpu: Gpu) -> str:
    """Return the memory of a GPU by part; the stage of the params file is marked."""
    stages = [f"ZeRO {stage}" + ("*" if stage == run.engine.zero_stage else "") for stage in by_stage]
    rows = [["Memory of a GPU, GiB", *stages]]
    rows += [[label, *(gib(getattr(each, name)) for each in by_stage.values())] for name, label in _PARTS.items()]
    usable = usable_bytes(gpu)
    rows.append([f"fits into {gib(usable)}", *("yes" if each.peak <= usable else "no" for each in by_stage.values())])
    note = "\n* as in the params file"
    if run.engine.element_bytes == 2:
        note += "; bf16 needs ZeRO 2 or 3, where gradients are summed in fp32"
    return _aligned(rows) + note


def time(time: StepTime, run: Run) -> str:
    """Return the phases of a step, and the longest term of each."""
    rows = [["Time of a step", "s", "share", "most of it"]]
    for phase, seconds in time.phases.items():
        terms = {name: value for (of, name), value in time.terms.items() if of == phase}
        longest = max(terms, key=lambda name: terms[name]) if seconds else ""
        rows.append([phase, f"{seconds:.1f}", f"{seconds / time.total:.0%}", longest])
    rows.append(["step", f"{time.total:.1f}", "", "overlapped" if time.overlap else ""])
    rate = run.work.completions * run.work.mean_completion_tokens / time.total
    return _aligned(rows) + f"\n{rate:,.0f} completion tokens per second, {rate / run.num_gpus:,.0f} per GPU"


def ppo(critic: Critic) -> str:
    """Return what PPO's critic would add."""
    return (
        f"Under PPO, a critic of the same shape adds {gib(critic.critic_bytes)} GiB per GPU, "
        f"{critic.states_share:.0%} of all models with their\ngradients and optimizers and "
        f"{critic.peak_share:.0%} of the peak. "
        f"It adds {critic.critic_s:.1f} s to a step, {critic.time_share:.0%} of PPO's."
    )


def scaling(title: str, points: Sequence[Point]) -> str:
    """Return a row per number of GPUs, and where scaling stops."""
    rows = [[title, "prompts", "step s", *_SCALING_PHASES, "rest", "efficiency", "fits"]]
    for point in points:
        phases = point.time.phases
        seconds = [point.time.total, *(phases[phase] for phase in _SCALING_PHASES), phases[SYNC] + phases[OTHER]]
        row = [f"{point.num_gpus} GPUs", f"{point.prompts:,}", *(f"{each:.1f}" for each in seconds)]
        rows.append([*row, f"{point.efficiency:.0%}", "yes" if point.fits else "no"])
    return _aligned(rows) + "\n" + _limit(points)


def _limit(points: Sequence[Point]) -> str:
    last, limit = points[-1], limit_of(points)
    loss = limit or loss_at(points[0], last)
    fact = f"falls below 50 % at {loss.num_gpus}" if limit else f"is still {last.efficiency:.0%} on {loss.num_gpus}"
    text = f"Efficiency {fact} GPUs; {loss.share:.0%} of the loss is {loss.phase}, {loss.term}:\n{loss.reason}."
    if last.prompts < last.num_gpus:
        text += f"\nA step has {last.prompts} prompts; more GPUs than that are refused."
    return text


def assumptions(run: Run) -> str:
    """Return the lengths that the times are for."""
    work = run.work
    return (
        f"Times are for completions of {work.mean_completion_tokens:,.0f} tokens on average (--completion-tokens), "
        f"the longest of {work.completion_tokens:,},\nand prompts of {work.mean_prompt_tokens:,.0f}. "
        "docs/explanation/planning.md lists the assumptions, and compares plans with published runs."
    )
