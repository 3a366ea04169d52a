"""Fetching raw files: from a folder through a local DVC remote, checked against their pointers."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from components.prepare_data import raw_files as module
from components.prepare_data.raw_files import fetch_raw_files, read_pointers
from components.shared.errors import PipelineError
from components.shared.lineage import file_digest

_ROOT = Path(__file__).parents[2]
_DATA = _ROOT / "../shared/data"
_CONTENT = {"one.jsonl": b'{"a": 1}\n', "two.jsonl": b'{"a": 2}\n'}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project with this one's DVC settings and two pointers, as current folder; returns the source folder."""
    folder, source = tmp_path / "project", tmp_path / "source"
    (folder / "data/raw").mkdir(parents=True)
    (folder / ".dvc").mkdir()
    source.mkdir()
    shutil.copy(_ROOT / ".dvc/config", folder / ".dvc/config")
    shutil.copy(_ROOT / "data/raw/.gitignore", folder / "data/raw/.gitignore")
    for name, content in _CONTENT.items():
        (source / name).write_bytes(content)
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        pointer = {"outs": [{"md5": md5, "size": len(content), "hash": "md5", "path": name}]}
        (folder / f"data/raw/{name}.dvc").write_text(yaml.safe_dump(pointer), encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    monkeypatch.chdir(folder)
    return source


@pytest.mark.slow
def test_files_are_brought_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They arrive byte for byte without leaving a trace in git; the second time nothing is needed."""
    fetch_raw_files(project)
    assert {path.name: path.read_bytes() for path in Path("data/raw").glob("*.jsonl")} == _CONTENT
    status = ["git", "status", "--short", "--untracked-files=all", "data"]
    assert "jsonl\n" not in subprocess.run(status, capture_output=True, text=True, check=True).stdout
    assert Path("data/raw/.gitignore").read_bytes() == (_ROOT / "data/raw/.gitignore").read_bytes()
    shutil.rmtree(project)
    fetch_raw_files(project)
    assert "data/raw is complete (2 files)" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_remote_holds_needs_no_source(project: Path) -> None:
    """A file that was lost comes back from the remote."""
    fetch_raw_files(project)
    shutil.rmtree(project)
    Path("data/raw/one.jsonl").unlink()
    fetch_raw_files(project)
    assert Path("data/raw/one.jsonl").read_bytes() == _CONTENT["one.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["outputs/dvc-remote", ".dvc/cache"])
def test_a_damaged_copy_is_replaced_from_the_source(project: Path, place: str) -> None:
    """In the remote as in DVC's cache: the right file is at hand, and nobody has to know where the wrong one lies."""
    fetch_raw_files(project)
    Path("data/raw/one.jsonl").unlink()
    _damage("one.jsonl", Path(place))
    if place == "outputs/dvc-remote":
        shutil.rmtree(".dvc/cache")
    fetch_raw_files(project)
    assert Path("data/raw/one.jsonl").read_bytes() == _CONTENT["one.jsonl"]


def test_a_damaged_copy_is_named_where_the_source_does_not_help(project: Path) -> None:
    """The copy in the remote, the file that it is of, and what is wrong with the source."""
    stored = Path("outputs/dvc-remote/files/md5") / _md5("one.jsonl")[:2] / _md5("one.jsonl")[2:]
    stored.parent.mkdir(parents=True)
    stored.write_bytes(_CONTENT["one.jsonl"])
    _damage("one.jsonl", Path("outputs/dvc-remote"))
    named = rf"^{stored}, the remote's copy of data/raw/one\.jsonl, is damaged; .*source/one\.jsonl: "
    (project / "one.jsonl").write_bytes(b"another")
    with pytest.raises(PipelineError, match=f"{named}has MD5"):
        fetch_raw_files(project)
    (project / "one.jsonl").unlink()
    with pytest.raises(PipelineError, match=f"{named}no such file"):
        fetch_raw_files(project)
    assert not Path("data/raw/one.jsonl").exists()


def _md5(name: str) -> str:
    return hashlib.md5(_CONTENT[name], usedforsecurity=False).hexdigest()


def _damage(name: str, place: Path) -> None:
    path = place / "files" / "md5" / _md5(name)[:2] / _md5(name)[2:]
    path.chmod(0o644)
    path.write_bytes(_CONTENT[name][:-2])
    path.chmod(0o444)  # as DVC leaves what it trusts


def test_a_source_without_the_file_is_an_error(project: Path) -> None:
    """The message names the file that is looked for and how to say where it is."""
    (project / "two.jsonl").unlink()
    with pytest.raises(PipelineError, match=r"two\.jsonl: no such file; `make data SOURCE=DIR` needs a folder with"):
        fetch_raw_files(project)


def test_another_version_of_a_file_is_refused(project: Path) -> None:
    """Data that differ from what the project is pinned to never enter it."""
    (project / "one.jsonl").write_bytes(b"another")
    with pytest.raises(PipelineError, match=r"one\.jsonl: has MD5 \w{32}, but data/raw/one\.jsonl\.dvc expects \w{32}"):
        fetch_raw_files(project)
    assert not Path("data/raw/one.jsonl").exists()


def test_a_changed_file_in_place_is_never_overwritten(project: Path) -> None:
    """It may be somebody's work; the message says what to do."""
    Path("data/raw/one.jsonl").write_bytes(b"edited")
    with pytest.raises(PipelineError, match=r"one\.jsonl: has MD5 .* move it away"):
        fetch_raw_files(project)
    assert Path("data/raw/one.jsonl").read_bytes() == b"edited"


@pytest.mark.parametrize("content", ["", "outs: []", "outs: [{path: x}]", "- a\n  b: [", "text"])
def test_a_broken_pointer_is_an_error(project: Path, content: str) -> None:
    """The message names the pointer."""
    Path("data/raw/one.jsonl.dvc").write_text(content, encoding="utf-8")
    with pytest.raises(PipelineError, match=r"one\.jsonl\.dvc: not a DVC pointer to one file"):
        fetch_raw_files(project)


def test_outside_the_project_there_is_nothing_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where to run it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match="data/raw: contains no DVC pointers; run this in the project's folder"):
        fetch_raw_files(tmp_path)


@pytest.mark.slow
def test_a_failing_dvc_is_quoted(project: Path) -> None:
    """What DVC says reaches the reader in one line."""
    Path(".dvc/config").write_text("[core]\n    remote = other\n", encoding="utf-8")
    with pytest.raises(PipelineError, match=r"^dvc pull failed: .*local.*$"):
        fetch_raw_files(project)


@pytest.mark.skipif(not _DATA.is_dir(), reason="the published files are not at hand")
def test_the_pointers_are_those_of_the_published_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Size and digests of the files at hand are those of the pointers and of data/README.md."""
    monkeypatch.chdir(_ROOT)
    readme = Path("data/README.md").read_text(encoding="utf-8")
    pointers = read_pointers()
    assert [pointer.target.name for pointer in pointers] == ["gsm8k_test.jsonl", "gsm8k_train.jsonl", "math500.jsonl"]
    for pointer in pointers:
        file = _DATA / pointer.target.name
        assert hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() == pointer.md5
        assert f"size: {file.stat().st_size}\n" in pointer.path.read_text(encoding="utf-8")
        assert file_digest(file) in readme


def test_the_remote_is_the_one_that_dvc_knows() -> None:
    """The folder that is filled is the one that .dvc/config calls `local`."""
    config = (_ROOT / ".dvc/config").read_text(encoding="utf-8")
    assert f"url = ../{module._REMOTE.as_posix()}\n" in config
