from pathlib import Path

import pytest

from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE, holds_model, require_unchanged, resolve_reference, write_reference

ASKING = {"prompt": "{question}\n", "answer": "declared"}


def _model(folder: Path) -> Path:
    """A model as a stage leaves it."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    jsonl.write_json(folder / PIPELINE_FILE, ASKING)
    lineage.write(folder, {"stage": "train_sft"})
    return folder


def test_a_reference_leads_to_the_model(tmp_path: Path) -> None:
    """It is small, says how the model is asked, and has the model's lineage."""
    model = _model(tmp_path / "model")
    write_reference(tmp_path / "reference", model)
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == [lineage.FILE_NAME, PIPELINE_FILE]
    assert jsonl.read_json(tmp_path / "reference" / PIPELINE_FILE)["prompt"] == ASKING["prompt"]
    assert lineage.read(tmp_path / "reference") == lineage.read(model)
    assert resolve_reference(tmp_path / "reference") == model
    assert (holds_model(model), holds_model(tmp_path / "reference")) == (True, False)


def test_what_is_no_reference_is_itself(tmp_path: Path) -> None:
    """Data, models by value, models of a hub, and models that no stage has made: how those are asked is here alone."""
    (tmp_path / "data").mkdir()
    assert resolve_reference(tmp_path / "data") == tmp_path / "data"
    assert resolve_reference(_model(tmp_path / "model")) == tmp_path / "model"
    (tmp_path / "plain").mkdir()
    for weights in ({"weights": "org/model", "revision": "1"}, {"weights": str(tmp_path / "plain"), "digest": "0"}):
        folder = tmp_path / "by reference"
        folder.mkdir(exist_ok=True)
        jsonl.write_json(folder / PIPELINE_FILE, {**ASKING, **weights})
        assert resolve_reference(folder) == folder


def test_a_model_that_is_asked_otherwise_is_not_followed(tmp_path: Path) -> None:
    """As where a run begins with a model of another run: its prompt would be forgotten."""
    model = _model(tmp_path / "model")
    write_reference(tmp_path / "reference", model)
    described = jsonl.read_json(tmp_path / "reference" / PIPELINE_FILE)
    jsonl.write_json(tmp_path / "reference" / PIPELINE_FILE, {**described, "prompt": "Q: {question}"})
    assert resolve_reference(tmp_path / "reference") == tmp_path / "reference"


def test_a_model_that_is_gone_is_missed(tmp_path: Path) -> None:
    """With the folder, which may be on a volume that is not mounted."""
    model = _model(tmp_path / "model")
    write_reference(tmp_path / "reference", model)
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(PipelineError, match=r"is not there; is its volume mounted\?"):
        resolve_reference(tmp_path / "reference")


def test_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    """What was measured would not be what was passed on."""
    model = _model(tmp_path / "model")
    write_reference(tmp_path / "reference", model)
    require_unchanged(tmp_path / "reference", lineage.digest(model))
    (model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(PipelineError, match="has changed since it was passed on"):
        require_unchanged(tmp_path / "reference", lineage.digest(model))
