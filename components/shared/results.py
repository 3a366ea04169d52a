"""Finished work and its outputs: what "done" means to a local run, to DVC and to a cluster's retry.

<root>/<stage>/<key>.json    a record of the work with this key: its fingerprint, and every copy of its outputs

Two runs do the same work if settings, inputs and code (which determine the key), requirements.lock and all files from
outside the graph are equal. Outputs are reused, as hard links, after every byte is verified: that takes seconds.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from components.shared import jsonl, lineage
from components.shared.custom_code import custom_code_materials
from components.shared.errors import PipelineError
from components.shared.execution import current_environment
from components.shared.lineage import Fingerprint, Lineage, Material
from components.shared.model import local_model, model_file
from components.shared.progress import say
from components.shared.work import work_folder


class Result(BaseModel):
    """Finished work and one copy of its outputs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Name of the run that computed it."""
    outputs: dict[str, Path]
    """Folder of each output; in the record's file relative to that file, so that both can be moved together."""
    digests: dict[str, str]
    """Digest of each output."""
    seconds: float
    metrics: dict[str, float]

    @classmethod
    def of(cls, run: str, outputs: Mapping[str, Path], *, seconds: float, metrics: Mapping[str, float]) -> "Result":
        """Return the result of a run that has just filled these outputs."""
        paths = {name: path.resolve() for name, path in outputs.items()}
        digests = {name: lineage.digest(path) for name, path in paths.items()}
        return cls(run=run, outputs=paths, digests=digests, seconds=seconds, metrics=dict(metrics))

    def is_in(self, outputs: Mapping[str, Path]) -> bool:
        """Return whether the outputs are in these folders."""
        return self.outputs == {name: path.resolve() for name, path in outputs.items()}


class Record:
    """The results of the work with a fingerprint."""

    def __init__(self, root: Path, stage: str, fingerprint: Fingerprint) -> None:
        self.stage, self.fingerprint = stage, fingerprint
        self._path = work_folder(root, stage, fingerprint).with_suffix(".json")

    def results(self) -> list[Result]:
        """Return every result, the newest first, even if its outputs are gone."""
        return read_record(self._path)[1]

    def find(self, can_reuse: Callable[[Result], bool]) -> Result | None:
        """Return the newest result that `can_reuse` accepts and whose outputs are undamaged, or None."""
        for each in self.results():
            if _lineage_of(each) and can_reuse(each):
                fault = damage(each)
                if not fault:
                    return each
                say(self.stage, f"{fault}; it is not used")
        return None

    def add(self, result: Result) -> None:
        """Record a result; results whose outputs are gone or overwritten are dropped."""
        others = [each for each in self.results() if each.outputs != result.outputs and _lineage_of(each)]
        values = [each.model_dump(mode="json") for each in (result, *others)]
        folder = self._path.parent.resolve()
        for each in values:
            each["outputs"] = {name: os.path.relpath(path, folder) for name, path in each["outputs"].items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.partial")
        jsonl.write_json(partial, {"fingerprint": self.fingerprint, "results": values})
        partial.replace(self._path)


def read_record(path: Path) -> tuple[Fingerprint, list[Result]]:
    """Return fingerprint and results in a record's file; both empty if it is missing, damaged or of another version."""
    with suppress(PipelineError, ValidationError, KeyError, TypeError):
        content = jsonl.read_json(path)
        results = [Result.model_validate(each) for each in content["results"]]
        folder = path.parent.resolve()
        for each in results:
            each.outputs.update({name: (folder / output).resolve() for name, output in each.outputs.items()})
        fingerprint: Fingerprint = content["fingerprint"]
        return fingerprint, results
    return {}, []


def external_change(result: Result) -> str:
    """Return what has changed besides settings, inputs and code, for people; empty if nothing has.

    Data from other repositories always count as changed, so that they are fetched again.
    """
    made_by = _lineage_of(result)
    if made_by is None:
        return f"the outputs of {result.run} are gone"
    environment = made_by.environment()
    if environment and environment.lock != current_environment().lock:
        return "requirements.lock"
    materials = made_by.work.materials.items()
    return next((name for name, material in materials if not _is_unchanged(name, material)), "")


def other_settings(result: Result, stage: str, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config whose values differ from those with which a result of the same work was made."""
    made_by = _lineage_of(result)
    before = dict(lineage.flat(stage, made_by.work.config)) if made_by else {}
    now = dict(lineage.flat(stage, config))
    return [key for key, value in before.items() if now.get(key) != value]


def _lineage_of(result: Result) -> Lineage | None:
    """Return the lineage that the outputs of a result share; None if an output is gone or damaged."""
    try:
        lineages = [lineage.read(path) for path in result.outputs.values()]
    except PipelineError:
        return None
    return lineages[0] if lineages and None not in lineages else None


def damage(result: Result) -> str:
    """Return a message about the first output that has changed, after reading every byte; empty if none has."""
    for name, path in result.outputs.items():
        if lineage.digest(path) != result.digests[name]:
            return f"{path}: has changed since {result.run} made it"
    return ""


def _is_unchanged(name: str, material: Material) -> bool:
    """Return whether a file or model from outside the graph is still the one that a stage read."""
    try:
        if material.sha256 is None:  # a model of the hub, whose cache has a folder for each commit
            return model_file(name, "config.json").parent.name == material.commit
        if material.repository is not None:
            return False
        if ":" in name:  # a custom reward or environment
            return custom_code_materials([name]).get(name) == material
        return lineage.digest(Path(local_model(name))) == material.sha256
    except PipelineError:
        return False
