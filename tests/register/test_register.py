"""The register stage with the real git, DVC and GTO."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
import yaml

from components.register.checks import list_storage
from components.register.registry import fetch
from components.register.snapshot import read_registry
from components.shared import jsonl, lineage
from components.shared.errors import PipelineError, RetryableError
from components.shared.execution import person
from components.shared.lineage import file_digests
from pipelines import cli
from tests.register.conftest import Registered
from tests.register.registrations import command, git, make_config, make_policy, run_register, subjects, tags
from tests.register.s3_storage import s3_storage
from tests.report.synthetic import write_artifacts

pytestmark = pytest.mark.slow


def test_version_is_a_closed_bundle(registered: Registered, tmp_path: Path) -> None:
    """One commit with a tag of GTO's grammar, a pointer to each folder, DVC's artifact entry, and all digests."""
    config, policy, version = registered
    registry = tmp_path / "registry"
    digests = (registry / "digests.json").read_bytes()
    assert version == {
        **{"format": 2, "name": "grpo-policy", "version": "v0.0.1", "tag": "grpo-policy@v0.0.1", "parent": None},
        **{"registry": config.registry, "model_registry": None, "path": "policy"},
        **{"policy_digest": lineage.digest(policy), "bundle_digest": hashlib.sha256(digests).hexdigest()},
        **{"registered": {"at": ANY, "by": person(), "run": None}},
    }
    files = set(git(registry, "ls-tree", "-r", "--name-only", version["tag"]).split())
    assert {"policy.dvc", "model_card.md", "lineage.json", "verdict.json", "summary.json", "report.html"} <= files
    folders = {"policy": policy, **write_artifacts(policy)}
    folders["training"] = folders.pop("grpo_training")
    stored = {f"{name}/{path}": each for name, made in folders.items() for path, each in file_digests(made).items()}
    own = {path: lineage.file_digest(registry / path) for path in files - {"version.json", "digests.json"}}
    assert json.loads(digests) == {**stored, **own}
    assert yaml.safe_load((registry / "dvc.yaml").read_text())["artifacts"]["grpo-policy"]["path"] == "policy"
    assert git(registry, "status", "--porcelain") == ""
    assert "Pipeline-Commit: " in git(registry, "log", "-1", "--format=%B")
    card = (tmp_path / "registration" / "model_card.md").read_text(encoding="utf-8")
    assert card == (registry / "model_card.md").read_text(encoding="utf-8")
    assert version["policy_digest"] in card


def test_same_weights_are_the_same_version(
    registered: Registered, passed: Path, unenforced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is added by another report; in a new registry, at another time, the bundle is byte-identical.

    Only a version of an older release, which cannot be verified, is registered again.
    """
    config, policy, version = registered
    registry = tmp_path / "registry"
    commits = git(registry, "log", "--all", "--format=%H")
    run_register(config, policy, unenforced, tmp_path / "again")
    assert git(registry, "log", "--all", "--format=%H") == commits
    for name in ("registry", "registry-storage"):
        shutil.rmtree(tmp_path / name)
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00Z")
    run_register(config, policy, passed, tmp_path / "new")
    assert git(registry, "log", "--all", "--format=%H") != commits
    for folder in ("again", "new"):
        assert jsonl.read_json(tmp_path / folder / "version.json") == {**version, "registered": ANY}
        card = (tmp_path / folder / "model_card.md").read_bytes()
        assert card == (tmp_path / "registration" / "model_card.md").read_bytes()
    old = {key: value for key, value in version.items() if key not in {"format", "bundle_digest"}}
    jsonl.write_json(registry / "version.json", old)
    git(registry, "commit", "--quiet", "--all", "--amend", "--message", "Register an older version")
    git(registry, "tag", "--force", "--annotate", "--message", "older", version["tag"])
    again = run_register(config, policy, passed, tmp_path / "closed")
    assert (again["version"], again["parent"]) == ("v0.0.2", version["tag"])


def test_other_weights_are_the_next_version(
    registered: Registered, passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions count up, stay fetchable, and keep their own names; a deprecated number is not used again."""
    config, policy, _ = registered
    other = make_policy(tmp_path / "other", b"others")
    assert run_register(config, other, passed, tmp_path / "r2")["version"] == "v0.0.2"
    renamed = config.model_copy(update={"name": "second"})
    assert run_register(renamed, other, passed, tmp_path / "r3")["tag"] == "second@v0.0.1"
    deprecate = [sys.executable, "-m", "gto.cli", "deprecate", "grpo-policy", "v0.0.2"]
    identity = {f"GIT_{role}_{part}": "a@b" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    subprocess.run(deprecate, check=True, cwd=config.registry, capture_output=True, env={**os.environ, **identity})
    assert run_register(config, other, passed, tmp_path / "r4")["version"] == "v0.0.3"
    registry = str(tmp_path / "registry")
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for destination in ("models/mine", "empty"):
        assert cli.main(["fetch", "grpo-policy@v0.0.1", destination, "--registry", registry]) == 0
        assert lineage.digest(Path(destination)) == lineage.digest(policy)
    for version, destination, message in (
        ("v0.0.1", "which", r"v0\.0\.1 is ambiguous: grpo-policy@v0\.0\.1 or second@v0\.0\.1"),
        ("v7.0.0", "which", r"`v7\.0\.0` is no version; versions and aliases: grpo-policy@v0\.0\.1, "),
        ("v0.0.3", "models/mine", "is not empty"),
    ):
        with pytest.raises(PipelineError, match=message):
            fetch(registry, version, tmp_path / destination)
    with pytest.raises(PipelineError, match="no such registry"):
        fetch(str(tmp_path / "nowhere"), "v0.0.1", tmp_path / "which")


def test_missed_gate_is_on_the_card(unenforced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card has the missed gate, and whoever registers the weights of the reference is warned."""
    report = shutil.copytree(unenforced, tmp_path / "report")
    jsonl.write_json(report / "summary.json", {**jsonl.read_json(report / "summary.json"), "learned": False})
    version = run_register(make_config(tmp_path), make_policy(tmp_path / "policy"), report, tmp_path / "registration")
    assert version["version"] == "v0.0.1"
    card = (tmp_path / "registration" / "model_card.md").read_text(encoding="utf-8")
    assert "**Missed, but registered: the gate was not enforced in this run.**" in card
    assert "register: warning: GRPO learned nothing" in capsys.readouterr().out


def test_traces_of_a_killed_registration_are_removed(registered: Registered, passed: Path, tmp_path: Path) -> None:
    """A commit without its tag is tagged instead of repeated; lock files of git are removed with the clone."""
    config, policy, version = registered
    registry = tmp_path / "registry"
    git(registry, "tag", "--delete", "grpo-policy#candidate#1")  # killed between the two tags
    assert run_register(config, policy, passed, tmp_path / "again") == version
    assert git(registry, "tag", "--list", "*#*").split() == ["grpo-policy#candidate#1"]
    git(registry, "tag", "--delete", version["tag"])
    assert run_register(config, policy, passed, tmp_path / "again") == version
    assert subjects(registry) == ["Register grpo-policy@v0.0.1"]
    (tmp_path / ".registry.work" / "clone").mkdir(parents=True)
    for lock in ("index.lock", "refs/heads/main.lock", "HEAD.lock"):
        (registry / ".git" / lock).write_text("")
    (registry / "model_card.md").write_text("half of a checkout")
    version = run_register(config, make_policy(tmp_path / "other", b"others"), passed, tmp_path / "next")
    assert version["version"] == "v0.0.2"
    assert git(registry, "status", "--porcelain") == ""


def test_two_registrations_at_once_take_turns(passed: Path, tmp_path: Path) -> None:
    """Two policies become two versions; neither a home nor an identity nor a git hook's variables matter."""
    config = make_config(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    environment = {name: value for name, value in os.environ.items() if name not in {"HOME", "USER", "LOGNAME"}}
    environment |= {"GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other)}
    processes = []
    for name in ("one", "two"):
        policy = make_policy(tmp_path / name / "policy", name.encode())
        processes.append(subprocess.Popen(command(config, policy, passed, tmp_path / name), env=environment))
    assert [process.wait() for process in processes] == [0, 0]
    assert tags(tmp_path / "registry") == ["grpo-policy@v0.0.1", "grpo-policy@v0.0.2"]
    assert git(tmp_path / "registry", "log", "-1", "--format=%an %ce").startswith("grpo-pipeline grpo-pipeline@")
    assert tags(other) == []


def test_place_that_cannot_be_a_registry_is_refused(passed: Path, tmp_path: Path) -> None:
    """It is named, and its content stays."""
    policy, folder, tree = make_policy(tmp_path / "policy"), tmp_path / "folder", tmp_path / "tree"
    for place in (folder, tree):
        place.mkdir()
        (place / "thesis.txt").write_text("mine")
    git(tree, "init", "--quiet")
    for registry, message in (
        (str(folder), "folder: contains something other than a registry"),
        (str(tree), "tree: is the working tree of another git repository"),
        (f"file://{tree}", r"register\.storage: a registry at a URL needs"),
    ):
        with pytest.raises(PipelineError, match=message):
            run_register(make_config(tmp_path, registry=registry), policy, passed, tmp_path / "none")
    assert [(place / "thesis.txt").read_text() for place in (folder, tree)] == ["mine", "mine"]


def test_missing_or_different_storage_is_an_error(registered: Registered, passed: Path, tmp_path: Path) -> None:
    """Registering uses the registry's own storage, which has to exist; another is also named before a run."""
    config, policy, _ = registered
    assert list_storage(config) == []
    assert "/proc/weights: cannot be made" in str(list_storage(make_config(tmp_path / "new", storage="/proc/weights")))
    moved = config.model_copy(update={"storage": str(tmp_path / "another")})
    with pytest.raises(PipelineError, match=r"register\.storage: .* stored in .*-storage, not") as refused:
        run_register(moved, policy, passed, tmp_path / "none")
    assert list_storage(moved) == [str(refused.value)]
    (tmp_path / "registry-storage").rename(tmp_path / "gone")
    (tmp_path / "registry-storage").mkdir()  # as where nothing is mounted
    message = f"{tmp_path}/registry-storage: the storage is missing or empty; restore or mount it$"
    with pytest.raises(PipelineError, match=message):
        run_register(config, policy, passed, tmp_path / "none")
    with pytest.raises(PipelineError, match=message):
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    with read_registry(config.registry) as snapshot, pytest.raises(PipelineError, match=message):
        snapshot.verify_all()
    assert not (tmp_path / "fetched").exists()


def test_version_needs_fetchable_weights(passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that damages them, or dies during the push, leaves no version; the next run completes it."""
    policy, config = make_policy(tmp_path / "policy"), make_config(tmp_path, storage="s3://bucket/models")
    with s3_storage("loses bytes") as storage:
        storage.set_environment(monkeypatch)
        with pytest.raises(PipelineError, match=r"s3://bucket/models: does not return what .*damaged"):
            run_register(config, policy, passed, tmp_path / "none")
        assert tags(tmp_path / "registry") == []
        storage.objects.clear()
        storage.fault = "dies in mid-push"
        with pytest.raises(RetryableError, match="s3://bucket/models: cannot store the version there: failed to"):
            run_register(config, policy, passed, tmp_path / "none")
        assert tags(tmp_path / "registry") == []
        storage.fault = None
        version = run_register(config, policy, passed, tmp_path / "registration")
        assert version["version"] == "v0.0.1"
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    assert lineage.digest(tmp_path / "fetched") == version["policy_digest"]
