"""`grpo-pipeline plan`: the memory and time that a params file needs on given GPUs."""

from dataclasses import replace
from pathlib import Path

from components.preflight.config import load_params
from components.report.formatting import duration
from components.shared.errors import PipelineError
from components.shared.page import percent
from pipelines.plan.counted import CountedShape
from pipelines.plan.hardware import GIB, Gpu
from pipelines.plan.hardware import gpu as find_gpu
from pipelines.plan.memory import cheapest_changes, fits, memory_of, peak
from pipelines.plan.run import Run, run_of
from pipelines.plan.step_time import EFFICIENCY, step_time
from pipelines.tables import aligned

_MAX_GPUS = 16_384
_LABELS = {
    "buffers": "buffers of the update",
    "reward_model": "reward model",
    "engine": "vLLM's context and graphs",
    "sampler_weights": "sampler's weights",
    "kv_cache": "KV cache",
    "sampling": "logits while sampling",
    "update_peak": "peak during the update",
    "sampling_peak": "peak during sampling",
}
"""Labels of parts in the table, if they differ from their names."""


def plan(params: Path, gpus: int, gpu: str, completion_tokens: float | None) -> None:
    """Print memory and time of a params file's run on `gpus` devices of the kind `gpu`."""
    if not 1 <= gpus <= _MAX_GPUS:
        raise PipelineError(f"--gpus {gpus}: from 1 to {_MAX_GPUS:,} is accepted")
    device, config = find_gpu(gpu), load_params(params)
    if config.train_grpo.engine.precision == "bf16" and not device.bf16_rate:
        raise PipelineError(f"--gpu {gpu}: it has no bfloat16; set train_grpo.engine.precision: fp32")
    run = run_of(config, gpus, completion_tokens, engine_sequences=device.engine_sequences)
    parts = [
        _heading(params, run, device),
        *([_about_counting(run.shape)] if isinstance(run.shape, CountedShape) else []),
        _memory(run, device),
        _verdict(run, device),
        _time(run, device, config.train_grpo.num_steps),
        f"Times assume, on average, prompts of {run.mean_prompt_tokens:,.0f} tokens and completions of "
        f"{run.mean_completion_tokens:,.0f} (--completion-tokens; {run.completion_tokens:,} at most).\n"
        "docs/explanation/planning.md lists the assumptions; docs/scaling.md compares plans with published runs.",
    ]
    print("\n\n".join(parts))


def _heading(path: Path, run: Run, gpu: Gpu) -> str:
    precision = "bf16" if run.element_bytes == 2 else "fp32"
    trained = f" ({run.num_trained / 1e6:,.1f}M trained)" if run.lora_rank else ""
    size = run.shape.num_parameters
    parameters = f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.2f}M"
    work = f"{run.prompts:,} prompts x {run.group_size} completions of up to {run.completion_tokens:,} tokens per step"
    return (
        f"{path} on {run.num_gpus} x {gpu.name}: {parameters} parameters{trained} in {precision}, "
        f"ZeRO {run.zero_stage}\n{work}, sampled by {run.sampler}"
    )


def _about_counting(shape: CountedShape) -> str:
    """Return what a plan assumes about a model whose weights were counted."""
    active_fraction = shape.active_weights / shape.layer_weights
    by = f"by {percent(active_fraction, 0)} of the layers' weights"
    experts = f"A token is computed\n{by}. " if active_fraction < 1 else ""
    return (
        f"{shape.family}: planned in padded rows, each prompt once per completion and each completion as long as the "
        "longest.\nThat is an upper bound: where the model takes packed rows, the log says so when it is loaded. "
        f"{experts}Activations are estimated from the active weights."
    )


def _memory(run: Run, gpu: Gpu) -> str:
    """Return a table of a GPU's memory by part; the ZeRO stage of the params file is marked."""
    by_stage = {stage: memory_of(replace(run, zero_stage=stage)) for stage in range(4)}
    stages = [f"ZeRO {stage}*" if stage == run.zero_stage else f"ZeRO {stage}" for stage in by_stage]
    rows = [["Memory of a GPU, GiB", *stages]]
    for name in by_stage[0]:
        # Gathered weights exist only for a moment, and the peak of sampling includes them.
        if name != "gathered" and any(memory[name] for memory in by_stage.values()):
            rows.append([_LABELS.get(name, name), *(_gib(memory[name]) for memory in by_stage.values())])
    precision, lowest_stage = ("bf16", 2) if run.element_bytes == 2 else ("fp32", 0)
    can_train = [
        "yes" if stage >= lowest_stage and peak(memory) <= gpu.usable_bytes else "no"
        for stage, memory in by_stage.items()
    ]
    rows.append([f"can train in {precision}", *can_train])
    usable = _gib(gpu.usable_bytes)
    notes = f"* as in the params file. The driver and fragmentation leave {usable} GiB of the GPU's memory."
    if lowest_stage:
        notes += "\nZeRO 0 and 1 do not train in bf16: they would sum the gradients in bf16."
    return f"{aligned(rows, left=1)}\n{notes}"


def _verdict(run: Run, gpu: Gpu) -> str:
    """Return a line that says whether a run fits, and otherwise a line with the changes that make it fit."""
    needed, usable = _gib(peak(memory_of(run))), _gib(gpu.usable_bytes)
    if fits(run, gpu):
        return f"Fits: {needed} of {usable} usable GiB."
    changes = cheapest_changes(run, gpu)
    remedy = f"The cheapest change of train_grpo that makes it fit: {changes}" if changes else "No setting makes it fit"
    return f"Does not fit: it needs {needed} GiB, and {usable} are usable.\n{remedy}."


def _time(run: Run, gpu: Gpu, num_steps: int) -> str:
    """Return a table of the phases of a step, and the time of all steps."""
    time = step_time(run, gpu)
    condition = "" if fits(run, gpu) else ", if it fitted"
    rows = [[f"Time of a step{condition}", ""]]
    rows += [[phase, duration(seconds)] for phase, seconds in time.phases.items()]
    rows.append(["step, overlapped" if time.overlap else "step", duration(time.total)])
    completion_tokens = run.prompts * run.group_size * run.mean_completion_tokens
    rate, total = completion_tokens / time.total, duration(num_steps * time.total)
    return (
        f"{aligned(rows, left=1)}\n"
        f"{rate:,.0f} completion tokens per second over a whole step; {num_steps:,} steps take {total}\n"
        f"GPUs are assumed to reach {percent(EFFICIENCY, 0)} of their peak arithmetic and bandwidth. Step times\n"
        "that others published are 0.7 to 1.5 times the plan's (longer for models below a billion parameters)."
    )


def _gib(num_bytes: float) -> str:
    amount = num_bytes / GIB
    return f"{amount:,.1f}" if amount >= 1 or not amount else f"{amount:.2g}"
