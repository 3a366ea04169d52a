"""Files from a DVC storage: byte for byte what their pointers say, or an error that names file and object."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from dvc.config import Config

from components.shared import dvc_process
from components.shared.errors import PipelineError, RetryableError
from components.shared.versioning import Workspace
from tests.damage import flip
from tests.register.registrations import git
from tests.register.s3_storage import Fault, s3_storage

FILES = {"config.json": b'{"a": 1}', "inner/model.safetensors": b"weights" * 1000}
SINGLE = b"one row\n"


class _Repository:
    """A repository with a folder and a file that DVC keeps in a storage, and one that git keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder / "repository", folder / "storage"
        self.objects = {name: self._store(content) for name, content in FILES.items()}
        listed = [{"md5": path.parent.name + path.name, "relpath": name} for name, path in self.objects.items()]
        self.objects["."] = self._store(json.dumps(sorted(listed, key=lambda each: each["relpath"])).encode(), ".dir")
        self.objects["single"] = self._store(SINGLE)
        (self.folder / ".dvc").mkdir(parents=True)
        (self.folder / ".dvc" / "config").write_text(
            f"[core]\n    remote = s\n['remote \"s\"']\n    url = {self.storage}\n"
        )
        for name, key in (("policy", "."), ("single", "single")):
            path = self.objects[key]
            out = {"md5": path.parent.name + path.name, "hash": "md5", "path": name}
            (self.folder / f"{name}.dvc").write_text(yaml.safe_dump({"outs": [out]}))
        (self.folder / "plain.txt").write_text("of git")
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
            git(self.folder, *command)

    def _store(self, content: bytes, suffix: str = "") -> Path:
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        path = self.storage / "files" / "md5" / md5[:2] / f"{md5[2:]}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def get(self, path: str, destination: Path) -> int:
        return dvc_process.main(["get-checked", str(self.folder), path, "HEAD", str(destination)])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Repository:
    """A new repository."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    return _Repository(tmp_path)


def test_undamaged_files_are_copied(repository: _Repository, tmp_path: Path) -> None:
    """Folders, single files, files of a folder and files of git."""
    assert repository.get("policy", tmp_path / "policy") == 0
    assert {name: (tmp_path / "policy" / name).read_bytes() for name in FILES} == FILES
    for path, content in (("single", SINGLE), ("policy/config.json", FILES["config.json"]), ("plain.txt", b"of git")):
        assert repository.get(path, tmp_path / "file") == 0
        assert (tmp_path / "file").read_bytes() == content
        (tmp_path / "file").unlink()


@pytest.mark.parametrize("name", ["inner/model.safetensors", ".", "single"])
def test_damage_is_refused_with_file_and_object(
    repository: _Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Every kind of object, also the list of a folder's files; damaged, and then gone."""
    file = {".": "policy: its list of files", "single": "single"}.get(name, f"policy/{name}")
    for damage, words in ((flip, "is damaged"), (Path.unlink, "is missing from the storage")):
        damage(repository.objects[name])
        assert repository.get("single" if name == "single" else "policy", tmp_path / "out") == 1
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(f"ERROR: {file}")
        assert str(repository.objects[name]) in message
        assert words in message


def test_full_disk_is_not_blamed_on_the_storage(
    repository: _Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that could not be written is named."""
    monkeypatch.chdir(repository.folder)
    md5 = repository.objects["single"]
    (tmp_path / "out").symlink_to("/dev/full")
    assert dvc_process.main(["read", json.dumps({"out": md5.parent.name + md5.name}), str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"ERROR: {tmp_path}/out: cannot be written: the disk is full\n"


_HOSTILE = """
[core]
    remote = s
    hardlink_lock = true
[cache]
    dir = {place}
['remote "s"']
    url = s3://bucket/models
    endpointurl = http://127.0.0.1:9
    region = eu-1
    profile = evil
    configpath = {place}/aws
    credentialpath = {place}/aws
"""
_PROFILES = ("profile evil", "evil")


@pytest.mark.parametrize("name", ["config", "config.local"])
def test_a_repository_says_where_its_storage_is_and_nothing_else(
    repository: _Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whoever may push to it runs no command here: DVC's config can name an AWS profile that does."""
    ran = tmp_path / "ran"
    (tmp_path / "aws").write_text("".join(f"[{name}]\ncredential_process = touch {ran}\n" for name in _PROFILES))
    (repository.folder / ".dvc" / name).write_text(_HOSTILE.format(place=tmp_path))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.chdir(repository.folder)
    dvc_process.main(["list-storage"])
    repository.get("policy", tmp_path / "out")
    assert not ran.exists()
    config = Config(".dvc")
    settings = config["remote"]["s"]
    assert (settings["url"], settings["region"]) == ("s3://bucket/models", "eu-1")
    assert settings.keys().isdisjoint(("profile", "configpath", "credentialpath"))
    assert "dir" not in config["cache"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [("forbidden", PipelineError, "Forbidden|Access Key Id"), ("internal error", RetryableError, "internal error|500")],
)
def test_an_unreadable_storage_is_named(
    repository: _Repository, monkeypatch: pytest.MonkeyPatch, fault: Fault, kind: type[PipelineError], reason: str
) -> None:
    """Folder, object and storage, and why; retryable where the server may recover."""
    config, tmp_path = repository.folder / ".dvc" / "config", repository.folder.parent
    config.write_text(config.read_text().replace(str(repository.storage), "s3://bucket/models"))
    Workspace(repository.folder, tmp_path).git("commit", "--quiet", "--all", "--message", "moved")
    with s3_storage(fault) as storage:
        storage.set_environment(monkeypatch)
        with pytest.raises(PipelineError, match=reason) as failed:
            Workspace(tmp_path, tmp_path).dvc_get(str(repository.folder), "policy", "HEAD", tmp_path / "out")
    assert type(failed.value) is kind
    listed, message = repository.objects["."].relative_to(repository.storage), str(failed.value)
    assert f"policy: its list of files bucket/models/{listed} cannot be read from s3://bucket/models" in message
    assert "\n" not in message
