import json
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params
from components.preflight.form import CLUSTER, Form, sections_of
from components.preflight.preflight import preflight
from components.preflight.repetition import PARAMETER, comparable, refuse_repetition
from components.preflight.sections import complete
from components.shared import config, lineage
from components.shared.errors import PipelineError, UnchangedRunError
from tests.fake_cluster import ApiServer
from tests.preflight.conftest import git


def resolved(form: Form) -> config.Params:
    """The sections that a form means."""
    return complete(sections_of(form, "", {})[0])


def register(folder: Path, tag: str, form: Form, *, code: str) -> None:
    """Make a version whose policy was made by what a form means."""
    sections = {name: section for name, section in resolved(form).items() if name != CLUSTER}
    configs = {name: section.model_dump(mode="json") for name, section in dict(Params.model_validate(sections)).items()}

    def made(stage: str, **inputs: Any) -> dict[str, Any]:
        sources = {name: {"digest": "d", "lineage": each} for name, each in inputs.items()}
        return {"stage": stage, "config": configs[stage], "inputs": sources, "code": code}

    problems = made("prepare_data")
    policy = made("train_grpo", problems=problems, reference=made("train_sft", problems=problems))
    (folder / "lineage.json").write_text(json.dumps(policy))
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", tag)
    git(folder, "tag", tag)


@pytest.fixture
def asked(form: Form, repository: Path) -> Form:
    """A form that asks for the comparison, with a registry at a URL that has no version yet."""
    return {**form, PARAMETER: True, "registry_repository": repository.as_uri()}


def test_a_run_that_would_make_the_newest_version_anew_is_known(asked: Form, repository: Path) -> None:
    """By code, data and config, whoever made an older version with others."""
    register(repository, "grpo-policy@v0.0.1", {**asked, "grpo_num_steps": 3}, code=lineage.code_digest())
    register(repository, "grpo-policy@v0.0.2", asked, code=lineage.code_digest())
    with pytest.raises(
        UnchangedRunError, match=r"nothing has changed since grpo-policy@v0\.0\.2: code, data and config"
    ):
        refuse_repetition(asked, resolved(asked))


@pytest.mark.parametrize("change", [{"grpo_num_steps": 3}, {"grpo_learning_rate": 1e-6}])
def test_a_run_with_another_config_is_new_and_says_what_has_changed(
    asked: Form, repository: Path, change: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is named."""
    register(repository, "grpo-policy@v0.0.1", asked, code=lineage.code_digest())
    changed = {**asked, **change}
    refuse_repetition(changed, resolved(changed))
    assert "changed since grpo-policy@v0.0.1: train_grpo." in capsys.readouterr().out


def test_a_run_with_other_code_is_new(asked: Form, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another build of the images may make another model."""
    register(repository, "grpo-policy@v0.0.1", asked, code="of before")
    refuse_repetition(asked, resolved(asked))
    assert "changed since grpo-policy@v0.0.1: the code" in capsys.readouterr().out


def test_without_a_version_every_run_is_new(asked: Form, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of them all."""
    refuse_repetition(asked, resolved(asked))
    assert "has no version of grpo-policy yet" in capsys.readouterr().out


def test_nothing_is_compared_where_nobody_asks(asked: Form, repository: Path) -> None:
    """A run that somebody starts by hand runs."""
    register(repository, "grpo-policy@v0.0.1", asked, code=lineage.code_digest())
    refuse_repetition({**asked, PARAMETER: False}, resolved(asked))


def test_a_registry_on_the_volume_cannot_be_looked_at(form: Form) -> None:
    """Preflight does not wait for the volume, which may be what is missing."""
    assert comparable(form) == []
    (line,) = comparable({**form, PARAMETER: True})
    assert line.startswith("run_skip_if_unchanged: needs registry_repository to be a URL")


def test_preflight_ends_a_run_that_is_not_new(asked: Form, repository: Path, server: ApiServer) -> None:
    """After all that could be wrong was looked at, so that a schedule which has broken is noticed."""
    register(repository, "grpo-policy@v0.0.1", asked, code=lineage.code_digest())
    wanted = {**asked, "registry_weights_remote": "/work/registry-storage"}
    with pytest.raises(PipelineError, match=r"^cluster_volume_claim: "):
        preflight({**wanted, "cluster_volume_claim": "missing"})
    with pytest.raises(UnchangedRunError):
        preflight(wanted)
