import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import prepare
from components.prepare_data.raw_files import fetch_raw_files, read_pointers
from components.shared.errors import PipelineError
from components.shared.lineage import file_digest
from components.shared.problem import Split, read_problems

_ROOT = Path(__file__).parents[2]
_PUBLISHED = _ROOT / "../shared/data"
_CONTENT = {"one.jsonl": b'{"a": 1}\n', "two.jsonl": b'{"a": 2}\n'}
_ONE, _REMOTE, _CACHE = Path("data/raw/one.jsonl"), Path("dvc-storage"), Path(".dvc/cache")


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the files; the working folder is an empty project with this one's DVC settings and pointers."""
    folder, source = tmp_path / "project", tmp_path / "source"
    (folder / "data/raw").mkdir(parents=True)
    (folder / ".dvc").mkdir()
    source.mkdir()
    shutil.copy(_ROOT / ".dvc/config", folder / ".dvc/config")
    shutil.copy(_ROOT / "data/raw/.gitignore", folder / "data/raw/.gitignore")
    for name, content in _CONTENT.items():
        (source / name).write_bytes(content)
        pointer = {"outs": [{"md5": _md5(content), "size": len(content), "hash": "md5", "path": name}]}
        (folder / f"data/raw/{name}.dvc").write_text(yaml.safe_dump(pointer), encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    monkeypatch.chdir(folder)
    return source


def _damage(store: Path) -> None:
    """Truncate the content of `one.jsonl` in DVC's cache or remote."""
    md5 = _md5(_CONTENT["one.jsonl"])
    path = store / "files" / "md5" / md5[:2] / md5[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(_CONTENT["one.jsonl"][:-2])
    path.chmod(0o444)  # as DVC leaves what it trusts


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [_REMOTE, _CACHE])
def test_files_are_fetched_once(source: Path, capsys: pytest.CaptureFixture[str], damaged: Path) -> None:
    """They arrive byte for byte, git sees no change, the source is needed once, and a lost one is in the remote."""
    _damage(damaged)
    fetch_raw_files(source)
    assert {path.name: path.read_bytes() for path in Path("data/raw").glob("*.jsonl")} == _CONTENT
    status = ["git", "status", "--short", "--untracked-files=all", "data"]
    assert "jsonl\n" not in subprocess.run(status, capture_output=True, text=True, check=True).stdout
    assert Path("data/raw/.gitignore").read_bytes() == (_ROOT / "data/raw/.gitignore").read_bytes()
    shutil.rmtree(source)
    fetch_raw_files(source)
    assert "data/raw is complete (2 files)" in capsys.readouterr().out
    _ONE.unlink()
    fetch_raw_files(source)
    assert _ONE.read_bytes() == _CONTENT["one.jsonl"]


@pytest.mark.parametrize("content", [b"another", None])
def test_source_without_the_right_file_is_an_error(source: Path, content: bytes | None) -> None:
    """The message names the file that is expected and the command; nothing is put in place."""
    _damage(_REMOTE)
    (source / "one.jsonl").unlink()
    if content is not None:
        (source / "one.jsonl").write_bytes(content)
    named = r"the remote's copy of data/raw/one\.jsonl, and .*/source/one\.jsonl are no file"
    with pytest.raises(PipelineError, match=rf"{named} with MD5 .*; run `make data SOURCE=DIR`"):
        fetch_raw_files(source)
    assert not _ONE.exists()


@pytest.mark.slow
def test_file_that_is_nowhere_here_comes_from_where_it_is_published(source: Path, tmp_path: Path) -> None:
    """A pointer that was imported from an address: right content, other content, and no content."""
    published = source.rename(tmp_path / "published")
    for name in _CONTENT:
        pointer = Path(f"data/raw/{name}.dvc")
        imported = {"frozen": True, "deps": [{"path": f"{published}/{name}", "hash": "md5"}]}
        pointer.write_text(yaml.safe_dump({**imported, **yaml.safe_load(pointer.read_text())}))
    fetch_raw_files(source)
    assert _ONE.read_bytes() == _CONTENT["one.jsonl"]
    for path in (_REMOTE, _CACHE):
        shutil.rmtree(path)
    _ONE.unlink()
    (published / "one.jsonl").write_bytes(b"another")
    with pytest.raises(PipelineError, match=rf"{published}/one\.jsonl has other content now; run `make data SOURCE"):
        fetch_raw_files(source)
    (published / "one.jsonl").unlink()
    with pytest.raises(PipelineError, match=rf"{published}/one\.jsonl cannot be read .*; run `make data SOURCE"):
        fetch_raw_files(source)
    assert not _ONE.exists()
    assert [path for path in _REMOTE.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("content", ["", "outs: []", "outs: [{path: x}]", "- a\n  b: ["])
def test_changed_file_and_broken_pointer_are_errors(source: Path, content: str) -> None:
    """The file may be somebody's work, and stays. In a folder without pointers it says where to run the command."""
    _ONE.write_bytes(b"edited")
    with pytest.raises(PipelineError, match=r"one\.jsonl: has MD5 .* move it away"):
        fetch_raw_files(source)
    assert _ONE.read_bytes() == b"edited"
    Path(f"{_ONE}.dvc").write_text(content, encoding="utf-8")
    with pytest.raises(PipelineError, match=r"one\.jsonl\.dvc: not a DVC pointer to one file"):
        fetch_raw_files(source)
    shutil.rmtree("data")
    with pytest.raises(PipelineError, match="data/raw: contains no DVC pointers; run this in the project's folder"):
        fetch_raw_files(source)


@pytest.mark.skipif(not _PUBLISHED.is_dir(), reason="the published files are not here")
def test_pointers_are_those_of_the_published_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Size and digests of the published files are those of the pointers and of data/README.md."""
    monkeypatch.chdir(_ROOT)
    readme = Path("data/README.md").read_text(encoding="utf-8")
    pointers = read_pointers()
    assert len(pointers) == 4
    for pointer in pointers:
        file = _PUBLISHED / pointer.target.name
        assert _md5(file.read_bytes()) == pointer.md5
        assert f"size: {file.stat().st_size}\n" in pointer.path.read_text(encoding="utf-8")
        assert file_digest(file) in readme


_TRAIN, _TEST = Path("data/train.jsonl"), Path("data/test.jsonl")


def _run(folder: Path, *command: str) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def _commit(repository: Path, answer: int) -> str:
    """Commit splits whose only train problem has this answer: DVC keeps the train split, git the test split."""
    for path, number in ((_TRAIN, answer), (_TEST, 1000)):
        row = {"question": f"What is {number} plus 0?", "answer": f"#### {number}"}
        (repository / path).write_text(json.dumps(row) + "\n")
    _run(repository, sys.executable, "-m", "dvc", "add", "--quiet", str(_TRAIN))
    _run(repository, sys.executable, "-m", "dvc", "push", "--quiet")
    _run(repository, "git", "add", "--all")
    _run(repository, "git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "-m", "data")
    return _run(repository, "git", "rev-parse", "HEAD").strip()


def _answers(out: Path, url: Path, commit: str, train: Path = _TRAIN) -> list[str]:
    repository, source = {"url": str(url), "commit": commit}, {"kind": "gsm8k", "train": str(train), "test": str(_TEST)}
    out.mkdir(exist_ok=True)
    prepare(PrepareConfig.model_validate({"repository": repository, "sources": [source]}), problems=out)
    return [problem.answer for problem in read_problems(out, Split.TRAIN)]


@pytest.mark.slow
def test_repository_is_read_at_its_commit(tmp_path: Path) -> None:
    """Neither later commits nor the working tree matter; the content comes from the remote, and what fails is named."""
    repository, remote = tmp_path / "repository", tmp_path / "remote"
    (repository / "data").mkdir(parents=True)
    _run(repository, "git", "init", "--quiet")
    _run(repository, sys.executable, "-m", "dvc", "init", "--quiet")
    _run(repository, sys.executable, "-m", "dvc", "remote", "add", "--default", "store", str(remote))
    first, second = _commit(repository, 1), _commit(repository, 2)
    (repository / _TRAIN).unlink()
    shutil.rmtree(repository / ".dvc/cache")
    assert _answers(tmp_path / "first", repository, first) == ["1"]
    assert _answers(tmp_path / "second", repository, second) == ["2"]
    manifest = json.loads((tmp_path / "second/manifest.json").read_text())
    pointer = (repository / f"{_TRAIN}.dvc").read_text(encoding="utf-8")
    train, test = manifest["raw_files"]
    assert [train["path"], test["path"]] == [str(_TRAIN), str(_TEST)]
    assert f"md5: {train['dvc_md5']}\n" in pointer
    assert test["dvc_md5"] is None
    assert all((file["repository"], file["commit"]) == (str(repository), second) for file in (train, test))

    def error(url: Path, commit: str, train: Path = _TRAIN) -> str:
        with pytest.raises(PipelineError) as raised:
            _answers(tmp_path / "failed", url, commit, train)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert str(tmp_path / "gone") in error(tmp_path / "gone", second)
    assert f"has no commit {'0' * 40}" in error(repository, "0" * 40)
    assert "cannot read data/other.jsonl from" in error(repository, second, Path("data/other.jsonl"))
    (stored,) = [path for path in remote.rglob("*") if path.is_file() and b" 2 " in path.read_bytes()]
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes().replace(b"2", b"4"))
    assert f"is damaged: its object {stored} has" in error(repository, second)
    shutil.rmtree(remote)
    assert f"cannot read {_TRAIN} from" in error(repository, second)
