"""The disk space that a run on this machine takes, as far as its params tell."""

import shutil
from pathlib import Path

from components.policy.config import CheckpointConfig, EngineConfig
from components.preflight.config import Params
from components.preflight.resources import shape_of_base

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
_OPTIMIZER_BYTES = 12
"""Of a trained parameter in a checkpoint: the weight and two moments in fp32."""
_GB = 1e9


def short_of_disk(params: Params, outputs: Path) -> str | None:
    """Return a line where a run would not fit on the disk of `outputs`; None where it does, or nobody can tell.

    Counted are the models that a run keeps and the checkpoints of the stage that has more of them, with the one that is
    being written; not data, reports and adapters.
    """
    shape = shape_of_base(params)
    if shape is None:
        return None
    sft, grpo = params.train_sft, params.train_grpo
    # The policy; the reference where it is trained; a base model that is made: an existing one is referred to.
    num_models = 1 + bool(sft.num_steps) + bool(sft.model.scratch)
    element = max(_ELEMENT_BYTES[engine.precision] for engine in (sft.engine, grpo.engine))
    models = num_models * element * shape.num_parameters / _GB
    trained = [stage for stage in (sft, grpo) if stage.num_steps]
    per_parameter = max((_checkpoint_bytes(stage.engine, stage.checkpoint) for stage in trained), default=0)
    checkpoints = per_parameter * shape.num_parameters / _GB
    folder = next(each for each in (outputs.resolve(), *outputs.resolve().parents) if each.exists())
    free = shutil.disk_usage(folder).free / _GB
    if models + checkpoints <= free:
        return None
    return (
        f"{folder}: {free:,.1f} GB are free, and a run takes about {models + checkpoints:,.1f} GB there "
        f"({models:,.1f} for models, {checkpoints:,.1f} for checkpoints); make room, or lower checkpoint.keep_last"
    )


def _checkpoint_bytes(engine: EngineConfig, config: CheckpointConfig) -> int:
    """Bytes of all checkpoints of a stage at once, for each parameter of the model."""
    number = config.keep_last + config.keep_best + 1
    return 0 if engine.lora else number * (_OPTIMIZER_BYTES + _ELEMENT_BYTES[engine.precision])
