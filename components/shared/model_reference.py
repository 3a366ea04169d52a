"""Models that are passed on by reference: a folder with pipeline.json alone, which says where the weights are."""

import shutil
from pathlib import Path

from components.shared import jsonl, lineage
from components.shared.errors import PipelineError

PIPELINE_FILE = "pipeline.json"
"""Beside the weights: how a question is put to the model ("prompt"), where its responses state their answer ("answer")
and, if the weights are elsewhere, where ("weights"), with their "digest" or "revision"."""


def is_model(folder: Path) -> bool:
    """Tell whether a stage has put a whole model into a folder, and no reference to one."""
    path = folder / PIPELINE_FILE
    return path.is_file() and "weights" not in jsonl.read_json(path)


def refer(folder: Path, model: Path) -> None:
    """Fill a folder with a reference to a model that a stage has made, and with its lineage."""
    described = jsonl.read_json(model / PIPELINE_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write_json(
        folder / PIPELINE_FILE, {**described, "weights": str(model.resolve()), "digest": lineage.digest(model)}
    )
    shutil.copy(model / lineage.FILE_NAME, folder / lineage.FILE_NAME)


def followed(folder: Path) -> Path:
    """Return the folder of the model that a stage has made, where `folder` is but a reference to it; else `folder`.

    A reference to a model that no stage has made stays one: how it is asked is written there alone.
    """
    path = folder / PIPELINE_FILE
    if not path.is_file():
        return folder
    described = jsonl.read_json(path)
    if "digest" not in described:
        return folder
    model = Path(described["weights"])
    if not model.is_dir():
        raise PipelineError(f"{path}: the model is in {model}, which is not there; is the volume with it mounted?")
    if not (model / lineage.FILE_NAME).is_file() or not (model / PIPELINE_FILE).is_file():
        return folder
    own = jsonl.read_json(model / PIPELINE_FILE)
    is_same = all(own.get(key) == described.get(key) for key in ("prompt", "answer"))
    return model if is_same and "weights" not in own else folder


def refuse_changed(folder: Path, digest: str) -> None:
    """Raise PipelineError where `folder` refers to a model of another digest than the one that is there now."""
    if followed(folder) == folder:
        return
    described = jsonl.read_json(folder / PIPELINE_FILE)
    if described["digest"] != digest:
        raise PipelineError(
            f"model {described['weights']}: has changed since it was passed on: its digest is {digest}, where "
            f"{described['digest']} is expected; run the stage that made it again"
        )
