"""Lineage: digests of content alone, and the record of what an artifact was made from."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.execution import Revision
from tests.lineages import environment, made


def _artifact(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/b.txt").write_text("two")
    (folder / "a.txt").write_text("one")
    return folder


def test_equal_content_has_an_equal_digest_anywhere(tmp_path: Path) -> None:
    """Nor does the lineage in the folder itself count."""
    one, other = _artifact(tmp_path / "one"), _artifact(tmp_path / "deep/other")
    lineage.write(other, made("x"))
    assert lineage.digest(one) == lineage.digest(other)
    first, second = (hashlib.sha256(text).hexdigest() for text in (b"one", b"two"))
    listing = f"a.txt {first}\ndeep/b.txt {second}\n"
    assert lineage.digest(one) == hashlib.sha256(listing.encode()).hexdigest()
    assert lineage.digest(one / "a.txt") == first


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "deep/b.txt").write_text("twp"),
        lambda folder: (folder / "a.txt").rename(folder / "c.txt"),
        lambda folder: (folder / "deep/b.txt").rename(folder / "b.txt"),
        lambda folder: (folder / "deep/lineage.json").touch(),
        lambda folder: (folder / "a.txt").unlink(),
    ],
)
def test_other_content_has_another_digest(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """A byte, a name, a file more or less, also a lineage further down; nothing at all is an error."""
    before = lineage.digest(_artifact(tmp_path / "artifact"))
    change(tmp_path / "artifact")
    assert lineage.digest(tmp_path / "artifact") != before
    with pytest.raises(PipelineError, match="gone: no such file or folder"):
        lineage.digest(tmp_path / "gone")


def test_code_and_templates_count_and_compiled_files_do_not() -> None:
    """Any change of them is another code."""
    files = lineage.code_files().keys()
    assert {"report/report.html.jinja", "shared/page.css", "shared/jsonl.py"} <= files
    assert not [name for name in files if "__pycache__" in name]


def test_every_stage_and_environment_is_in_a_lineage_once() -> None:
    """However many ways lead to it: a diamond of stages is four records, in an order of their own."""
    data = made("data", packages={"numpy": "2"})
    left = made("left", inputs={"data": data}, packages={"numpy": "2"})
    right = made("right", inputs={"data": data}, packages={"numpy": "2", "torch": "2"})
    report = made("report", inputs={"left": left, "right": right, "data": data}, packages={"numpy": "2"})
    assert [work.stage for work in report.works] == ["data", "left", "right", "report"]
    assert (len(report.stages), len(report.runs), len(report.environments), len(report.revisions)) == (4, 4, 2, 1)
    assert report.contains(left)
    assert not left.contains(right)
    assert report.environment("right") == environment(packages={"numpy": "2", "torch": "2"})
    assert report.stage("left") == left.work
    assert (report.environment("other"), report.stage("other")) == (None, None)


@pytest.mark.parametrize(("added", "is_kept"), [("rate = 1", True), ('token = "q8Zr2LxV0bTn5KpW"', False)])
def test_a_patch_with_a_key_is_not_recorded(monkeypatch: pytest.MonkeyPatch, added: str, is_kept: bool) -> None:
    """Under every runner: lineage goes into the registry with every version."""
    patch = f"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -0,0 +1 @@\n+{added}\n"
    revision = Revision(commit="c0ffee", patch_digest="d1", patch=patch)
    monkeypatch.setattr(lineage, "current_revision", lambda: revision)
    described = lineage.describe("x", {}, {})
    recorded = lineage.complete(described, {}, datetime.now(UTC)).revision("x")
    assert recorded == revision.model_copy(update={} if is_kept else {"patch": None})


@pytest.mark.parametrize("change", [('"rate": 1', '"rate": 2'), ('"2"', '"3"'), ("c0ffee", "decaf0")])
def test_a_changed_record_is_damage(tmp_path: Path, change: tuple[str, str]) -> None:
    """Keys are digests: a stage, environment or revision that was edited by hand, or lost, is no evidence."""
    lineage.write(tmp_path, made("train", {"rate": 1}, {"data": made("data")}, packages={"torch": "2"}))
    path = tmp_path / lineage.FILE_NAME
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(PipelineError, match=r"lineage\.json: is damaged \(.*does not have that digest\)"):
        lineage.read(tmp_path)


def test_a_lineage_of_an_older_version_is_refused() -> None:
    """With what to do."""
    with pytest.raises(PipelineError, match="was made by an older version; run the stage that made it again"):
        lineage.parse({"stage": "train", "config": {}, "inputs": {}, "code": "c"}, name="lineage.json")
