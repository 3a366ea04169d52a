"""Making a version again: what is checked out, and what is said of the bytes that come of it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from components.preflight.config import STAGES, load_params
from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.execution import Revision
from components.shared.lineage import Lineage, Material
from pipelines import reproduce
from pipelines.reproduce import DIFFERENT
from tests.lineages import made
from tests.pipelines.project import FinishedRun, Project, copy_project
from tests.presets import ROOT

MODEL, COMMIT, NEWER = "someone/model", "a" * 40, "b" * 40


def graph(*, policy: str = "policy", torch: str = "2.13.0") -> Lineage:
    """The lineage of a report, whose training made this policy with this version of torch."""
    digests = {"policy": lineage.value_digest(policy)}
    problems = made("prepare_data", {"seed": 1}, {})
    reference = made("train_sft", {"model": {"base": "scratch:tiny"}}, {"problems": problems})
    inputs = {"problems": problems, "reference": reference}
    trained = made("train_grpo", {"num_steps": 3}, inputs, packages={"torch": torch})
    evaluation = made("evaluate", {"seed": 1}, {**inputs, "policy": trained}, digests=digests)
    others = {"evaluation": evaluation, "sft_training": reference, "grpo_training": trained}
    return made("report", {}, others, digests={"evaluation": lineage.value_digest(policy)})


def test_artifacts_are_compared_with_those_of_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Each that a stage has read once, under its name as an output; the first stage with other bytes is named."""
    assert reproduce.show("grpo-policy@v0.0.1", graph(), graph()) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = ["prepare_data/problems", "train_sft/reference", "train_sft/training", "train_grpo/policy"]
    names += ["train_grpo/training", "evaluate/evaluation"]
    assert sorted(line.partition(":")[0] for line in lines) == sorted(names)
    assert last == "reproduced: all 6 artifacts of grpo-policy@v0.0.1 have equal bytes"
    again = graph(policy="another", torch="2.12.0")
    assert reproduce.show("grpo-policy@v0.0.1", graph(), again) == DIFFERENT
    *lines, first, cause = capsys.readouterr().out.splitlines()
    assert sum("DIFFERENT" in line for line in lines) == 2
    assert "train_grpo is the first stage of grpo-policy@v0.0.1 with other bytes, in policy" in first
    assert cause == "what differs: torch 2.13.0 -> 2.12.0"


def test_params_come_back_from_a_lineage(tmp_path: Path) -> None:
    """Every setting of every stage; the registry is one of its own."""
    params = load_params(ROOT / "params/smoke.yaml")
    sections = params.model_dump(mode="json")
    made_by = made("prepare_data", sections["prepare_data"], {})
    for stage in STAGES[1:-1]:
        made_by = made(stage, sections[stage], {"input": made_by})
    reproduce.write_params(made_by, tmp_path / "params.yaml", tmp_path)
    again = load_params(tmp_path / "params.yaml")
    assert again.model_copy(update={"register": params.register}) == params
    assert again.register.registry == str(tmp_path / "registry")


def test_code_comes_back_with_its_uncommitted_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its commit, in a worktree of its own, where the checkout has gone on since."""
    project = copy_project(tmp_path / "checkout")
    git = partial(project.run, "git", "-c", "user.name=a", "-c", "user.email=b")
    git("add", "--all")
    git("commit", "--quiet", "-m", "First")
    commit = git("rev-parse", "HEAD").stdout.strip()
    with (project.folder / "components/shared/progress.py").open("a") as file:
        file.write("# not committed\n")
    digest, patch = _code_digest(project), git("diff", "HEAD").stdout
    git("commit", "--quiet", "--all", "-m", "Second")
    with (project.folder / "components/shared/errors.py").open("a") as file:
        file.write("# later\n")
    revision = Revision(commit=commit, patch_digest=lineage.value_digest(patch), patch=patch)
    monkeypatch.setattr(reproduce, "_CHECKOUT", project.folder)
    folder = reproduce.check_out_code(_made_with(digest, revision), tmp_path / "code")
    assert folder == tmp_path / "code"
    assert _code_digest(Project(folder)) == digest
    with pytest.raises(PipelineError, match="has code with another digest than 000000000000"):
        reproduce.check_out_code(_made_with("0" * 64, revision), tmp_path / "other")
    with pytest.raises(PipelineError, match="were too long to be recorded"):
        reproduce.check_out_code(_made_with(digest, revision.model_copy(update={"patch": None})), tmp_path / "long")
    with pytest.raises(PipelineError, match="this repository lacks commit 12345"):
        reproduce.check_out_code(_made_with(digest, Revision(commit="12345")), tmp_path / "none")


def test_raw_files_have_to_be_those_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with other content is not taken, but that of DVC is, by its MD5; with the pointer that named it."""
    checkout, name, md5 = tmp_path / "checkout", "data/raw.jsonl", "99914b932bd37a50b983c5e7c90ae93b"
    monkeypatch.setattr(reproduce, "_CHECKOUT", checkout)
    raw, config, stored = checkout / name, checkout / ".dvc/config", f"files/md5/{md5[:2]}/{md5[2:]}"
    places = (raw, checkout / ".dvc/cache" / stored, tmp_path / "remote" / stored)
    for path in (config, *places):
        path.parent.mkdir(parents=True)
    config.write_text("[core]\n    remote = s\n['remote \"s\"']\n    url = ../../remote\n")
    material = Material(sha256=lineage.value_digest({}), dvc_md5=md5)
    raw.write_text(" ")
    with pytest.raises(PipelineError, match=rf"{name}: .* SHA-256 44136fa3.* is not at .*{stored} is missing"):
        reproduce.provide(name, material, graph(), tmp_path / "none")
    for run, place in zip(map(tmp_path.joinpath, "abc"), places, strict=True):
        raw.write_text(" ")
        place.write_text("{}")
        reproduce.provide(name, material, graph(), run)
        assert (run / "run" / name).read_text() == "{}"
        assert f"md5: {md5}" in (run / "run/data/raw.jsonl.dvc").read_text()
        place.unlink()


def test_models_of_the_hub_are_read_at_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their plain name, and although `main` has moved on."""
    folder = tmp_path / "cache/models--someone--model"
    for commit, size in ((COMMIT, 1), (NEWER, 2)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(str(size))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(NEWER)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    variables = reproduce.provide(MODEL, Material(repository=MODEL, commit=COMMIT), graph(), tmp_path)
    code = f"from huggingface_hub import hf_hub_download as get; print(open(get('{MODEL}', 'config.json')).read())"
    command, environment = [sys.executable, "-c", code], {**os.environ, **variables}
    assert subprocess.run(command, env=environment, check=True, capture_output=True).stdout == b"1\n"


@pytest.mark.long(minutes=2)
def test_registered_version_is_made_again_to_equal_bytes(smoke_run: FinishedRun) -> None:
    """From the registry alone, in a folder of its own; the registry keeps its one version."""
    again = smoke_run.project.pipeline("reproduce", "latest")
    assert again.exit_code == 0, again.printed + again.errors
    assert again.printed.splitlines()[-1].startswith("reproduced: all 8 artifacts of grpo-policy-smoke@v0.0.1 have")
    listed = smoke_run.project.pipeline("models", "list", "--json")
    assert [each["version"] for each in json.loads(listed.printed)] == ["grpo-policy-smoke@v0.0.1"]


def _code_digest(project: Project) -> str:
    code = "from components.shared.lineage import code_digest; print(code_digest())"
    return project.run(sys.executable, "-P", "-c", code).stdout.strip()


def _made_with(code: str, revision: Revision) -> Lineage:
    return made("train_grpo", {}, {}, code=code, revision=revision)
