"""What the training loops of SFT and GRPO share: learning rate, curves, and advice where memory runs out."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from components.policy.config import EngineConfig
from components.shared import jsonl
from components.shared.errors import explain_out_of_memory


def learning_rate(step: int, *, peak: float, warmup_steps: int, num_steps: int, final_fraction: float) -> float:
    """Return the rate of `step` (from 0): linear warm-up to `peak`, then linear decay to `final_fraction` of it."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return peak * (1 - (1 - final_fraction) * done)


def write_curves(folder: Path, rows: Sequence[Mapping[str, float | None]]) -> None:
    """Write steps.jsonl and curves.csv; all rows have the same columns, None where nothing was measured."""
    jsonl.write_rows(folder / "steps.jsonl", (dict(row) for row in rows))
    with (folder / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def memory_for_loading(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Say which keys to change where a model, its optimizer or its reference does not fit."""
    key = f"{stage}.engine"
    remedies = [f"set {key}.zero_stage: 3 (it is {config.zero_stage})"] if config.zero_stage < 3 else []
    if config.offload != "all":
        remedies.append(f"set {key}.offload: all (it is {config.offload})")
    if config.num_processes > 1:
        remedies.append(f"lower {key}.num_processes (it is {config.num_processes}): each loads the model")
    return explain_out_of_memory("loading the model", *remedies, "use a smaller model")


def memory_for_passes(stage: str, config: EngineConfig, purpose: str, *more: str) -> AbstractContextManager[None]:
    """Say which keys to change where micro-batches do not fit, and what else helps."""
    lower = f"lower {stage}.engine.micro_batch_tokens (it is {config.micro_batch_tokens})"
    return explain_out_of_memory(purpose, lower, *more)


def memory_for_update(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Say which keys to change where the backward pass or the optimizer's step does not fit."""
    more = [] if config.gradient_checkpointing else [f"set {stage}.engine.gradient_checkpointing: true"]
    more += [f"set {stage}.engine.offload: optimizer"] if config.offload == "none" else []
    return memory_for_passes(stage, config, "the update of the policy", *more)
