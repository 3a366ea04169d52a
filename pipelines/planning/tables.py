"""A plan as aligned text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.planning.hardware import GIB, Gpu, usable_bytes
from pipelines.planning.memory import Memory
from pipelines.planning.ppo import Comparison
from pipelines.planning.run import Run
from pipelines.planning.step_time import PHASES, StepTime

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
    "update_peak": "most in the update",
    "sampling_peak": "most while sampling",
}


def gib(num_bytes: float) -> str:
    """Return bytes as GiB, small amounts with their digits."""
    amount = num_bytes / GIB
    return f"{amount:,.1f}" if amount >= 1 or not amount else f"{amount:.2g}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths).rstrip() for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join([row[0].ljust(widths[0]), *others])


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
    marks = {stage: f"ZeRO {stage}" + ("*" if stage == run.engine.zero_stage else "") for stage in by_stage}
    rows = [["Memory of a GPU, GiB", *marks.values()]]
    for name, label in _PARTS.items():
        rows.append([label, *(gib(getattr(each, name)) for each in by_stage.values())])
    usable = usable_bytes(gpu)
    rows.append([f"fits into {gib(usable)}", *("yes" if each.peak <= usable else "no" for each in by_stage.values())])
    note = "\n* as in the params file"
    if run.engine.element_bytes == 2:
        note += "; bf16 needs ZeRO 2 or 3, where gradients are summed in fp32"
    return aligned(rows) + note


def time(found: StepTime, run: Run) -> str:
    """Return the phases of a step, and what each spends most on."""
    rows = [["Time of a step", "s", "share", "most of it"]]
    for phase in PHASES:
        seconds = found.phase(phase)
        parts = {name: value for (of, name), value in found.terms.items() if of == phase}
        most = max(parts, key=lambda name: parts[name]) if seconds else ""
        rows.append([phase, f"{seconds:.1f}", f"{seconds / found.total:.0%}", most])
    rows.append(["step", f"{found.total:.1f}", "", "overlapped" if found.overlap else ""])
    generated = run.work.completions * run.work.mean_completion_tokens / found.total
    return aligned(rows) + f"\n{generated:,.0f} completion tokens per second, {generated / run.num_gpus:,.0f} per GPU"


def ppo(found: Comparison) -> str:
    """Return what PPO's critic would add."""
    return (
        f"Under PPO, a critic of the same shape adds {gib(found.critic_bytes)} GiB per GPU, "
        f"{found.states_share:.0%} of all models with their\ngradients and optimizers, "
        f"{found.peak_share:.0%} of the most that is held. "
        f"It adds {found.critic_s:.1f} s to a step, {found.time_share:.0%} of PPO's."
    )


def assumptions(run: Run) -> str:
    """Return which lengths the times are for."""
    work = run.work
    return (
        f"Times are for completions of {work.mean_completion_tokens:,.0f} tokens in the mean (--completion-tokens), "
        f"the longest of {work.completion_tokens:,},\nand prompts of {work.mean_prompt_tokens:,.0f}. "
        "docs/explanation/planning.md says what is assumed, and how far published runs are from it."
    )
