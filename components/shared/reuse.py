"""Stages that an earlier run on this machine has finished, whose outputs a run takes in place of computing them again.

`grpo-pipeline run` offers finished stages in a file beside its journal. A stage takes one whose settings, inputs, code,
lock of packages, and files and models from outside the graph are its own, and whose outputs are undamaged: every byte
is read and compared, which costs seconds for what took hours. Outputs are hard links to those of the earlier run.
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from components.shared import jsonl, lineage
from components.shared.config import Config, without_operational
from components.shared.environment import JOURNAL_VARIABLE
from components.shared.errors import PipelineError
from components.shared.execution import current_environment
from components.shared.lineage import Lineage, Material
from components.shared.model import local_model, model_file
from components.shared.own_code import own_code_materials
from components.shared.progress import say

_OFFERS = "reuse.json"


class Finished(BaseModel):
    """A stage that a run has finished, as its journal records it."""

    model_config = ConfigDict(frozen=True)

    run: str
    """Name of the run that computed it."""
    outputs: dict[str, Path]
    digests: dict[str, str]
    """Of the outputs."""
    code: dict[str, str]
    """Digest of each package of code that the stage imports."""
    seconds: float
    metrics: dict[str, float]


def offer(journal: Path, stages: Mapping[str, Sequence[Finished]]) -> None:
    """Offer finished stages, by name, to the stages that write to a journal."""
    values = {name: [each.model_dump(mode="json") for each in finished] for name, finished in stages.items()}
    jsonl.write_json(journal.with_name(_OFFERS), values)


def find(stage: str, config: Config, made_by: Lineage, outputs: Iterable[str]) -> Finished | None:
    """Return the first finished stage on offer that is the same work; None without any."""
    inputs = {name: each.digest for name, each in made_by.work.inputs.items()}
    for each in _offers(stage):
        if each.outputs.keys() != set(outputs):
            continue
        if not difference(stage, config, inputs, each):
            damage = damaged(each)
            if not damage:
                return each
            say(stage, f"{damage}; it is not used")
    return None


def _offers(stage: str) -> list[Finished]:
    journal = os.environ.get(JOURNAL_VARIABLE)
    path = Path(journal).with_name(_OFFERS) if journal else None
    values = jsonl.read_json(path).get(stage, []) if path and path.is_file() else []
    return [Finished.model_validate(each) for each in values]


def difference(stage: str, config: Config, inputs: Mapping[str, str], finished: Finished) -> str:
    """Return how the work to be done differs from that of a finished stage, for people; empty where it does not.

    `inputs` are the digests of the inputs, by name.
    """
    made_by = made_by_of(finished)
    if made_by is None:
        return f"the outputs of {finished.run} are gone"
    work = made_by.work
    try:
        before = type(config).model_validate(work.config)
    except ValidationError:
        return f"the settings of {finished.run} are of another version"
    code = lineage.stage_code(stage)
    differing = lineage.differences(
        stage,
        _fingerprint(before, {name: each.digest for name, each in work.inputs.items()}, finished.code),
        _fingerprint(config, inputs, code),
    )
    environment = made_by.environment()
    if not differing and environment and environment.lock != current_environment().lock:
        differing = "requirements.lock"
    changed = (name for name, material in work.materials.items() if not _is_unchanged(name, material))
    return differing or next(changed, "")


def made_by_of(finished: Finished) -> Lineage | None:
    """Return the lineage of a finished stage; None where an output is gone."""
    try:
        every = [lineage.read(path) for path in finished.outputs.values()]
    except PipelineError:
        return None
    return every[0] if every and None not in every else None


def damaged(finished: Finished) -> str:
    """Return which output of a finished stage is not as it was made, after reading every byte; empty for none."""
    for name, path in finished.outputs.items():
        if lineage.digest(path) != finished.digests[name]:
            return f"{path}: has changed since {finished.run} made it"
    return ""


def link(finished: Finished, outputs: Mapping[str, Path]) -> None:
    """Fill the empty folders `outputs` with the outputs of a finished stage and their lineage."""
    for name, path in outputs.items():
        shutil.copytree(finished.outputs[name], path, copy_function=link_or_copy, dirs_exist_ok=True)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has no such links or the two are on different ones."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _fingerprint(config: Config, inputs: Mapping[str, str], code: Mapping[str, str]) -> dict[str, Any]:
    return {"config": without_operational(config), "inputs": inputs, "code": code, "files": code}


def _is_unchanged(name: str, material: Material) -> bool:
    """Whether a file or model from outside the graph is still what a stage has read.

    Data of other repositories are fetched anew: what is made of them decides about the stages that follow.
    """
    try:
        if material.sha256 is None:
            return model_file(name, "config.json").parent.name == material.commit
        if material.repository is not None:
            return False
        if ":" in name:  # a reward or an environment of the user's
            return own_code_materials([name]).get(name) == material
        return lineage.digest(Path(local_model(name))) == material.sha256
    except PipelineError:
        return False
