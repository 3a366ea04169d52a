"""The base model's section, and folders that refer to a model elsewhere."""

from pathlib import Path

import pytest

from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.model import (
    PIPELINE_FILE,
    ModelConfig,
    holds_model,
    require_unchanged,
    resolve_reference,
    write_reference,
)
from tests.lineages import made

_QUESTION = {"prompt": "{question}\n", "answer": "declared"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"base": "scratch:tny"},
            'model.base: no such preset, got "scratch:tny"; accepted: scratch:tiny, scratch:words,',
        ),
        ({"prompt": "{ question }"}, 'model.prompt: must contain `{question}`, got "{ question }"'),
        ({"prompts": {"code": "Write."}}, "model.prompts.code: must contain `{question}`"),
    ],
)
def test_an_invalid_model_section_is_refused(values: dict[str, str], message: str) -> None:
    """With what is accepted, before anything is fetched or trained."""
    with pytest.raises(PipelineError) as refused:
        validate(ModelConfig, {"base": "scratch:tiny", **_QUESTION, **values}, name="model")
    assert str(refused.value).startswith(message)


def test_a_question_is_inserted_verbatim() -> None:
    """Braces in a question are LaTeX and not places to fill, nor are other braces in the prompt."""
    model = ModelConfig(base="scratch:tiny", prompt="{system} Q: {question}\nA: \\boxed{}")
    question = r"What is {x} in {question}? \frac{1}{2} % \1 $"
    assert model.ask(question) == "{system} Q: " + question + "\nA: \\boxed{}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model as a stage writes it, with a reference to it beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    jsonl.write_json(folder / PIPELINE_FILE, _QUESTION)
    lineage.write(folder, made("train_sft"))
    write_reference(tmp_path / "reference", folder)
    return folder


def test_a_reference_resolves_to_the_model(tmp_path: Path, model: Path) -> None:
    """It is small, says how a question is put to the model, and has the model's lineage."""
    reference = tmp_path / "reference"
    assert sorted(path.name for path in reference.iterdir()) == [lineage.FILE_NAME, PIPELINE_FILE]
    assert lineage.read(reference) == lineage.read(model)
    assert resolve_reference(reference) == resolve_reference(model) == model
    assert (holds_model(model), holds_model(reference)) == (True, False)


def test_other_folders_resolve_to_themselves(tmp_path: Path, model: Path) -> None:
    """Data, models of a hub, models that no stage has made, and a model to which questions are put in another way."""
    folder = tmp_path / "reference"
    reference = jsonl.read_json(folder / PIPELINE_FILE)
    (tmp_path / "plain").mkdir()
    for other in (
        {**_QUESTION, "weights": "org/model", "revision": "1"},
        {**_QUESTION, "weights": str(tmp_path / "plain"), "digest": "0"},
        {**reference, "prompt": "Q: {question}"},
    ):
        jsonl.write_json(folder / PIPELINE_FILE, other)
        assert resolve_reference(folder) == folder


def test_a_model_that_has_changed_or_is_gone_is_refused(tmp_path: Path, model: Path) -> None:
    """What was evaluated would not be what was passed on."""
    reference = tmp_path / "reference"
    require_unchanged(reference, lineage.digest(model))
    (model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(PipelineError, match="has changed since it was passed on"):
        require_unchanged(reference, lineage.digest(model))
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(PipelineError, match=r"is not there; is its volume mounted, and was its run not removed\?"):
        resolve_reference(reference)
