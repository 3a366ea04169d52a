from pathlib import Path

import pytest

from components.preflight.config import Params
from components.preflight.form import SKIP_IF_UNCHANGED, Form, sections_of
from components.shared import lineage
from components.shared.errors import PipelineError
from tests.fake_cluster import ApiServer
from tests.lineages import made
from tests.preflight.conftest import DEPLOYMENT, git, ready


def register(folder: Path, tag: str, form: Form, *, code: str = "") -> None:
    """Make a version whose policy was made by what a form means."""
    sections = sections_of(form, DEPLOYMENT, commit="", secrets={})[0]
    configs = Params.model_validate(sections).model_dump(mode="json")
    inputs: dict[str, lineage.Lineage] = {}
    for stage, output in {"prepare_data": "problems", "train_sft": "reference", "train_grpo": "policy"}.items():
        inputs[output] = made(stage, configs[stage], inputs, code=code or lineage.code_digest())
    (folder / "lineage.json").write_text(inputs["policy"].model_dump_json())
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", tag)
    git(folder, "tag", tag)


def test_a_run_that_would_reproduce_the_newest_version_ends(
    form: Form, repository: Path, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """By code, data and config, once all that could be wrong was checked; what makes a run new is logged."""
    registry = {"registry": repository.as_uri(), "weights_storage": "/work/registry-storage"}
    form = {**form, **registry, SKIP_IF_UNCHANGED: True}
    assert not ready(form).unchanged
    assert "has no version of grpo-policy yet" in capsys.readouterr().out
    register(repository, "grpo-policy@v0.0.1", form, code="of before")
    ready(form)
    assert "changed since grpo-policy@v0.0.1: the code" in capsys.readouterr().out
    register(repository, "grpo-policy@v0.0.2", form)
    repeated = ready(form)
    assert repeated.unchanged
    sentence = "code, data and config are those of grpo-policy@v0.0.2, the newest registered version, so nothing is run"
    assert sentence in repeated.page
    assert f"preflight: {sentence}" in capsys.readouterr().out
    assert not ready({**form, SKIP_IF_UNCHANGED: False}).unchanged
    assert not ready({**form, "grpo_num_steps": 3}).unchanged
    assert "changed since grpo-policy@v0.0.2: train_grpo." in capsys.readouterr().out
    with pytest.raises(PipelineError, match=r"^deployment\.volume: "):
        ready(form, DEPLOYMENT.model_copy(update={"volume": "missing"}))


def test_a_registry_on_the_volume_cannot_be_compared_with(form: Form, server: ApiServer) -> None:
    """Preflight does not wait for the volume, which may be what is missing."""
    with pytest.raises(PipelineError, match=r"^skip_if_unchanged: needs registry to be a URL"):
        ready({**form, SKIP_IF_UNCHANGED: True})
