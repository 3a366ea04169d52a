"""Unfinished work: kept until the stage has finished, resumed by the same work alone, and never abandoned silently."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock, call

import pytest

from components.shared import durable, lineage, work
from components.shared.config import Config, Operational
from components.shared.environment import JOURNAL_VARIABLE, RUN_NAME_VARIABLE, WORK_VARIABLE
from components.shared.errors import RetryableError
from components.shared.lineage import Material
from components.shared.stage import Stage, run
from tests.lineages import made


class _TrainConfig(Config):
    num_steps: int = 3
    seed: int = 0
    num_processes: Annotated[int, Operational] = 1


_INPUTS = {"source": "draw/text"}


class _Training:
    """A stage that writes a file per step into its work folder, and resumes from these."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "work"
        self.calls: list[Path] = []
        self.sources: dict[str, Material] = {}
        (folder / "source").mkdir()
        (folder / "source/text.txt").write_text("text")

    def run(
        self,
        failure: BaseException | None = None,
        *,
        name: str = "train",
        source: str = "source",
        output: str = "out/model",
        before_end: Callable[[], object] = lambda: None,
        **config: int,
    ) -> float:
        """Run the stage; return the number of steps that an unfinished run had done before."""

        def train(config: _TrainConfig, *, source: Path, model: Path, work: Path) -> dict[str, float]:
            self.calls.append(work)
            done = len(list(work.glob("*.txt")))
            for number in range(done, config.num_steps):
                (work / f"{number}.txt").write_text("reached")
            (model / "weights.txt").write_text("trained")
            before_end()
            if failure is not None:
                raise failure
            return {"done": float(done)}

        sources = dict(self.sources)
        stage = Stage(name, train, _TrainConfig, _INPUTS, ("model",), has_work=True, sources=lambda config: sources)
        folders = {"source": self.folder / source, "model": self.folder / output}
        return run(stage, _TrainConfig(**config), folders, owner="run 0f1e2d3c")["done"]

    def fail(self, seed: int = 0) -> Path:
        """Run the stage until it fails after step 40; return its work folder."""
        with pytest.raises(RetryableError):
            self.run(RetryableError("a peer was lost"), seed=seed)
        (self.calls[-1] / "checkpoints/step-000040").mkdir(parents=True)
        return self.calls[-1]

    def unfinished(self) -> list[Path]:
        return [path for path in self.root.glob("*/*") if path.is_dir()]


_Output = pytest.CaptureFixture[str]
_Patch = pytest.MonkeyPatch


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Training:
    """A stage with unfinished work below `work`."""
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "work"))
    return _Training(tmp_path)


@pytest.mark.parametrize("error", [RetryableError("a peer was lost"), SystemExit(75)], ids=repr)
def test_unfinished_work_is_kept_until_the_stage_has_finished(training: _Training, error: BaseException) -> None:
    """However it failed, the next run finds it; once the outputs are complete it is gone, with its lock."""
    with pytest.raises(type(error)):
        training.run(error)
    assert not (training.folder / "out/model").exists()
    assert training.run() == 3
    assert (training.folder / "out/model/weights.txt").read_text() == "trained"
    assert training.unfinished() == []
    assert training.run() == 0


def test_the_journal_names_the_folder_to_watch(training: _Training, monkeypatch: _Patch) -> None:
    """It names the run, too. Without a checkpoint there is nothing to resume, and the folder is removed."""
    journal = training.folder / "evening/journal.jsonl"
    journal.parent.mkdir()
    monkeypatch.setenv(JOURNAL_VARIABLE, str(journal))

    def look() -> None:
        event = json.loads(journal.read_text().splitlines()[-1])
        assert (event["event"], event["stage"]) == ("work", "train")
        folder = Path(event["folder"])
        assert json.loads((folder / "live/run.json").read_text()) == {"name": "evening", "stage": "train"}

    with pytest.raises(RetryableError):
        training.run(RetryableError("a peer was lost"), before_end=look, num_steps=0)
    assert training.unfinished() == []


def test_the_place_of_unfinished_work(training: _Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stage and key, below the folder in the environment, else outputs/work; nothing of a killed removal stays."""
    leftover = training.root / "train/.0123456789abcdef.removed"
    leftover.mkdir(parents=True)
    training.run()
    assert not leftover.exists()
    monkeypatch.chdir(training.folder)
    monkeypatch.delenv(WORK_VARIABLE)
    training.run()
    first, second = training.calls
    assert (first.parent, second.parent) == (training.root / "train", Path("outputs/work/train"))
    assert first.name == second.name


def test_only_the_same_work_is_resumed(training: _Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same stage, config, inputs and code; neither the place nor the number of processes matters."""
    training.fail()
    assert training.run(seed=1) == 0
    assert training.run(name="tune") == 0
    text = training.folder / "source/text.txt"
    text.write_text("TEXT")
    assert training.run() == 0
    text.write_text("text")
    with monkeypatch.context() as changed:
        changed.setattr(lineage, "stage_files", lambda stage: {"train_grpo/loss.py": "another"})
        assert training.run() == 0
    (training.folder / "source").rename(training.folder / "moved")
    lineage.write(training.folder / "moved", made("another"))
    assert training.run(source="moved", num_processes=8) == 3


def test_inputs_are_hashed_once(training: _Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be hundreds of gigabytes of weights; and outputs once, when they are done."""
    digest = Mock(wraps=lineage.digest)
    monkeypatch.setattr(lineage, "digest", digest)
    training.run()
    assert digest.call_args_list == [call(training.folder / "source"), call(training.folder / "out/model")]


@pytest.mark.parametrize("failure", [None, RetryableError("a peer was lost")], ids=["finished", "failed"])
def test_a_run_waits_for_another_of_the_same_work(training: _Training, monkeypatch: _Patch, failure: Any) -> None:
    """It takes that one's result with its metrics, or resumes what it left unfinished; earlier runs do not matter."""
    training.run(output="earlier")
    folder = training.calls.pop()
    lock = durable.lock_folder(folder / "run.lock", owner="run 0f1e2d3c")
    output: list[str] = []

    def say(stage: str, message: str) -> None:
        output.append(message)
        if "waiting" in message:  # now the other run goes on
            lock.release()
            with suppress(RetryableError):
                training.run(failure)

    monkeypatch.setattr(work, "say", say)
    assert training.run(output="deep/another") == (0 if failure is None else 3)
    owner = rf"run 0f1e2d3c \(process {os.getpid()} on \S+\)"
    assert re.fullmatch(rf"waiting for the result of {owner}, which does the same work in {folder}", output[0])
    assert len(training.calls) == (1 if failure is None else 2)
    assert (training.folder / "deep/another/weights.txt").read_text() == "trained"
    assert training.unfinished() == []


def test_other_unfinished_work_is_described(training: _Training, capsys: _Output, monkeypatch: _Patch) -> None:
    """Its step, how it differs, and its folder; work on other data is not mentioned."""
    other = training.fail()
    monkeypatch.setattr(lineage, "stage_files", lambda stage: {"train_grpo/loss.py": "another", "new.py": "new"})
    training.fail(seed=1)
    difference = "train.seed: 0 -> 1; changed code: components/new.py, components/train_grpo/loss.py"
    assert capsys.readouterr().out == f"train: step 40 of a run is not resumed: {difference}; its folder: {other}\n"
    (training.folder / "source/text.txt").write_text("TEXT")
    training.run()
    assert capsys.readouterr().out == ""


def test_unfinished_work_of_another_name_is_not_mentioned(
    training: _Training, capsys: _Output, monkeypatch: _Patch
) -> None:
    """The name is that without its time, in front or behind; but Kubeflow gives every run another name."""
    first = "20261126T014055Z-smoke"
    names = {first: False, "20261127T120000Z-smoke": True, "smoke-20261127T130000Z": True, "20261127T12Z-large": False}
    for number, (name, is_described) in enumerate(names.items()):
        journal = training.folder / name / "journal.jsonl"
        journal.parent.mkdir()
        monkeypatch.setenv(JOURNAL_VARIABLE, str(journal))
        training.fail(seed=number)
        assert (f"step 40 of {first} is not resumed" in capsys.readouterr().out) == is_described
    monkeypatch.delenv(JOURNAL_VARIABLE)
    monkeypatch.setenv(RUN_NAME_VARIABLE, "Clone of Run of grpo (1a2b3)")
    training.fail(seed=9)
    assert f"step 40 of {first} is not resumed" in capsys.readouterr().out


def test_work_that_is_in_use_or_resumed_is_not_listed(training: _Training, capsys: _Output) -> None:
    """Nobody has abandoned it."""
    lock = durable.lock_folder(training.fail() / "run.lock")
    training.run(seed=1)
    lock.release()
    assert training.run(num_processes=8) == 3
    assert capsys.readouterr().out == ""


def test_work_with_a_file_of_the_user_starts_again_when_it_has_changed(training: _Training) -> None:
    """Such as a reward: what was learned from another one is not gone on with. It is in the lineage."""
    training.sources = {"mine:reward": Material(sha256="1")}
    training.fail()
    training.sources = {"mine:reward": Material(sha256="2")}
    assert training.run() == 0
    made_by = lineage.read(training.folder / "out/model")
    assert made_by
    assert made_by.work.materials == training.sources


def test_a_run_in_a_queue_is_overtaken_by_one_that_finishes(tmp_path: Path) -> None:
    """One that only had the folder meanwhile, and a backup of the volume that changes times, do not overtake it."""
    said: list[str] = []
    folder, record = tmp_path / "train/0123", tmp_path / "train/0123.json"
    record.parent.mkdir()
    record.write_text("results")
    mine = work.WorkFolder("train", folder, "mine")
    mine.begin = lambda: said.append("mine")
    mine.unlock()
    other = work.WorkFolder("train", folder, "other")
    assert not mine.lock_again()
    other.unlock()
    os.utime(record, (1, 1))
    assert mine.lock_again()
    assert said == ["mine"]  # the other may have written there whose the folder is
    mine.unlock()
    record.write_text("other results")
    with pytest.raises(work.OvertakenError):
        mine.require_unchanged()
