"""Finished work and where its outputs are: what "done" means to a local run, to DVC and to a cluster's retry.

<root>/<stage>/<key>.json    a record of the work with this key: its fingerprint, and each place that has its outputs

Work is the same where its settings, inputs and code are, which make the key, and the lock of packages and what was
read from outside the graph as well. Its outputs are taken in place of computing them again where every byte is as it
was made: reading them costs seconds for what took hours. They become hard links to those of the earlier run.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.execution import current_environment
from components.shared.lineage import Fingerprint, Lineage, Material
from components.shared.model import local_model, model_file
from components.shared.own_code import own_code_materials
from components.shared.progress import say
from components.shared.work import work_folder


class Result(BaseModel):
    """Finished work in one place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Name of the run that computed it."""
    outputs: dict[str, Path]
    """Folder of each output; in the file they are relative to it, so that both can be moved together."""
    digests: dict[str, str]
    """Of the outputs."""
    seconds: float
    metrics: dict[str, float]

    @classmethod
    def of(cls, run: str, outputs: Mapping[str, Path], *, seconds: float, metrics: Mapping[str, float]) -> "Result":
        """Return the result of a run that has just filled these outputs."""
        paths = {name: path.resolve() for name, path in outputs.items()}
        digests = {name: lineage.digest(path) for name, path in paths.items()}
        return cls(run=run, outputs=paths, digests=digests, seconds=seconds, metrics=dict(metrics))

    def is_in(self, outputs: Mapping[str, Path]) -> bool:
        """Tell whether these are the folders of its outputs."""
        return self.outputs == {name: path.resolve() for name, path in outputs.items()}


class Record:
    """What has finished the work with a fingerprint."""

    def __init__(self, root: Path, stage: str, fingerprint: Fingerprint) -> None:
        self.stage, self.fingerprint = stage, fingerprint
        self._path = work_folder(root, stage, fingerprint).with_suffix(".json")

    def results(self) -> list[Result]:
        """Return every result, the newest first, whether or not its outputs are still there."""
        return read_record(self._path)[1]

    def find(
        self, outputs: Mapping[str, Path], *, in_place: bool = False, known: Collection[Result] | None = None
    ) -> Result | None:
        """Return the newest result that can be taken; None without any. A damaged one is named.

        What is outside of the graph is looked at for results of other times: not for one that an earlier attempt of
        this run, or a run beside it, has made.

        Args:
            outputs: Folder of each output of the stage.
            in_place: Whether only a result in these very folders counts.
            known: Results of other times, which do not count; None where they do.
        """
        for each in self.results():
            fits = each.is_in(outputs) if in_place else each.outputs.keys() == outputs.keys()
            is_of_now = in_place or known is not None
            if not fits or each in (known or ()) or (made_by_of(each) is None if is_of_now else changed(each)):
                continue
            damage = damaged(each)
            if not damage:
                return each
            say(self.stage, f"{damage}; it is not used")
        return None

    def add(self, result: Result) -> None:
        """Record a result; those whose outputs are gone are forgotten."""
        others = [each for each in self.results() if each.outputs != result.outputs and made_by_of(each)]
        values = [each.model_dump(mode="json") for each in (result, *others)]
        for each in values:
            each["outputs"] = {
                name: os.path.relpath(path, self._path.parent.resolve()) for name, path in each["outputs"].items()
            }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.partial")
        jsonl.write_json(partial, {"fingerprint": self.fingerprint, "results": values})
        partial.replace(self._path)


def read_record(path: Path) -> tuple[Fingerprint, list[Result]]:
    """Return what a record says; nothing for one that is missing, damaged or of another version."""
    with suppress(PipelineError, ValidationError, KeyError, TypeError):
        content = jsonl.read_json(path)
        results = [Result.model_validate(each) for each in content["results"]]
        folder = path.parent.resolve()
        for each in results:
            each.outputs.update({name: (folder / output).resolve() for name, output in each.outputs.items()})
        fingerprint: Fingerprint = content["fingerprint"]
        return fingerprint, results
    return {}, []


def changed(result: Result) -> str:
    """Return what else than settings, inputs and code keeps a result from being taken, for people; empty for nothing.

    Data of other repositories are fetched anew: what is made of them decides about the stages that follow.
    """
    made_by = made_by_of(result)
    if made_by is None:
        return f"the outputs of {result.run} are gone"
    environment = made_by.environment()
    if environment and environment.lock != current_environment().lock:
        return "requirements.lock"
    materials = made_by.work.materials.items()
    return next((name for name, material in materials if not _is_unchanged(name, material)), "")


def made_by_of(result: Result) -> Lineage | None:
    """Return the lineage of a result; None where an output is gone."""
    try:
        every = [lineage.read(path) for path in result.outputs.values()]
    except PipelineError:
        return None
    return every[0] if every and None not in every else None


def damaged(result: Result) -> str:
    """Return which output is not as it was made, after reading every byte; empty for none."""
    for name, path in result.outputs.items():
        if lineage.digest(path) != result.digests[name]:
            return f"{path}: has changed since {result.run} made it"
    return ""


def _is_unchanged(name: str, material: Material) -> bool:
    """Whether a file or model from outside the graph is still what a stage has read."""
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
