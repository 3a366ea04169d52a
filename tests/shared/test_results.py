"""Taking what an earlier run has finished: only the same work, only undamaged, by hard link."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

from components.shared import environment, lineage, results
from components.shared.config import Config, Operational
from components.shared.execution import Revision, current_environment
from components.shared.lineage import Material
from components.shared.stage import Reuse, Stage, run
from tests.lineages import made


class _Config(Config):
    seed: int = 0
    num_processes: Annotated[int, Operational] = 1


class _Runs:
    """Runs of one stage that reads an input and a file from outside, in the order in which they are started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.number, self.computed, self._monkeypatch = folder, 0, 0, monkeypatch
        self.raw: Material | None = None
        (folder / "source").mkdir()
        (folder / "source/text.txt").write_text("text")
        (folder / "raw.jsonl").write_text("{}")
        monkeypatch.chdir(folder)

    @property
    def output(self) -> Path:
        return self.folder / f"run-{self.number}/copy"

    def run(self, *, reuse: Reuse = Reuse.ANY, again: bool = False, **config: Any) -> dict[str, float]:
        """Run the stage in the folder of another run, or again in that of the last one."""
        self.number += not again
        self.output.parent.mkdir(exist_ok=True)
        self._monkeypatch.setenv(environment.JOURNAL_VARIABLE, str(self.output.parent / "journal.jsonl"))
        folders = {"source": self.folder / "source", "copy": self.output}
        return run(self._stage(), _Config(**config), folders, work_root=self.folder / "work", reuse=reuse)

    def event(self) -> dict[str, Any]:
        """The last line of the journal of the last run."""
        return dict(json.loads((self.output.parent / "journal.jsonl").read_text().splitlines()[-1]))

    def _stage(self) -> Stage:
        def copy(config: _Config, *, source: Path, copy: Path) -> dict[str, float]:
            """Copy a text."""
            self.computed += 1
            (copy / "text.txt").write_text((source / "text.txt").read_text())
            return {"files": 1.0}

        file = self.folder / "raw.jsonl"
        raw = self.raw or Material(sha256=lineage.file_digest(file) if file.is_file() else "of no file")
        inputs = {"source": "write/text"}
        return Stage("copy", copy, _Config, inputs, ("copy",), materials=lambda config, outputs: {"raw.jsonl": raw})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Runs:
    """One finished run."""
    made = _Runs(tmp_path, monkeypatch)
    made.run()
    return made


def test_unchanged_work_is_taken_from_the_earlier_run(runs: _Runs) -> None:
    """The same files under another name, with their lineage and metrics; the journal names the run that made them."""
    first, before = runs.output, runs.event()
    assert runs.run(num_processes=8) == {"files": 1.0}
    assert runs.computed == 1
    for name in ("text.txt", lineage.FILE_NAME):
        assert (runs.output / name).samefile(first / name)
    assert runs.event() == {**before, "reused_from": "run-1"}


def test_what_is_taken_has_the_lineage_of_this_runs_inputs(runs: _Runs) -> None:
    """A stage before it may have run again, to the same bytes; the earlier run's own lineage is left as it was."""
    first, before = runs.output, lineage.read(runs.output)
    again = made("draw", revision=Revision(commit="ab" * 20))
    lineage.write(runs.folder / "source", again)
    runs.run()
    assert runs.computed == 1
    taken = lineage.read(runs.output)
    assert taken
    assert before
    assert taken.contains(again)
    assert taken.maker(taken.work.inputs["source"]) == again.work
    assert taken.run() == before.runs[0].model_copy(update={"of": taken.made_by})
    assert lineage.read(first) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "source/text.txt").write_text("other"),
        lambda folder: (folder / "raw.jsonl").write_text("[]"),
        lambda folder: (folder / "raw.jsonl").unlink(),
        lambda folder: (folder / "run-1/copy/text.txt").unlink(),
        lambda folder: (folder / "run-1/copy/lineage.json").unlink(),
        lambda folder: (folder / "run-1/copy/lineage.json").write_text("{"),
    ],
)
def test_what_has_changed_is_computed_again(runs: _Runs, change: Callable[[Path], object]) -> None:
    """An input, a file from outside the graph, or what was made."""
    change(runs.folder)
    runs.run()
    assert runs.computed == 2
    assert "reused_from" not in runs.event()


def test_data_of_another_repository_are_fetched_anew(runs: _Runs) -> None:
    """What is made of them decides about the stages that follow."""
    runs.raw = Material(sha256=lineage.file_digest(runs.folder / "raw.jsonl"), repository="https://git.example/data")
    runs.run(seed=3)
    runs.run(seed=3)
    assert runs.computed == 3


def test_other_settings_code_or_packages_are_other_work(runs: _Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them differs; with all as before the first run counts again."""
    runs.run(seed=1)
    assert runs.computed == 2
    with monkeypatch.context() as changed:
        changed.setattr(lineage, "stage_files", lambda stage: {"shared/jsonl.py": "other"})
        runs.run()
    assert runs.computed == 3
    with monkeypatch.context() as changed:
        current = current_environment()
        changed.setattr(results, "current_environment", lambda: current.model_copy(update={"lock": "other"}))
        runs.run()
    assert runs.computed == 4
    runs.run(seed=1)
    assert runs.computed == 4


def test_a_damaged_output_is_named_and_an_older_one_taken(runs: _Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte of an output is read before it is taken."""
    runs.run(reuse=Reuse.FRESH)
    (runs.output / "text.txt").write_text("tex\0")
    runs.run()
    assert runs.event()["reused_from"] == "run-1"
    damaged = runs.folder / "run-2/copy"
    first = f"copy: {damaged}: has changed since run-2 made it; it is not used"
    assert capsys.readouterr().out.splitlines()[-2:] == [first, "copy: unchanged: from run-1"]


def test_what_an_earlier_attempt_has_finished_is_left_where_it_is(runs: _Runs) -> None:
    """As on a cluster: what other runs have finished does not count there."""
    runs.run(reuse=Reuse.IN_PLACE)
    assert runs.computed == 2
    inode = (runs.output / "text.txt").stat().st_ino
    (runs.folder / "raw.jsonl").write_text("[]")  # what is outside the graph was looked at when the run began
    assert runs.run(reuse=Reuse.IN_PLACE, again=True) == {"files": 1.0}
    assert runs.computed == 2
    assert (runs.output / "text.txt").stat().st_ino == inode


def test_a_result_outlives_the_run_that_computed_it(runs: _Runs) -> None:
    """Where another run has taken it. Where nothing is reused nothing is written, as there is no shared volume."""
    runs.run()
    shutil.rmtree(runs.folder / "run-1")
    runs.run()
    assert runs.computed == 1
    assert runs.event()["reused_from"] == "run-1"
    shutil.rmtree(runs.folder / "work")
    runs.run(reuse=Reuse.NONE)
    assert not (runs.folder / "work").exists()


def test_code_that_a_stage_does_not_import_does_not_count() -> None:
    """Only the packages that it may run do."""
    packages = {name.partition("/")[0] for name in lineage.stage_files("prepare_data")}
    assert packages == {"grading", "prepare_data", "shared", "workers"}
