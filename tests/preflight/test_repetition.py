"""Runs that are to end if they would reproduce the newest version."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params
from components.preflight.form import SKIP_IF_UNCHANGED, Form, complete, sections_of
from components.preflight.remotes import incomparable, refuse_repetition
from components.shared import lineage
from components.shared.errors import PipelineError, UnchangedRunError
from tests.fake_cluster import ApiServer
from tests.preflight.conftest import DEPLOYMENT, git, ready


def params_of(form: Form) -> Params:
    """The params that a form means."""
    return Params.model_validate(complete(sections_of(form, DEPLOYMENT, commit="", secrets={})[0]))


def register(folder: Path, tag: str, form: Form, *, code: str = "") -> None:
    """Make a version whose policy was made by what a form means."""
    configs = params_of(form).model_dump(mode="json")

    def made(stage: str, **inputs: Any) -> dict[str, Any]:
        sources = {name: {"digest": "d", "lineage": each} for name, each in inputs.items()}
        return {"stage": stage, "config": configs[stage], "inputs": sources, "code": code or lineage.code_digest()}

    problems = made("prepare_data")
    policy = made("train_grpo", problems=problems, reference=made("train_sft", problems=problems))
    (folder / "lineage.json").write_text(json.dumps(policy))
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", tag)
    git(folder, "tag", tag)


@pytest.fixture
def skipping(form: Form, repository: Path) -> Form:
    """A form that asks for the comparison, with a registry at a URL that has no version yet."""
    return {**form, SKIP_IF_UNCHANGED: True, "register_registry": repository.as_uri()}


def test_a_run_that_would_reproduce_the_newest_version_ends(skipping: Form, repository: Path) -> None:
    """By code, data and config, whoever made an older version with others; unless nobody asked."""
    register(repository, "grpo-policy@v0.0.1", {**skipping, "train_grpo_num_steps": 3})
    register(repository, "grpo-policy@v0.0.2", skipping)
    with pytest.raises(
        UnchangedRunError, match=r"code, data and config are those of grpo-policy@v0\.0\.2; a run would"
    ):
        refuse_repetition(skipping, params_of(skipping))
    refuse_repetition({**skipping, SKIP_IF_UNCHANGED: False}, params_of(skipping))


@pytest.mark.parametrize(
    ("change", "code", "changed"),
    [
        ({"train_grpo_num_steps": 3}, "", "train_grpo."),
        ({"train_grpo_learning_rate": 1e-6}, "", "train_grpo."),
        ({}, "of before", "the code"),
    ],
)
def test_a_run_with_other_code_or_config_is_new_and_says_what_has_changed(
    skipping: Form, repository: Path, change: Form, code: str, changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is named."""
    register(repository, "grpo-policy@v0.0.1", skipping, code=code)
    form = {**skipping, **change}
    refuse_repetition(form, params_of(form))
    assert f"changed since grpo-policy@v0.0.1: {changed}" in capsys.readouterr().out


def test_without_a_version_every_run_is_new(skipping: Form, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of them all."""
    refuse_repetition(skipping, params_of(skipping))
    assert "has no version of grpo-policy yet" in capsys.readouterr().out


def test_a_registry_on_the_volume_cannot_be_compared_with(form: Form) -> None:
    """Preflight does not wait for the volume, which may be what is missing."""
    assert incomparable(form) == []
    (line,) = incomparable({**form, SKIP_IF_UNCHANGED: True})
    assert line.startswith("skip_if_unchanged: needs register_registry to be a URL")


def test_preflight_ends_a_run_that_is_not_new(skipping: Form, repository: Path, server: ApiServer) -> None:
    """After all that could be wrong was looked at, so that a schedule which has broken is noticed."""
    register(repository, "grpo-policy@v0.0.1", skipping)
    form = {**skipping, "register_storage": "/work/registry-storage"}
    with pytest.raises(PipelineError, match=r"^deployment\.volume: "):
        ready(form, DEPLOYMENT.model_copy(update={"volume": "missing"}))
    with pytest.raises(UnchangedRunError):
        ready(form)
