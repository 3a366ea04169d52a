"""The commands on versions: list, show, compare, promote, rollback and history, on a registry with real bundles."""

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from components.register.aliases import CHAMPION, candidate
from components.register.registry import open_registry
from components.register.snapshot import read_registry
from components.shared import jsonl
from components.shared.errors import PipelineError
from pipelines import promotion
from pipelines.cli import main
from pipelines.use import model_folder
from tests.register.registrations import git, make_policy, make_report
from tests.report.synthetic import SKILL

NAME = "grpo-policy"
BETTER = {"words": 0.95, "gsm8k": 0.5}
SERVED = "vLLM 0.0 in float32: 8 of 8 answers have the same tokens as in evaluation"


def register(folder: Path, skill: Mapping[str, float], *, problems: int = 200, gain: float = 0.1) -> None:
    """Register a version whose policy is right as often as `skill` says."""
    inputs = make_report(folder, enforce=False, problems=problems, min_gain=gain, grpo=skill)
    policy = make_policy(folder / "policy", folder.name.encode())
    jsonl.write_json(inputs["evaluation"] / "grpo" / "probes.json", {"dtype": "float32", "probes": []})
    with open_registry(str(folder.with_name("registry")), None) as registry:
        stored = registry.store({"policy": policy, "evaluation": inputs["evaluation"]})
        versions = registry.versions(NAME)
        tag = f"{NAME}@v0.0.{len(versions) + 1}"
        version: dict[str, Any] = {"name": NAME, "version": tag.partition("@")[2], "tag": tag}
        version |= {"parent": versions[-1].tag if versions else None, "policy_digest": folder.name}
        version["registered"] = {"at": "2026-11-23T01:02:03+00:00", "by": "jane@host", "run": None}
        files: dict[str, str | Path] = {path.name: path for path in inputs["report"].iterdir()}
        version = registry.commit(version, files, stored, f"Register {tag}")
        message = f"Register {tag}\n\nBundle-Digest: {version['bundle_digest']}\n"
        assert registry.publish({tag: message, **dict([candidate(registry, NAME, tag, "passed the gate")])})


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a registry of three versions: one, a better one, one that missed its gate on other problems."""
    folder = tmp_path_factory.mktemp("versions")
    with contextlib.chdir(folder):
        register(folder / "one", SKILL["grpo"])
        register(folder / "two", BETTER)
        register(folder / "three", SKILL["base"], problems=150, gain=0.5)
    return folder


@pytest.fixture
def registry(versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that registry in the working folder, with a vLLM that serves whatever it is asked to."""
    for name in ("registry", "registry-storage"):
        shutil.copytree(versions / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(promotion, "check_served", lambda model, probes: SERVED)
    return tmp_path / "registry"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["models", *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def _champion(registry: Path) -> str | None:
    with read_registry(str(registry)) as snapshot:
        return snapshot.aliases().get(f"{NAME}@{CHAMPION}")


def test_list_has_a_line_per_version(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With aliases, time, person, accuracies and verdict; the same as JSON. An unknown model is refused."""
    header, *lines = _run(capsys, "list").splitlines()
    assert header.split() == ["version", "aliases", "registered", "by", "accuracy:", "SFT,", "GRPO", "gate"]
    assert [line.split()[0] for line in lines] == [f"{NAME}@v0.0.{number}" for number in (1, 2, 3)]
    assert [line.split()[-1] for line in lines] == ["passed", "passed", "enforced"]
    assert "2026-11-23 01:02 UTC  jane@host" in lines[0]
    assert [line.split()[1] for line in lines] == ["-", "-", "candidate"]
    rows = json.loads(_run(capsys, "list", "--json"))
    assert rows[1]["models"]["grpo"]["words"]["total"] == 150
    assert rows[1]["registered"]["by"] == "jane@host"
    assert f"has no versions of grpo-polcy; models: {NAME}" in _run(capsys, "list", "grpo-polcy", code=2)


def test_show_has_the_origin_of_a_version_on_one_screen(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data, code, settings, environment, gate, person and parent, and how to get the weights."""
    shown = _run(capsys, "show", "v0.0.2")
    assert shown.startswith(f"{NAME}@v0.0.2\n")
    assert f"parent       {NAME}@v0.0.1" in shown
    assert "learning_rate 0.001" in " ".join(shown.split())
    assert f"grpo-pipeline models get {NAME}@v0.0.2 FOLDER --registry registry" in shown
    assert len(shown.splitlines()) < 50
    everything = json.loads(_run(capsys, "show", "candidate", "--json"))
    assert everything["version"] == f"{NAME}@v0.0.3"
    assert everything["lineage"]["format"] == 2


def test_compare_counts_the_same_problems(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Per source: both accuracies, the gain with its interval, and the exact test."""
    compared = json.loads(_run(capsys, "compare", "v0.0.1", "v0.0.2", "--json"))
    words = next(each for each in compared["accuracies"] if each["source"] == "words")
    first, second = (_right(registry, version) for version in ("v0.0.1", "v0.0.2"))
    assert (words["only_first_right"], words["only_second_right"]) == (len(first - second), len(second - first))
    assert words["first"]["total"] == 150
    assert words["p_value"] < 0.05
    assert words["gain_interval"][0] < words["gain"] < words["gain_interval"][1]
    assert "inputs       same" in (shown := _run(capsys, "compare", "v0.0.1", "v0.0.2"))
    counts = f"right only in the first: {len(first - second)}, only in the second: {len(second - first)}, p = "
    assert counts in shown


def test_versions_on_different_problems_are_not_compared(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, how they become comparable, and which settings differ."""
    shown = _run(capsys, "compare", "v0.0.1", "v0.0.3")
    assert "settings     report.gate.min_gain: 0.1 -> 0.5\n" in shown
    assert "(200 and 150, of which " in shown
    assert f"run\n             grpo-pipeline models get {NAME}@v0.0.3 DIR --registry registry && " in shown
    assert f"grpo-pipeline evaluate {NAME}@v0.0.1 --registry registry --protocol pipeline" in shown


def test_promotion_and_rollback_are_in_the_history(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First without a champion, then against it, then back to it; the checks are in the message of the tag."""
    assert f"{NAME} cannot be rolled back: it has no champion" in _run(capsys, "rollback", "--reason", "slow", code=2)
    _run(capsys, "promote", "v0.0.1", "--reason", "the first")
    shown = _run(capsys, "promote", "v0.0.2", "--reason", "more right answers")
    labels = ["verified", "gate", "comparison", "serving", f"{NAME}@v0.0.2"]
    assert [line.split()[0] for line in shown.splitlines()] == labels
    assert _champion(registry) == f"{NAME}@v0.0.2"
    message = git(registry, "tag", "--list", "--format=%(contents)", f"{NAME}#{CHAMPION}#2")
    assert re.search(rf"Comparison: champion {NAME}@v0\.0\.1: .*words: \+", message)
    assert f"Serving: {SERVED}" in message
    assert _run(capsys, "promote", "v0.0.2", "--reason", "again").startswith(f"{NAME}@v0.0.2 already has the alias ch")
    assert f"{NAME}@v0.0.1 is the champion now, before it {NAME}@v0.0.2" in _run(capsys, "rollback", "--reason", "slow")
    assert _champion(registry) == f"{NAME}@v0.0.1"
    *_, promoted, rolled_back = _run(capsys, "history").splitlines()
    assert promoted.split()[3:6] == ["promote", f"{NAME}@v0.0.2", "champion"]
    assert promoted.endswith("more right answers")
    assert rolled_back.endswith("slow")
    error = _run(capsys, "rollback", "--reason", "slow", code=2)
    assert f"cannot be rolled back: there is no champion before {NAME}@v0.0.1" in error
    git(registry.parent, "clone", "--quiet", str(registry), "clone")
    error = _run(capsys, "promote", "v0.0.2", "--reason", "slow", "--registry", "clone", code=2)
    assert error.endswith(f"a URL; if it is a clone of a registry, name that: {registry}\n")
    with pytest.raises(SystemExit):
        _run(capsys, "rollback", "--reason", " ")


def test_worse_version_is_not_promoted(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --force, that it missed the gate and was not compared with the champion is on record."""
    older = ("promote", "v0.0.1", "--reason", "older", "--champion-evaluation", "nowhere", "--force")
    assert "nowhere: grpo-policy has no champion; leave" in _run(capsys, *older, code=2)
    _run(capsys, "promote", "v0.0.2", "--reason", "the first")
    error = _run(capsys, "promote", "candidate", "--reason", "by mistake", code=2)
    assert f"{NAME}@v0.0.3 is not promoted: it missed the gate; --force" in error
    assert "is not promoted: nowhere: is not an evaluation" in _run(capsys, *older, code=2)
    assert _champion(registry) == f"{NAME}@v0.0.2"
    shown = _run(capsys, "promote", "candidate", "--reason", "to see it", "--force")
    assert shown.count("FAILED") == 2
    assert "promote (forced)" in _run(capsys, "history").splitlines()[-1]
    forced = json.loads(_run(capsys, "history", "--json"))[-1]["facts"]["Forced"]
    assert forced.startswith("it missed the gate: ")
    assert "the test problems differ" in forced
    assert "--output FOLDER`, then promote with --champion-evaluation FOLDER/pipeline" in forced


def test_version_that_cannot_be_served_is_not_promoted(
    registry: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is passed on. Other aliases need no server; those by which no version is found are refused."""

    def refuse(model: Path, probes: Any) -> str:
        assert (model / "model.safetensors").is_file()
        raise PipelineError("the served model computes something else than the evaluated one")

    monkeypatch.setattr(promotion, "check_served", refuse)
    error = _run(capsys, "promote", "v0.0.1", "--reason", "the first", code=2)
    assert "is not promoted: the served model computes something else" in error
    assert _champion(registry) is None
    _run(capsys, "promote", "v0.0.3", "--alias", "staging", "--reason", "to look at")
    assert _run(capsys, "show", "staging").startswith(f"{NAME}@v0.0.3 (candidate, staging)")
    for alias in ("Staging", "v0.0.9", "latest"):
        error = _run(capsys, "promote", "v0.0.3", "--alias", alias, "--reason", "to look at", code=2)
        assert f"alias {alias}: accepted are lowercase letters" in error


def test_damaged_version_is_never_promoted(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even with --force; the damaged file is named, and so is it by `verify`; its temporary copy never is."""
    with pytest.raises(PipelineError, match=r"^v0\.0\.1: wrong"), model_folder("v0.0.1", str(registry)) as folder:
        raise PipelineError(f"{folder}: wrong")
    for path in (registry.parent / "registry-storage").rglob("*"):
        if path.is_file() and path.read_bytes().startswith((b"oneone", b'{"model_type"')):  # the latter of all versions
            path.chmod(0o600)
            path.write_bytes(b"other" + path.read_bytes()[5:])
    error = _run(capsys, "promote", "v0.0.1", "--reason", "the first", "--force", code=2)
    assert f"{NAME}@v0.0.1 is damaged" in error
    for message in (error, every := _run(capsys, "verify", code=2)):
        assert "policy/model.safetensors" in message
    assert all(f"{NAME}@v0.0.{number}: policy/config.json: its object" in every for number in (1, 2, 3))
    with pytest.raises(PipelineError, match=r"models verify` names all"), model_folder("v0.0.1", str(registry)):
        pass
    assert _champion(registry) is None


def _right(registry: Path, version: str) -> set[str]:
    """The problems of `words` that the policy of a version got right greedily."""
    folder = registry.parent / f"records-{version}"
    with read_registry(str(registry)) as snapshot:
        snapshot.get(f"{NAME}@{version}", ["evaluation/grpo/records.jsonl"], folder)
    rows = (row for _, row in jsonl.read_rows(folder / "evaluation/grpo/records.jsonl"))
    greedy = (row for row in rows if row["sample"] == 0 and row["source"] == "words")
    return {row["id"] for row in greedy if row["verdict"] == "right"}
