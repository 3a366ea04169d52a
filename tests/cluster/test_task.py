import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.cluster.config import current_stage
from components.cluster.task import run_task
from components.shared import jsonl, lineage
from components.shared.config import Config
from components.shared.environment import RUN_NAME_VARIABLE
from components.shared.model import PIPELINE_FILE, resolve_reference
from components.shared.stage import Stage
from components.shared.task import StageFolders
from components.shared.work import current_work
from tests.cluster.launched import KilledError

RUN_ID = "0f1e2d3c"
CALLS: list[Path] = []
OTHER_RUNS: list[Callable[[], object]] = []
"""Runs that do the work of a stage that is queued meanwhile."""


class TrainingConfig(Config):
    """Settings of a stage that copies its input."""

    ending: str = "well"


def train(config: TrainingConfig, *, problems: Path, model: Path, training: Path, work: Path) -> dict[str, float]:
    """Copy the problems to a model; leave unfinished work where it is killed."""
    CALLS.append(problems)
    assert current_stage() is not None
    if OTHER_RUNS:
        (folder := current_work() or pytest.fail("nothing is locked")).unlock()
        OTHER_RUNS.pop()()
        folder.require_unchanged()
    left = (work / "checkpoint").exists()
    work.mkdir(exist_ok=True)
    (work / "checkpoint").touch()
    if config.ending == "killed" and not left:
        raise KilledError
    (model / "train.jsonl").write_bytes((problems / "train.jsonl").read_bytes())
    jsonl.write_json(model / PIPELINE_FILE, {"prompt": "{question}", "answer": "declared"})
    (training / "curves.csv").write_text("step\n1\n")
    return {"resumed": float(left)}


def _stage(name: str = "train_sft") -> Stage:
    inputs = {"problems": "prepare_data/problems"}
    return Stage(name, train, TrainingConfig, inputs, ("model", "training"), has_work=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs the stage as a Kubeflow task, with its outputs in a folder of that attempt."""
    monkeypatch.setenv(RUN_NAME_VARIABLE, "")
    CALLS.clear()
    (tmp_path / "volume").mkdir()
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems" / "train.jsonl").write_text("{}\n")

    def run(
        attempt: str = "1", problems: str = "problems", stage: str = "train_sft", run_id: str = RUN_ID, **config: str
    ) -> dict[str, float]:
        place: Any = {"cluster": {"image": "gpu:1", "mount": str(tmp_path / "volume")}, "run_id": run_id}
        artifact, source = str(tmp_path / attempt), str(tmp_path / problems)
        result = run_task(_stage(stage), config, artifact, **place, run_name="nightly", problems=source)
        for name in ("model", "training"):
            assert lineage.digest(Path(result.folder) / name) == lineage.digest(tmp_path / attempt / name)
        passed_on, original = (resolve_reference(Path(path)) for path in (result.inputs["problems"], source))
        assert passed_on.is_relative_to(tmp_path / "volume")
        assert lineage.digest(passed_on) == lineage.digest(original)
        return result.metrics

    return run


def test_outputs_lie_on_the_volume(run: Any, tmp_path: Path) -> None:
    """Inputs are copied there; models are passed on by reference, other outputs as copies."""
    assert run() == {"resumed": 0.0}
    volume = tmp_path / "volume"
    assert CALLS[0].is_relative_to(volume)
    model = volume / "grpo-pipeline" / RUN_ID / "train_sft" / "model"
    assert resolve_reference(tmp_path / "1" / "model") == model
    assert (model / "train.jsonl").read_text() == "{}\n"
    assert (tmp_path / "1" / "training" / "curves.csv").is_file()
    made_by = lineage.read(model)
    assert made_by is not None
    assert made_by.work.inputs["problems"].digest == lineage.digest(tmp_path / "problems")
    assert lineage.read(tmp_path / "1" / "model") == made_by == lineage.read(tmp_path / "1" / "training")
    assert not [path for path in (volume / "grpo-pipeline" / "work").glob("*/*") if path.is_dir()]


def test_model_on_the_volume_is_not_copied(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is passed on by reference, its lineage has the model's own digest, and it must not change."""
    run()
    run("2", problems="1/model", stage="train_grpo")
    model = resolve_reference(tmp_path / "1" / "model")
    assert CALLS[1] == model
    made_by = lineage.read(tmp_path / "2" / "model")
    assert made_by is not None
    problems = made_by.work.inputs["problems"]
    assert problems.digest == lineage.digest(model)
    assert made_by.maker(problems) == (lineage.read(model) or made_by).work
    (model / "train.jsonl").write_text("[]")
    with pytest.raises(SystemExit):
        run("3", problems=f"volume/grpo-pipeline/{RUN_ID}/train_sft/passed_on/model", stage="train_grpo")
    assert "has changed since it was passed on" in capsys.readouterr().err


def test_unfinished_work_is_resumed(run: Any, tmp_path: Path) -> None:
    """In another attempt: it is found by what it is made from. Its files name the run as Kubeflow's page does."""
    with pytest.raises(KilledError):
        run("1", ending="killed")
    (about,) = (tmp_path / "volume/grpo-pipeline/work/train_sft").glob("*/live/run.json")
    assert jsonl.read_json(about)["name"] == "nightly"
    assert run("2", ending="killed") == {"resumed": 1.0}


def test_finished_stage_is_not_run_again(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the task was killed before Kubeflow took its outputs, the next attempt passes them on."""

    def die(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(StageFolders, "pass_on", die)
        with pytest.raises(KilledError):
            run("1")
    assert run("2") == {"resumed": 0.0}
    assert len(CALLS) == 1
    assert resolve_reference(tmp_path / "2" / "model").is_dir()
    assert run("3", ending="other") == {"resumed": 0.0}
    assert len(CALLS) == 2, "another config makes another model"


def test_run_that_is_overtaken_in_a_queue_takes_the_result_of_the_other(run: Any, tmp_path: Path) -> None:
    """The other one has done the same work, as another run, while this one had not locked the folder."""
    OTHER_RUNS.append(lambda: run("2", run_id="another-run"))
    assert run("1") == {"resumed": 0.0}
    assert len(CALLS) == 2
    other = tmp_path / "volume/grpo-pipeline/another-run/train_sft/model"
    assert lineage.read(tmp_path / "1" / "model") == lineage.read(other)


@pytest.mark.parametrize("name", ["model", "training"])
def test_stage_with_one_stale_output_is_run_again(run: Any, tmp_path: Path, name: str) -> None:
    """An attempt may be killed when only some of its outputs are published."""
    run("1")
    made = tmp_path / "volume/grpo-pipeline" / RUN_ID / "train_sft" / name
    (made / "more.txt").write_text("of an earlier attempt")
    run("2")
    assert len(CALLS) == 2


def test_partial_copy_of_an_input_is_not_used(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left by an attempt that was killed while it copied."""

    def die(_: Path, partial: Path) -> None:
        partial.write_text("{")
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", die)
        with pytest.raises(KilledError):
            run("1")
    run("2")
    assert lineage.digest(CALLS[0]) == lineage.digest(tmp_path / "problems")


def test_copy_of_an_input_can_be_changed_by_the_group_alone(run: Any, tmp_path: Path) -> None:
    """Whatever modes Kubeflow's launcher, whose umask is 0, has given to the original."""
    deep = tmp_path / "problems" / "deep"
    deep.mkdir()
    (deep / "more.jsonl").write_text("{}\n")
    for path in (deep.parent, *deep.parent.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    run()
    copied = {path: stat.S_IMODE(path.stat().st_mode) for path in (CALLS[0], *CALLS[0].rglob("*"))}
    assert copied == {path: 0o775 if path.is_dir() else 0o664 for path in copied}
    assert len(copied) == 4


def test_missing_volume_is_reported(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written to a folder that no other pod shares."""
    (tmp_path / "volume").rmdir()
    with pytest.raises(SystemExit, match="2"):
        run()
    assert "does this pod mount the shared volume?" in capsys.readouterr().err
