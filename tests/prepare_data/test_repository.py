"""Raw files out of a git and DVC repository at a commit; a real repository with a real remote."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import prepare
from components.shared.errors import PipelineError
from components.shared.problem import Split, read_problems

_TRAIN, _TEST = Path("data/train.jsonl"), Path("data/test.jsonl")
_DVC = (sys.executable, "-m", "dvc")


class _Repository:
    """A repository in which DVC keeps the train split, in a remote, and git the test split."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remote = folder / "repository", folder / "remote"
        (self.folder / "data").mkdir(parents=True)
        self._run("git", "init", "--quiet")
        self._run(*_DVC, "init", "--quiet")
        self._run(*_DVC, "remote", "add", "--default", "store", str(self.remote))

    def commit(self, answer: int) -> str:
        """Commit splits whose only train problem has this answer, and return the commit."""
        for path, number in ((_TRAIN, answer), (_TEST, 1000)):
            row = {"question": f"What is {number} plus 0?", "answer": f"#### {number}"}
            (self.folder / path).write_text(json.dumps(row) + "\n")
        self._run(*_DVC, "add", "--quiet", str(_TRAIN))
        self._run(*_DVC, "push", "--quiet")
        self._run("git", "add", "--all")
        self._run("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "-m", "data")
        return self._run("git", "rev-parse", "HEAD").strip()

    def _run(self, *command: str) -> str:
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> _Repository:
    """An empty repository."""
    return _Repository(tmp_path_factory.mktemp("data"))


def _section(url: Path, commit: str, train: Path = _TRAIN) -> dict[str, Any]:
    return {
        "seed": 1,
        "repository": {"url": str(url), "commit": commit},
        "sources": [{"kind": "gsm8k", "train": str(train), "test": str(_TEST)}],
        "max_malformed_fraction": 0.0,
        "contamination": {"ngram_words": 13, "max_overlap": 0.5},
    }


def _answers(section: dict[str, Any], folder: Path) -> list[str]:
    folder.mkdir()
    prepare(PrepareConfig.model_validate(section), problems=folder)
    return [problem.answer for problem in read_problems(folder, Split.TRAIN)]


@pytest.mark.slow
def test_a_commit_gives_the_files_as_they_were_then(repository: _Repository, tmp_path: Path) -> None:
    """Neither later commits nor the working tree show; the remote alone has the content."""
    first, second = repository.commit(1), repository.commit(2)
    (repository.folder / _TRAIN).unlink()
    shutil.rmtree(repository.folder / ".dvc/cache")
    assert _answers(_section(repository.folder, first), tmp_path / "first") == ["1"]
    assert _answers(_section(repository.folder, second), tmp_path / "second") == ["2"]
    manifest = json.loads((tmp_path / "second/manifest.json").read_text())
    assert [file["path"] for file in manifest["raw_files"]] == [str(_TRAIN), str(_TEST)]


@pytest.mark.slow
def test_what_cannot_be_had_is_named(repository: _Repository, tmp_path: Path) -> None:
    """The repository, the commit, the file, and the content behind its pointer: one line each."""
    commit = repository.commit(3)
    gone = tmp_path / "gone"
    cases = {
        str(gone): _section(gone, commit),
        f"has no commit {'0' * 40}": _section(repository.folder, "0" * 40),
        "cannot read data/other.jsonl from": _section(repository.folder, commit, Path("data/other.jsonl")),
    }
    for number, (expected, section) in enumerate(cases.items()):
        with pytest.raises(PipelineError, match=expected) as raised:
            _answers(section, tmp_path / str(number))
        assert "\n" not in str(raised.value)
    shutil.rmtree(repository.folder / ".dvc/cache")
    (stored,) = [path for path in repository.remote.rglob("*") if path.is_file() and b"What is 3 " in path.read_bytes()]
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes().replace(b"3", b"4"))
    with pytest.raises(PipelineError, match=f"cannot read {_TRAIN} from .* is damaged: its object {stored} has"):
        _answers(_section(repository.folder, commit), tmp_path / "damaged")
    shutil.rmtree(repository.remote)
    with pytest.raises(PipelineError, match=f"cannot read {_TRAIN} from"):
        _answers(_section(repository.folder, commit), tmp_path / "empty")


def test_only_files_of_the_repository_can_be_named(tmp_path: Path) -> None:
    """A path that leads out of it would be another file on every machine."""
    for path in (Path("/data/train.jsonl"), Path("../train.jsonl")):
        with pytest.raises(ValueError, match="not in the repository"):
            PrepareConfig.model_validate(_section(tmp_path, "0" * 40, path))


def test_a_branch_is_no_commit(tmp_path: Path) -> None:
    """What a name means may change between two runs that look the same."""
    with pytest.raises(ValueError, match="commit"):
        PrepareConfig.model_validate(_section(tmp_path, "main"))
