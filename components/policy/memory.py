"""What takes memory in training, and the keys that lower it."""

from contextlib import AbstractContextManager

from components.policy.config import EngineConfig
from components.shared.memory import memory_for


def memory_for_loading(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Name what helps where a model, its optimizer or its reference does not fit."""
    key = f"{stage}.engine"
    remedies = [f"set {key}.zero_stage: 3 (it is {config.zero_stage})"] if config.zero_stage < 3 else []
    if config.offload != "all":
        remedies.append(f"set {key}.offload: all (it is {config.offload})")
    if config.num_processes > 1:
        remedies.append(f"lower {key}.num_processes (it is {config.num_processes}): each loads the model")
    return memory_for("loading the model", *remedies, "use a smaller model")


def memory_for_passes(stage: str, config: EngineConfig, purpose: str, *more: str) -> AbstractContextManager[None]:
    """Name what helps where micro-batches do not fit, and what else does."""
    lower = f"lower {stage}.engine.micro_batch_tokens (it is {config.micro_batch_tokens})"
    return memory_for(purpose, lower, *more)


def memory_for_update(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Name what helps where the backward pass or the optimizer's step does not fit."""
    more = [] if config.gradient_checkpointing else [f"set {stage}.engine.gradient_checkpointing: true"]
    more += [f"set {stage}.engine.offload: optimizer"] if config.offload == "none" else []
    return memory_for_passes(stage, config, "the update of the policy", *more)
