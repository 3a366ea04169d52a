"""Lineage: digests of content alone, and the record of what an artifact was made from."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import pytest

from components.shared import lineage
from components.shared.config import Config, Operational
from components.shared.errors import PipelineError

_ROOT = Path(__file__).parents[2]


def _artifact(folder: Path) -> Path:
    """Two files, one of them further down."""
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/b.txt").write_text("two")
    (folder / "a.txt").write_text("one")
    return folder


def test_equal_content_has_an_equal_digest_anywhere(tmp_path: Path) -> None:
    """Place, times and permissions do not count, nor does the lineage in the folder itself."""
    one, other = _artifact(tmp_path / "one"), _artifact(tmp_path / "deep/other")
    (other / "a.txt").chmod(0o600)
    os.utime(other / "a.txt", (0, 0))
    lineage.write(other, {"stage": "x"})
    assert lineage.digest(one) == lineage.digest(other)
    listing = "".join(
        f"{name} {hashlib.sha256(text).hexdigest()}\n" for name, text in (("a.txt", b"one"), ("deep/b.txt", b"two"))
    )
    assert lineage.digest(one) == hashlib.sha256(listing.encode()).hexdigest()
    assert lineage.digest(one / "a.txt") == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "deep/b.txt").write_text("twp"),
        lambda folder: (folder / "a.txt").rename(folder / "c.txt"),
        lambda folder: (folder / "deep/b.txt").rename(folder / "b.txt"),
        lambda folder: (folder / "deep/lineage.json").touch(),
        lambda folder: (folder / "a.txt").unlink(),
    ],
    ids=["content", "name", "place", "more", "less"],
)
def test_other_content_has_another_digest(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """A byte, a name, a file more or less, also a lineage further down; nothing at all is an error."""
    before = lineage.digest(_artifact(tmp_path / "artifact"))
    change(tmp_path / "artifact")
    assert lineage.digest(tmp_path / "artifact") != before
    with pytest.raises(PipelineError, match="gone: no such file or folder"):
        lineage.digest(tmp_path / "gone")


def test_the_digest_of_a_value_ignores_the_order_of_keys() -> None:
    """But not that of lists."""
    assert lineage.value_digest({"a": 1, "b": [1, 2]}) == lineage.value_digest({"b": [1, 2], "a": 1})
    assert lineage.value_digest({"a": 1, "b": [1, 2]}) != lineage.value_digest({"a": 1, "b": [2, 1]})


def test_a_damaged_lineage_is_named(tmp_path: Path) -> None:
    """An artifact of unknown origin is not used as one that no stage made."""
    (tmp_path / lineage.FILE_NAME).write_text('{"stage": ')
    with pytest.raises(PipelineError, match=r"lineage\.json: not valid JSON"):
        lineage.read(tmp_path)


def test_packages_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The light image has no torch, and its stages have a lineage all the same."""
    assert lineage.describe("x", {}, {})["packages"]["torch"] == metadata.version("torch")
    monkeypatch.setattr(lineage, "find_spec", lambda name: None)
    assert lineage.describe("x", {}, {})["packages"] == {}


def test_any_line_of_code_or_template_is_part_of_it(tmp_path: Path) -> None:
    """But no compiled files."""
    copy = tmp_path / "components"
    shutil.copytree(_ROOT / "components", copy, ignore=shutil.ignore_patterns("__pycache__"))
    digests = [_code_digest(tmp_path)]
    assert digests == [lineage.code_digest()]
    for name in ("report/report.html.jinja", "shared/page.css", "shared/jsonl.py"):
        with (copy / name).open("a") as file:
            file.write("\n")
        digests.append(_code_digest(tmp_path))
    assert len(set(digests)) == 4


def _code_digest(project: Path) -> str:
    code = "from components.shared.lineage import code_digest; print(code_digest())"
    environment = {**os.environ, "PYTHONPATH": str(project)}
    run = subprocess.run([sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, check=True)
    return run.stdout.decode().strip()


class _TrainConfig(Config):
    rate: float
    num_processes: Annotated[int, Operational] = 1


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"config": {"rate": 0.5, "num_processes": 8}, "python": "9"}, True),
        ({"config": {"rate": 0.6}}, False),
        ({"config": {"pace": 0.5}}, False),  # of another version of the code
        ({"code": "c2"}, False),
        ({"inputs": {"problems": {"digest": "d2"}}}, False),
    ],
)
def test_the_same_work_has_the_same_fingerprint(change: dict[str, object], same: bool) -> None:
    """Config without operational keys, code, and the content of inputs decide."""
    made_by = {"config": {"rate": 0.5}, "inputs": {"problems": {"digest": "d1"}}, "code": "c1", "python": "3"}
    assert lineage.same_fingerprint(_TrainConfig(rate=0.5), made_by, {**made_by, **change}) == same
    assert not lineage.same_fingerprint(_TrainConfig(rate=0.5), made_by, None)
