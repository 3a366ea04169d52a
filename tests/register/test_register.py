"""The register stage with the real git, DVC and GTO."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.register.config import RegisterConfig
from components.register.register import STAGE as REGISTER
from components.register.register import project_commit
from components.register.registry import fetch
from components.report.config import ReportConfig
from components.report.report import STAGE as REPORT
from components.shared import jsonl, lineage
from components.shared.errors import GateMissedError, PipelineError, RetryableError
from components.shared.stage import run
from pipelines import cli
from tests.register.http_storage import http_storage
from tests.register.s3_storage import s3_storage
from tests.report.synthetic import SKILL, made_by_grpo, make_run, report_on

pytestmark = pytest.mark.slow  # every registration runs half a dozen commands

GATE = {"target": ["words"], "min_gain": 0.1, "max_p_value": 0.01, "margin": 0.5, "enforce": True}
KILLS = 5


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a run that passed, of one that missed, and of one that missed a gate that is not enforced."""
    base = tmp_path_factory.mktemp("reports")
    cases = {
        "passed": (SKILL, GATE),
        "missed": ({**SKILL, "grpo": SKILL["sft"]}, GATE),
        "unenforced": ({**SKILL, "grpo": SKILL["sft"]}, {**GATE, "enforce": False}),
    }
    for name, (skill, gate) in cases.items():
        folders = make_run(base / f"{name}-run", skill=skill, problems=120)
        config = ReportConfig.model_validate({"gate": gate, "num_examples": 2})
        run(REPORT, config, {**folders, "report": base / name})
    return {name: base / name for name in cases}


def make_policy(folder: Path, weights: bytes = b"weights") -> Path:
    """A folder as train_grpo leaves it, with other weights in it."""
    (folder / "extra").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(weights * 100_000)
    (folder / "extra" / "empty.txt").write_text("")
    lineage.write(folder, made_by_grpo())
    return folder


def make_config(folder: Path, **values: Any) -> RegisterConfig:
    """A registry inside `folder`, which may be the working folder."""
    return RegisterConfig.model_validate(
        {"registry": str(folder / "registry"), "storage": None, "name": "grpo-policy", **values}
    )


def run_register(config: RegisterConfig, policy: Path, report_folder: Path, out: Path) -> dict[str, Any]:
    """Run the stage as the runners do, with the report made one on this policy; returns version.json."""
    folders = {"policy": policy, "report": report_on(report_folder, policy), "registration": out}
    run(REGISTER, config, folders)
    version: dict[str, Any] = jsonl.read_json(out / "version.json")
    return version


def tags(registry: Path) -> list[str]:
    """The versions in a registry."""
    return git(registry, "tag", "--list").split()


def git(folder: Path, *arguments: str) -> str:
    """What git prints, asked in a folder."""
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def first_registration(tmp_path_factory: pytest.TempPathFactory, reports: dict[str, Path]) -> Path:
    """A folder with a policy, its registry and storage; to be copied."""
    folder = tmp_path_factory.mktemp("first")
    with contextlib.chdir(folder):
        policy = make_policy(folder / "policy")
        run_register(make_config(Path()), policy, reports["passed"], folder / "registration")
    return folder


@pytest.fixture
def registered(first_registration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Registered":
    """A registry with one version, the policy in it, and its version.json; paths are relative to `tmp_path`."""
    shutil.copytree(first_registration, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return make_config(Path()), tmp_path / "policy", jsonl.read_json(tmp_path / "registration" / "version.json")


Registered = tuple[RegisterConfig, Path, dict[str, Any]]


def test_a_policy_that_learned_nothing_is_registered_with_a_warning(
    reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the weights of its reference under another name, which whoever registers it should know."""
    unlearned = shutil.copytree(reports["passed"], tmp_path / "report")
    jsonl.write_json(unlearned / "summary.json", {**jsonl.read_json(unlearned / "summary.json"), "learned": False})
    run_register(make_config(tmp_path), make_policy(tmp_path / "policy"), unlearned, tmp_path / "registration")
    assert "register: warning: GRPO learned nothing" in capsys.readouterr().out


def test_a_version_holds_all_but_the_weights_beside_their_pointer(registered: Registered, tmp_path: Path) -> None:
    """One commit with a tag of GTO's grammar, DVC's pointer and artifact entry, card, report and lineage."""
    config, policy, version = registered
    registry = tmp_path / "registry"
    assert version == {
        "name": "grpo-policy",
        "version": "v0.0.1",
        "tag": "grpo-policy@v0.0.1",
        "policy_digest": lineage.digest(policy),
        "registry": config.registry,
        "path": "policy",
    }
    assert tags(registry) == ["grpo-policy@v0.0.1"]
    files = set(git(registry, "ls-tree", "--name-only", version["tag"]).split())
    assert {"policy.dvc", "model_card.md", "lineage.json", "verdict.json", "summary.json", "report.html"} <= files
    assert yaml.safe_load((registry / "dvc.yaml").read_text())["artifacts"]["grpo-policy"]["path"] == "policy"
    assert (registry / "model_card.md").read_bytes() == (tmp_path / "registration" / "model_card.md").read_bytes()
    assert git(registry, "status", "--porcelain") == ""
    assert sum(file.stat().st_size == 700_000 for file in (tmp_path / "registry-storage").rglob("*")) == 1
    assert "Pipeline-Commit: " in git(registry, "log", "-1", "--format=%B")


def test_the_model_card_says_what_it_is_and_how_good(registered: Registered, tmp_path: Path) -> None:
    """Base model, results with intervals, verdict, limits, the way to fetch it, digests and configs."""
    card = (tmp_path / "registration" / "model_card.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\n")
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "scratch:words"
    for part in (
        "# grpo-policy v0.0.1",
        "| words | 90 |",
        "**Passed.**",
        "dvc artifacts get registry grpo-policy --rev v0.0.1",
        registered[2]["policy_digest"],
        "### Config of train_grpo",
        "## Limits",
    ):
        assert part in card, part


def test_weights_come_back_from_registry_and_storage_alone(registered: Registered, tmp_path: Path) -> None:
    """Moved elsewhere, with the policy and all else gone, the two give the same bytes, also through dvc itself."""
    _, policy, version = registered
    expected = {file.name: file.read_bytes() for file in policy.rglob("*") if file.is_file()}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("registry", "registry-storage"):
        (tmp_path / name).rename(elsewhere / name)
    shutil.rmtree(policy)
    assert fetch(str(elsewhere / "registry"), "v0.0.1", tmp_path / "fetched") == version
    command = ["artifacts", "get", str(elsewhere / "registry"), "grpo-policy", "--rev", "v0.0.1", "--out", "by-dvc"]
    subprocess.run([sys.executable, "-m", "dvc", *command], check=True, cwd=tmp_path, capture_output=True)
    for folder in ("fetched", "by-dvc"):
        got = {file.name: file.read_bytes() for file in (tmp_path / folder).rglob("*") if file.is_file()}
        assert got == expected, folder


def test_the_same_weights_are_the_same_version(
    registered: Registered, reports: dict[str, Path], tmp_path: Path
) -> None:
    """Registered again, even after another report, nothing is added and the outputs are equal."""
    config, policy, _ = registered
    before = git(tmp_path / "registry", "log", "--all", "--format=%H")
    run_register(config, policy, reports["unenforced"], tmp_path / "again")
    for name in ("version.json", "model_card.md"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "registration" / name).read_bytes()
    assert git(tmp_path / "registry", "log", "--all", "--format=%H") == before


def test_other_weights_are_the_next_version(registered: Registered, reports: dict[str, Path], tmp_path: Path) -> None:
    """Versions count up, stay fetchable, and keep their own names; a withdrawn number is not given again."""
    config, policy, _ = registered
    other = make_policy(tmp_path / "other", b"others")
    assert run_register(config, other, reports["passed"], tmp_path / "r2")["version"] == "v0.0.2"
    renamed = config.model_copy(update={"name": "second"})
    assert run_register(renamed, other, reports["passed"], tmp_path / "r3")["tag"] == "second@v0.0.1"
    withdraw = ["-m", "gto.cli", "deprecate", "grpo-policy", "v0.0.2"]
    named = {f"GIT_{role}_{part}": "a@b" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    subprocess.run(
        [sys.executable, *withdraw], check=True, cwd=config.registry, capture_output=True, env={**os.environ, **named}
    )
    assert run_register(config, other, reports["passed"], tmp_path / "r4")["version"] == "v0.0.3"
    fetch(config.registry, "grpo-policy@v0.0.1", tmp_path / "first")
    assert lineage.digest(tmp_path / "first") == lineage.digest(policy)
    with pytest.raises(PipelineError, match=r"v0\.0\.1 is ambiguous: grpo-policy@v0\.0\.1 or second@v0\.0\.1"):
        fetch(config.registry, "v0.0.1", tmp_path / "which")


def test_equal_inputs_give_equal_outputs_in_a_new_registry(
    registered: Registered, reports: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing in version.json or the card depends on time or on what the registry's commits are called."""
    config, policy, _ = registered
    first_commit = git(tmp_path / "registry", "rev-parse", "HEAD")
    for name in ("registry", "registry-storage"):
        shutil.rmtree(tmp_path / name)
    time.sleep(1)
    run_register(config, policy, reports["passed"], tmp_path / "again")
    assert git(tmp_path / "registry", "rev-parse", "HEAD") != first_commit
    for name in ("version.json", "model_card.md"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "registration" / name).read_bytes()


def test_a_missed_gate_registers_nothing(registered: Registered, reports: dict[str, Path], tmp_path: Path) -> None:
    """Exit code 3, one line with the figures, and the registry as it was."""
    config, _, _ = registered
    other = make_policy(tmp_path / "other", b"others")
    before = _content(tmp_path / "registry")
    with pytest.raises(GateMissedError) as missed:
        run_register(config, other, reports["missed"], tmp_path / "none")
    assert missed.value.exit_code == 3
    assert "\n" not in str(missed.value)
    assert "(at least +10.0 required)" in str(missed.value)
    assert not (tmp_path / "none").exists()
    assert _content(tmp_path / "registry") == before


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_missed_gate_makes_no_registry(reports: dict[str, Path], tmp_path: Path) -> None:
    """Where nothing was registered yet nothing appears."""
    policy = make_policy(tmp_path / "policy")
    with pytest.raises(GateMissedError):
        run_register(make_config(tmp_path), policy, reports["missed"], tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "policy-missed-report"]


def test_a_gate_that_is_not_enforced_lets_pass_and_says_so(reports: dict[str, Path], tmp_path: Path) -> None:
    """Registered, with the missed gate in the card."""
    policy = make_policy(tmp_path / "policy")
    version = run_register(make_config(tmp_path), policy, reports["unenforced"], tmp_path / "registration")
    assert version["version"] == "v0.0.1"
    card = (tmp_path / "registration" / "model_card.md").read_text(encoding="utf-8")
    assert "**Missed, and registered nevertheless: the gate was not enforced in this run.**" in card


def _command(config: RegisterConfig, policy: Path, report_folder: Path, folder: Path) -> list[str]:
    params = folder / "params.yaml"
    params.write_text(json.dumps({"register": config.model_dump()}))
    judged = report_on(report_folder, policy)
    options = {"params": params, "policy": policy, "report": judged, "registration": folder / "registration"}
    return [sys.executable, "-m", "components.register", *(f"--{name}={value}" for name, value in options.items())]


@pytest.mark.long
def test_killed_at_any_moment_a_rerun_ends_with_one_version(reports: dict[str, Path], tmp_path: Path) -> None:
    """SIGKILL at moments over the whole run; then one version, a clean registry, weights that come back."""
    policy, config = make_policy(tmp_path / "policy"), make_config(tmp_path)
    command = _command(config, policy, reports["passed"], tmp_path)
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - started
    wanted = _outputs(tmp_path)
    for attempt in range(KILLS):
        for name in ("registry", "registry-storage"):
            shutil.rmtree(tmp_path / name)
        _kill_after(command, whole * (attempt + 1) / KILLS)
        subprocess.run(command, check=True, capture_output=True, text=True)
        _check_whole(tmp_path, config, policy)
        assert _outputs(tmp_path) == wanted


def _outputs(folder: Path) -> list[bytes]:
    return [(folder / "registration" / name).read_bytes() for name in ("version.json", "model_card.md")]


def _kill_after(command: list[str], seconds: float) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _check_whole(folder: Path, config: RegisterConfig, policy: Path) -> None:
    registry = folder / "registry"
    assert tags(registry) == ["grpo-policy@v0.0.1"]
    assert git(registry, "log", "--all", "--format=%s") == "Register grpo-policy@v0.0.1\n"
    assert git(registry, "status", "--porcelain") == ""
    assert list(registry.rglob("*.lock")) == []
    left = {path.name for path in folder.iterdir()}
    assert left <= {
        "policy",
        "policy-passed-report",
        "registry",
        "registry-storage",
        ".registry.lock",
        "registration",
        "params.yaml",
    }
    fetch(config.registry, "v0.0.1", folder / "fetched")
    assert lineage.digest(folder / "fetched") == lineage.digest(policy)
    shutil.rmtree(folder / "fetched")


def test_locks_of_a_killed_registration_do_not_stop_the_next(
    registered: Registered, reports: dict[str, Path], tmp_path: Path
) -> None:
    """Killed inside git, its lock files stay: they are known by the folder that was left with them."""
    config, _, _ = registered
    registry = tmp_path / "registry"
    (tmp_path / ".registry.work" / "clone").mkdir(parents=True)
    for lock in ("index.lock", "refs/heads/main.lock", "HEAD.lock"):
        (registry / ".git" / lock).write_text("")
    (registry / "model_card.md").write_text("half of a checkout")
    version = run_register(config, make_policy(tmp_path / "other", b"others"), reports["passed"], tmp_path / "next")
    assert version["version"] == "v0.0.2"
    assert git(registry, "status", "--porcelain") == ""


def test_a_commit_whose_tag_was_lost_is_tagged(
    registered: Registered, reports: dict[str, Path], tmp_path: Path
) -> None:
    """Killed between the two halves of the push, the version is finished instead of made twice."""
    config, policy, version = registered
    git(tmp_path / "registry", "tag", "--delete", version["tag"])
    assert run_register(config, policy, reports["passed"], tmp_path / "again") == version
    assert git(tmp_path / "registry", "log", "--all", "--format=%s") == "Register grpo-policy@v0.0.1\n"


def test_two_registrations_at_once_take_turns(reports: dict[str, Path], tmp_path: Path) -> None:
    """Both wait for one lock: two policies become two versions."""
    config = make_config(tmp_path)
    running = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        policy = make_policy(tmp_path / name / "policy", name.encode())
        running.append(subprocess.Popen(_command(config, policy, reports["passed"], tmp_path / name)))
    assert [process.wait() for process in running] == [0, 0]
    assert tags(tmp_path / "registry") == ["grpo-policy@v0.0.1", "grpo-policy@v0.0.2"]


def test_no_home_and_no_git_identity_are_needed(reports: dict[str, Path], tmp_path: Path) -> None:
    """In a bare container, or inside a git hook of another repository, the registry is still its own."""
    policy, config = make_policy(tmp_path / "policy"), make_config(tmp_path)
    other = tmp_path / "other"
    subprocess.run(["git", "init", "--quiet", str(other)], check=True)
    env = {name: value for name, value in os.environ.items() if name not in {"HOME", "USER", "LOGNAME"}}
    env |= {"GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other), "GIT_CONFIG_NOSYSTEM": "1"}
    command = _command(config, policy, reports["passed"], tmp_path)
    subprocess.run(command, check=True, capture_output=True, env=env)
    assert tags(tmp_path / "registry") == ["grpo-policy@v0.0.1"]
    assert git(tmp_path / "registry", "log", "-1", "--format=%an %ce").startswith("grpo-pipeline grpo-pipeline@")
    assert tags(other) == []


def test_a_bare_repository_at_a_url_can_be_the_registry(reports: dict[str, Path], tmp_path: Path) -> None:
    """A shared registry is pushed to like any git remote; it needs a storage of its own."""
    shared = tmp_path / "shared.git"
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch", "main", str(shared)], check=True)
    policy = make_policy(tmp_path / "policy")
    config = make_config(tmp_path, registry=f"file://{shared}", storage=str(tmp_path / "store"))
    version = run_register(config, policy, reports["passed"], tmp_path / "registration")
    assert run_register(config, policy, reports["passed"], tmp_path / "registration") == version
    fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    assert lineage.digest(tmp_path / "fetched") == version["policy_digest"]
    empty = tmp_path / "empty.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(empty)], check=True)
    without_storage = make_config(tmp_path, registry=f"file://{empty}")
    with pytest.raises(PipelineError, match=r"register\.storage: a registry at a URL needs"):
        run_register(without_storage, policy, reports["passed"], tmp_path / "none")


def test_a_folder_with_other_content_is_left_alone(reports: dict[str, Path], tmp_path: Path) -> None:
    """Neither a plain folder nor someone's working tree becomes a registry."""
    policy = make_policy(tmp_path / "policy")
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "thesis.txt").write_text("mine")
    with pytest.raises(PipelineError, match="registry: contains something other than a registry"):
        run_register(make_config(tmp_path), policy, reports["passed"], tmp_path / "none")
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "registry")], check=True)
    with pytest.raises(PipelineError, match="working tree of another git repository"):
        run_register(make_config(tmp_path), policy, reports["passed"], tmp_path / "none")
    assert (tmp_path / "registry" / "thesis.txt").read_text() == "mine"


def test_a_lost_or_changed_storage_is_named(registered: Registered, reports: dict[str, Path], tmp_path: Path) -> None:
    """Registering goes to the registry's own storage, and to one that is there."""
    config, policy, _ = registered
    moved = config.model_copy(update={"storage": str(tmp_path / "another")})
    with pytest.raises(PipelineError, match=r"register\.storage: the versions in .* are stored in .*registry-storage"):
        run_register(moved, policy, reports["passed"], tmp_path / "none")
    (tmp_path / "registry-storage").rename(tmp_path / "gone")
    with pytest.raises(PipelineError, match="storage with the weights of the registered versions is missing"):
        run_register(config, policy, reports["passed"], tmp_path / "none")
    with pytest.raises(PipelineError, match=r"v0\.0\.1: cannot fetch the weights: policy: its list of files .*missing"):
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "lineage.json"])
def test_a_changed_file_in_the_storage_is_named(registered: Registered, tmp_path: Path, file: str) -> None:
    """Whatever comes back is what was registered, its lineage too; a wrong byte is an error, not a model."""
    config, policy, _ = registered
    content = (policy / file).read_bytes()
    stored = next(
        each for each in (tmp_path / "registry-storage").rglob("*") if each.is_file() and each.read_bytes() == content
    )
    stored.chmod(0o644)
    stored.write_bytes(content[:-1])
    with pytest.raises(PipelineError, match=rf"v0\.0\.1: .*policy/{file} is damaged: its object {stored}"):
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_weights_that_do_not_come_back_are_not_registered(reports: dict[str, Path], tmp_path: Path) -> None:
    """A storage that takes them and gives others back is found out before anyone is told of a version."""
    policy = make_policy(tmp_path / "policy")
    with http_storage(loses_bytes=True) as storage:
        config = make_config(tmp_path, storage=storage)
        with pytest.raises(
            PipelineError, match=rf"v0\.0\.1: cannot fetch the weights: .* {storage}/files/md5/.*damaged"
        ):
            run_register(config, policy, reports["passed"], tmp_path / "none")
    assert tags(tmp_path / "registry") == []


def test_a_push_to_s3_that_was_cut_off_is_finished_by_the_next_run(
    reports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage is named, trying again is what helps, and then the weights come back from there."""
    policy, config = make_policy(tmp_path / "policy"), make_config(tmp_path, storage="s3://bucket/models")
    with s3_storage("dies in mid-push") as storage:
        for name, value in storage.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RetryableError, match="s3://bucket/models: cannot store the weights there: failed to"):
            run_register(config, policy, reports["passed"], tmp_path / "none")
        assert tags(tmp_path / "registry") == []
        storage.fault = None
        version = run_register(config, policy, reports["passed"], tmp_path / "registration")
        assert version["version"] == "v0.0.1"
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    assert lineage.digest(tmp_path / "fetched") == version["policy_digest"]


def test_a_version_is_fetched_into_a_relative_folder(registered: Registered, tmp_path: Path) -> None:
    """As it is typed: a name, folders that are not there yet, and the empty folder one is in."""
    policy = registered[1]
    (tmp_path / "empty").mkdir()
    for folder, destination in ((tmp_path, "mine"), (tmp_path, "models/mine"), (tmp_path / "empty", ".")):
        with contextlib.chdir(folder):
            assert cli.main(["fetch", "v0.0.1", destination, "--registry", str(tmp_path / "registry")]) == 0
        assert lineage.digest(folder / destination) == lineage.digest(policy)


def test_a_version_that_is_not_there_is_answered_with_those_that_are(registered: Registered, tmp_path: Path) -> None:
    """One line that lists what exists; no registry at all is another line."""
    with pytest.raises(PipelineError, match=r"no version v7\.0\.0; available: grpo-policy@v0\.0\.1$"):
        fetch(registered[0].registry, "v7.0.0", tmp_path / "fetched")
    with pytest.raises(PipelineError, match="no such registry"):
        fetch(str(tmp_path / "nowhere"), "v0.0.1", tmp_path / "fetched")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(PipelineError, match="is not empty"):
        fetch(registered[0].registry, "v0.0.1", tmp_path / "full")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_place_is_named(reports: dict[str, Path], tmp_path: Path) -> None:
    """Where no registry can be made the folder is named in one line."""
    policy = make_policy(tmp_path / "policy")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises((PipelineError, PermissionError), match="closed"):
        run_register(make_config(tmp_path / "closed"), policy, reports["passed"], tmp_path / "none")


def test_a_registry_under_a_file_is_one_line(reports: dict[str, Path], tmp_path: Path) -> None:
    """A path that cannot be made ends with exit code 2 and one line that names it."""
    policy = make_policy(tmp_path / "policy")
    (tmp_path / "file").write_text("")
    command = _command(make_config(tmp_path / "file"), policy, reports["passed"], tmp_path)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: register: ")
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "file") in done.stderr


def test_the_commit_of_the_project_is_known_inside_git_only(tmp_path: Path) -> None:
    """A commit where the code is in a repository, nothing elsewhere, and changed files are told."""
    assert project_commit(tmp_path) is None
    (tmp_path / "components").mkdir()
    (tmp_path / "components" / "x.py").write_text("")
    for arguments in (["init", "--quiet"], ["add", "."]):
        git(tmp_path, *arguments)
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-m", "x")
    assert project_commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "components" / "x.py").write_text("1")
    commit = project_commit(tmp_path)
    assert commit is not None
    assert commit.endswith(" with uncommitted changes")


def test_the_stage_loads_neither_torch_nor_transformers() -> None:
    """Registration runs in the light image."""
    code = (
        "import sys; from components.register import register, catalogue; "
        "sys.exit(bool({'torch', 'transformers', 'dvc', 'gto', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kubeflow_task_registers_and_a_missed_gate_ends_it(reports: dict[str, Path], tmp_path: Path) -> None:
    """The wrapper runs the step; exit code 3 is what Kubeflow sees of a missed gate."""
    from kfp import dsl

    from components.register import component

    policy, config = make_policy(tmp_path / "policy"), make_config(tmp_path).model_dump()
    for name, code in (("missed", 3), ("passed", None)):
        arguments = {
            "policy": dsl.Model(uri=str(policy)),
            "report": dsl.Artifact(uri=str(report_on(reports[name], policy))),
            "registration": dsl.Artifact(uri=str(tmp_path / "registration")),
            "metrics": dsl.Metrics(uri=str(tmp_path / "metrics")),
        }
        if code is None:
            component.register.python_func(config=config, **arguments)
            assert arguments["metrics"].metadata["registered"] == 1
        else:
            with pytest.raises(SystemExit) as ended:
                component.register.python_func(config=config, **arguments)
            assert ended.value.code == code
