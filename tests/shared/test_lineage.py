"""Lineage: digests of content alone, and the record of what an artifact was made from."""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from components.shared import lineage
from components.shared.errors import PipelineError

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact of two files, one of them further down."""
    folder = tmp_path / "artifact"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "deep/b.txt").write_text("two")
    return folder


def test_equal_content_has_an_equal_digest_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    """Place, times, permissions and the order of writing do not count."""
    other = tmp_path / "elsewhere"
    (other / "deep").mkdir(parents=True)
    (other / "deep/b.txt").write_text("two")
    (other / "a.txt").write_text("one")
    (other / "a.txt").chmod(0o600)
    os.utime(other / "a.txt", (0, 0))
    assert lineage.digest(other) == lineage.digest(folder)


@pytest.mark.parametrize("change", ["content", "name", "place", "more", "less"])
def test_any_other_content_has_another_digest(folder: Path, change: str) -> None:
    """A byte, a name, a file more or less."""
    before = lineage.digest(folder)
    match change:
        case "content":
            (folder / "deep/b.txt").write_text("twp")
        case "name":
            (folder / "a.txt").rename(folder / "c.txt")
        case "place":
            (folder / "deep/b.txt").rename(folder / "b.txt")
        case "more":
            (folder / "empty").touch()
        case "less":
            (folder / "a.txt").unlink()
    assert lineage.digest(folder) != before


def test_an_artifacts_own_lineage_does_not_count(folder: Path) -> None:
    """Equal weights are equal, whatever they were made from."""
    before = lineage.digest(folder)
    lineage.write(folder, {"stage": "x"})
    assert lineage.digest(folder) == before


def test_a_files_digest_is_its_sha256(folder: Path) -> None:
    """The one that `sha256sum` prints, for a file alone and by either name."""
    expected = hashlib.sha256(b"one").hexdigest()
    assert lineage.file_digest(folder / "a.txt") == lineage.digest(folder / "a.txt") == expected


def test_a_values_digest_does_not_depend_on_the_order_of_keys() -> None:
    """Two params files that say the same are the same; values and list order count."""
    assert lineage.value_digest({"a": 1, "b": [1, 2]}) == lineage.value_digest({"b": [1, 2], "a": 1})
    assert lineage.value_digest({"a": 1, "b": [1, 2]}) != lineage.value_digest({"a": 1, "b": [2, 1]})


def test_a_description_holds_the_lineage_of_each_input(folder: Path, tmp_path: Path) -> None:
    """From one artifact back to the raw data; what no stage made has none."""
    raw = tmp_path / "raw"
    shutil.copytree(folder, raw)
    lineage.write(folder, lineage.describe("first", {"seed": 1}, {"raw": raw}))
    made = lineage.describe("second", {"rate": 0.5}, {"problems": folder})
    assert (made["stage"], made["config"]) == ("second", {"rate": 0.5})
    first = made["inputs"]["problems"]
    assert first["digest"] == lineage.digest(folder)
    assert (first["lineage"]["stage"], first["lineage"]["config"]) == ("first", {"seed": 1})
    assert first["lineage"]["inputs"] == {"raw": {"digest": lineage.digest(raw), "lineage": None}}


def test_packages_that_are_not_installed_are_left_out() -> None:
    """The light image has no torch, and its stages have a lineage all the same."""
    code = (
        "import sys; from components.shared import lineage; "
        "sys.path[:] = [path for path in sys.path if 'site-packages' not in path]; "
        "print(lineage.describe('x', {}, {})['packages'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("{}\n", 0), done.stderr
    assert lineage.describe("x", {}, {})["packages"]["torch"] == metadata.version("torch")


def test_the_code_is_part_of_it_and_caches_are_not(tmp_path: Path) -> None:
    """A changed line or template of any component changes the digest, compiled files do not."""
    copy = tmp_path / "components"
    shutil.copytree(_ROOT / "components", copy, ignore=shutil.ignore_patterns("__pycache__"))
    unchanged = _code_digest(tmp_path)
    assert unchanged == lineage.code_digest()
    for name in ("report/report.html.jinja", "shared/page.css", "train_grpo/loss.py"):
        with (copy / name).open("a") as file:
            file.write("\n")
        changed = _code_digest(tmp_path)
        assert changed != unchanged
        unchanged = changed


def _code_digest(project: Path) -> str:
    code = "from components.shared.lineage import code_digest; print(code_digest())"
    environment = {**os.environ, "PYTHONPATH": str(project)}
    run = subprocess.run([sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, check=True)
    return run.stdout.decode().strip()


def test_lineage_comes_back_as_it_was_kept(folder: Path) -> None:
    """In a file of its own; an artifact without one has none, and a broken one is named."""
    assert lineage.read(folder) is None
    lineage.write(folder, {"stage": "x", "config": {"a": [1, None]}})
    assert lineage.read(folder) == {"stage": "x", "config": {"a": [1, None]}}
    (folder / lineage.FILE_NAME).write_text('{"stage": ')
    with pytest.raises(PipelineError, match=r"lineage\.json: not valid JSON"):
        lineage.read(folder)


def test_what_is_not_there_has_no_digest(tmp_path: Path) -> None:
    """A missing folder is an error, and not the digest of nothing."""
    with pytest.raises(PipelineError, match=r"gone: no such file or folder"):
        lineage.digest(tmp_path / "gone")


def test_only_the_lineage_of_the_folder_itself_is_left_out(tmp_path: Path) -> None:
    """A file of that name further down is content like any other."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "lineage.json").write_text("{}")
    before = lineage.digest(tmp_path)
    (tmp_path / "lineage.json").write_text("{}")
    assert lineage.digest(tmp_path) == before
    (tmp_path / "inner" / "lineage.json").write_text("[]")
    assert lineage.digest(tmp_path) != before
