"""Running a stage: outputs all or none, one line for what went wrong, and the exit code that says what to do."""

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

from components.shared import environment, lineage, task
from components.shared.config import Config, Operational
from components.shared.errors import DataRejectedError, GateMissedError, PipelineError, RetryableError
from components.shared.stage import Stage, run
from components.shared.work import WorkFolder

_ROOT = Path(__file__).parents[2]
_STAGE = '''
"""A stage of its own."""
import time
from collections.abc import Callable
from pathlib import Path

from components.shared import errors
from components.shared.config import Config
from components.shared.stage import Stage, main


class CopyConfig(Config):
    """The section `copy`."""

    times: int
    failure: str = ""
    pause_s: float = 0


def copy(config: CopyConfig, *, raw_texts: Path, copies: Path, notes: Path) -> dict[str, float]:
    """Copy the texts, with notes on it.

    More about it.
    """
    for number in range(config.times):
        (copies / f"{number}.txt").write_text((raw_texts / "text.txt").read_text())
    (notes / "deep").mkdir()
    (notes / "deep/notes.txt").write_text("copied")
    time.sleep(config.pause_s)
    if config.failure:
        raise FAILURES[config.failure]
    return {"copies": float(config.times)}


main(Stage("copy", copy, CopyConfig, ("raw_texts",), ("copies", "notes")))
'''
_FAILURES = """{
    "data": errors.PipelineError("copy: text.txt:3: is upside down"),
    "rejected": errors.DataRejectedError("too few texts"),
    "gate": errors.GateMissedError("the gate is missed"),
    "retry": errors.RetryableError("a peer was lost"),
    "disk": OSError(28, "No space left on device"),
    "share": OSError(116, "Stale file handle", "/shared/text.txt"),
    "file": FileNotFoundError(2, "No such file or directory", "/a/text.txt"),
    "rust": ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "memory": MemoryError(),
    "bug": ValueError("unexpected"),
    "silent": OSError("a bug that looks like it came from the system"),
}"""


class _NoConfig(Config):
    seed: int = 0


def _write(config: _NoConfig, *, first: Path, second: Path) -> dict[str, float]:
    """Fill two folders."""
    (first / "a.txt").write_text("new")
    (second / "b.txt").write_text("new")
    return {"files": 2.0}


def _write_and_fail(config: _NoConfig, *, first: Path, second: Path) -> dict[str, float]:
    """Fill two folders, then fail."""
    _write(config, first=first, second=second)
    raise PipelineError("out of ink")


def _write_and_reject(config: _NoConfig, *, first: Path, second: Path) -> dict[str, float]:
    """Fill two folders, then refuse what they say."""
    _write(config, first=first, second=second)
    raise DataRejectedError("all of it is wrong")


def _interrupted(config: _NoConfig, *, first: Path, second: Path) -> dict[str, float]:
    """Fill two folders until somebody presses Ctrl-C."""
    _write(config, first=first, second=second)
    raise KeyboardInterrupt


def _remember_input(config: _NoConfig, *, source: Path, first: Path) -> dict[str, float]:
    """Fill one folder from another."""
    (first / "a.txt").write_text((source / "a.txt").read_text())
    return {}


def _files(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, with its text; lineage only by name."""
    return {
        path.relative_to(folder).as_posix(): "" if path.name == lineage.FILE_NAME else path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


Function = Callable[..., dict[str, float]]


def _stage(function: Function, name: str = "write") -> Stage:
    return Stage(name, function, _NoConfig, inputs=(), outputs=("first", "second"))


def _run(function: Function, folder: Path, seed: int = 0) -> dict[str, float]:
    folders = {"first": folder / "out/first", "second": folder / "second"}
    return run(_stage(function), _NoConfig(seed=seed), folders)


def _run_on(function: Function, name: str, source: Path, first: Path) -> dict[str, float]:
    stage = Stage(name, function, _NoConfig, ("source",), ("first",))
    return run(stage, _NoConfig(), {"source": source, "first": first})


_NEW = {"out/first/a.txt": "new", "out/first/lineage.json": "", "second/b.txt": "new", "second/lineage.json": ""}


@pytest.fixture
def earlier(tmp_path: Path) -> dict[str, str]:
    """The outputs of an earlier run are there, with a file that a later one does not make."""
    for name in ("out/first", "second"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("old")
        (tmp_path / name / "old.txt").write_text("old")
        lineage.write(tmp_path / name, {})
    return _files(tmp_path)


def test_outputs_are_there_when_the_stage_is_done(tmp_path: Path) -> None:
    """With their lineage and nothing beside them; the metrics are the step's."""
    assert _run(_write, tmp_path) == {"files": 2.0}
    assert _files(tmp_path) == _NEW


def test_outputs_are_not_there_before_the_stage_is_done(tmp_path: Path) -> None:
    """Nobody can take half a folder for a whole one: the step is given other folders to fill."""
    seen: list[bool] = []

    def look(config: _NoConfig, *, first: Path, second: Path) -> dict[str, float]:
        seen.extend((first != tmp_path / "out/first", not (tmp_path / "out/first").exists()))
        return _write(config, first=first, second=second)

    _run(look, tmp_path)
    assert seen == [True, True]


def test_outputs_are_replaced_as_a_whole(tmp_path: Path, earlier: dict[str, str]) -> None:
    """No file of an earlier run stays among the new ones."""
    assert "second/old.txt" in earlier
    _run(_write, tmp_path)
    assert _files(tmp_path) == _NEW


def test_outputs_are_on_disk_before_they_count(
    tmp_path: Path, earlier: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and folder is synced, then renamed, then the name synced; only then is what it replaces removed."""
    assert earlier
    done: list[str] = []
    sync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def record_sync(descriptor: int) -> None:
        done.append("sync " + os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path))
        sync(descriptor)

    def record_rename(old: Path, new: Path) -> None:
        done.append(f"rename {new.name}")
        rename(old, new)

    def record_removal(path: Path, **options: Any) -> None:
        if path.exists():
            done.append(f"remove {path.name}")
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(shutil, "rmtree", record_removal)
    _run(_write, tmp_path)
    first, second = "out/.first.partial", ".second.partial"
    assert set(done[:6]) == {
        *(f"sync {first}{name}" for name in ("", "/a.txt", "/lineage.json")),
        *(f"sync {second}{name}" for name in ("", "/b.txt", "/lineage.json")),
    }
    assert done[6:] == [
        *("rename .first.old", "rename first", "sync out", "remove .first.old"),
        *("rename .second.old", "rename second", "sync .", "remove .second.old"),
    ]


@pytest.mark.parametrize(
    ("function", "error"),
    [(_write_and_fail, PipelineError), (_interrupted, KeyboardInterrupt)],
    ids=["error", "Ctrl-C"],
)
def test_a_stage_that_fails_leaves_nothing(tmp_path: Path, function: Function, error: type[BaseException]) -> None:
    """Neither outputs nor the folders it was filling."""
    with pytest.raises(error):
        _run(function, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out"]


def test_a_stage_that_fails_leaves_earlier_outputs_as_they_were(tmp_path: Path, earlier: dict[str, str]) -> None:
    """A good result is not lost to a bad run."""
    with pytest.raises(PipelineError, match="out of ink"):
        _run(_write_and_fail, tmp_path)
    assert _files(tmp_path) == earlier


def test_a_verdict_keeps_its_outputs_and_is_still_an_error(tmp_path: Path, earlier: dict[str, str]) -> None:
    """Whoever is refused can read why."""
    assert earlier
    with pytest.raises(DataRejectedError, match="all of it is wrong"):
        _run(_write_and_reject, tmp_path)
    assert _files(tmp_path) == _NEW


def test_what_a_killed_run_left_does_not_get_into_the_next(tmp_path: Path) -> None:
    """The half-filled folder beside the output is thrown away."""
    left = tmp_path / ".second.partial"
    left.mkdir()
    (left / "half.txt").write_text("half")
    _run(_write, tmp_path)
    assert _files(tmp_path) == _NEW


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a_file", "a_file is not a folder; name a new one"),
        ("a_link", "a_link is not a folder; name a new one"),
        ("mine", "mine has files that no stage made; name a new folder"),
        ("source", "source overlaps with the input "),  # which is a folder in it
        ("source/inside", "source/inside overlaps with the input "),
        ("x/../source", "x/../source overlaps with the input "),
    ],
)
def test_an_output_that_would_cost_something_is_refused_before_any_work(
    tmp_path: Path, output: str, message: str
) -> None:
    """What stands at a mistyped path stays there, inputs above all."""
    for name in ("source", "mine", "x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("mine")
    lineage.write(tmp_path / "source", {})
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "a_link").symlink_to(tmp_path / "mine")
    before = _files(tmp_path)

    def never(config: _NoConfig, *, source: Path, first: Path) -> dict[str, float]:
        pytest.fail("it was run")

    source = tmp_path / "source/deep" if output == "source" else tmp_path / "source"
    source.mkdir(exist_ok=True)
    with pytest.raises(PipelineError) as refused:
        run(
            Stage("write", never, _NoConfig, ("source",), ("first",)),
            _NoConfig(),
            {"source": source, "first": tmp_path / output},
        )
    assert str(refused.value).startswith(f"write: output `first`: {tmp_path}/{message}")
    assert _files(tmp_path) == before


def test_an_empty_folder_may_become_an_output(tmp_path: Path) -> None:
    """Some runners make it beforehand."""
    (tmp_path / "second").mkdir()
    _run(_write, tmp_path)
    assert _files(tmp_path) == _NEW


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_input_that_is_no_folder_is_named(tmp_path: Path, kind: str) -> None:
    """By its name and path, with what to do, before anything is made."""
    source = tmp_path / "source"
    if kind == "file":
        source.write_text("")
    with pytest.raises(PipelineError) as refused:
        run(
            Stage("write", _remember_input, _NoConfig, ("source",), ("first",)),
            _NoConfig(),
            {"source": source, "first": tmp_path / "out/first"},
        )
    assert str(refused.value) == (f"write: input `source`: {source} is not a folder; run the stage that makes it first")
    assert not (tmp_path / "out").exists()


def test_equal_inputs_give_equal_lineage(tmp_path: Path) -> None:
    """Every output has it, and neither place nor time is in it; another config or input shows."""
    for place in ("here", "there"):
        _run(_write, tmp_path / place)
    _run(_write, tmp_path / "seeded", seed=1)
    here, there, seeded = (
        (tmp_path / place / "second" / lineage.FILE_NAME).read_bytes() for place in ("here", "there", "seeded")
    )
    assert here == there != seeded
    assert (tmp_path / "here/out/first" / lineage.FILE_NAME).read_bytes() == here
    made = json.loads(seeded)
    assert (made["stage"], made["config"], made["inputs"]) == ("write", {"seed": 1}, {})


def test_lineage_holds_what_went_in(tmp_path: Path) -> None:
    """The digest of each input folder and the lineage it came with."""
    _run(_write, tmp_path)
    source = tmp_path / "out/first"
    run(
        Stage("next", _remember_input, _NoConfig, ("source",), ("first",)),
        _NoConfig(),
        {"source": source, "first": tmp_path / "third"},
    )
    made = lineage.read(tmp_path / "third")
    assert made
    assert made["inputs"] == {"source": {"digest": lineage.digest(source), "lineage": lineage.read(source)}}


def test_the_journal_tells_when_a_stage_started_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line per event, with the folders to come, and the seconds and metrics at the end."""
    monkeypatch.setenv(environment.JOURNAL_VARIABLE, str(tmp_path / "journal.jsonl"))
    _run(_write, tmp_path)
    started, finished = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    folders = {"first": str(tmp_path / "out/first"), "second": str(tmp_path / "second")}
    assert started == {"stage": "write", "event": "started", "outputs": folders}
    assert finished.pop("seconds") >= 0
    assert finished == {"stage": "write", "event": "finished", "metrics": {"files": 2.0}}


def test_a_task_takes_plain_values_and_folders(tmp_path: Path) -> None:
    """As Kubeflow hands them over: a whole float for an integer, paths as text."""
    folders = {"first": str(tmp_path / "out/first"), "second": str(tmp_path / "second")}
    assert task.run_task(_stage(_write), {"seed": 3.0}, **folders) == {"files": 2.0}
    made = lineage.read(tmp_path / "second")
    assert made
    assert made["config"] == {"seed": 3}


def test_a_task_ends_like_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and the exit code, also for a config that does not lock_folder."""
    folders = {"first": str(tmp_path / "out/first"), "second": str(tmp_path / "second")}
    with pytest.raises(SystemExit) as ended:
        task.run_task(_stage(_write), {"sed": 3.0}, **folders)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: write: write.sed: unknown key; did you mean `seed`?\n"


class _LongConfig(Config):
    num_steps: int = 3
    seed: int = 0
    num_processes: Annotated[int, Operational] = 1


def _long(failure: BaseException | None, seen: list[Path]) -> Function:
    """A step that writes down how far it has come, and goes on from there."""

    def train(config: _LongConfig, *, source: Path, model: Path, work: Path) -> dict[str, float]:
        seen.append(work)
        begun = len(list(work.glob("*.txt")))
        for number in range(begun, config.num_steps):
            (work / f"{number}.txt").write_text("reached")
        (model / "weights.txt").write_text("trained")
        if failure is not None:
            raise failure
        return {"begun": float(begun)}

    return train


def _long_stage(function: Function, name: str = "train") -> Stage:
    return Stage(name, function, _LongConfig, ("source",), ("model",), has_work=True)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where unfinished work is kept; the input of the long step is there."""
    monkeypatch.setenv(environment.WORK_VARIABLE, str(tmp_path / "work"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source/text.txt").write_text("text")
    return tmp_path / "work"


def _train(folder: Path, failure: BaseException | None = None, *, name: str = "train", **config: int) -> Path:
    """Run the long step and return its folder of unfinished work."""
    seen: list[Path] = []
    folders = {"source": folder / "source", "model": folder / "out/model"}
    run(_long_stage(_long(failure, seen), name), _LongConfig(**config), folders)
    return seen[0]


def _unfinished(work: Path) -> list[Path]:
    """The folders of unfinished work."""
    return [path for path in work.glob("*/*") if path.is_dir()]


def _begun(folder: Path, *, name: str = "train", **config: int) -> float:
    """How many steps an unfinished run had left for one with this config."""
    folders = {"source": folder / "source", "model": folder / "out/model"}
    return run(_long_stage(_long(None, []), name), _LongConfig(**config), folders)["begun"]


@pytest.mark.parametrize(
    "error",
    [
        PipelineError("out of ink"),
        RetryableError("a peer was lost"),
        KeyboardInterrupt(),
        SystemExit(75),
        OSError(28, "No space left on device"),
    ],
    ids=["error", "retryable", "Ctrl-C", "exit", "disk"],
)
def test_unfinished_work_is_kept_until_the_stage_has_finished(tmp_path: Path, work: Path, error: BaseException) -> None:
    """However it failed, the next run finds it; once the outputs stand it is gone, and so is the lock."""
    with pytest.raises(PipelineError if isinstance(error, OSError) else type(error)):
        _train(tmp_path, error)
    assert not (tmp_path / "out/model").exists()
    assert _begun(tmp_path) == 3
    assert _files(tmp_path / "out") == {"model/weights.txt": "trained", "model/lineage.json": ""}
    assert _unfinished(work) == []
    assert _begun(tmp_path) == 0


def test_a_verdict_finishes_the_work(tmp_path: Path, work: Path) -> None:
    """Its outputs stand: there is nothing to go on with."""
    with pytest.raises(DataRejectedError):
        _train(tmp_path, DataRejectedError("all of it is wrong"))
    assert (tmp_path / "out/model/weights.txt").exists()
    assert _unfinished(work) == []


def test_work_is_kept_where_the_outputs_cannot_be_put_in_place(tmp_path: Path, work: Path) -> None:
    """Hours of work do not go for a file that is in the way."""
    _train(tmp_path)
    in_the_way = tmp_path / "out/.model.old"
    in_the_way.touch()
    with pytest.raises(OSError, match=r"\.model\.old"):
        _train(tmp_path)
    assert len(_files(work)) > 1
    in_the_way.unlink()
    assert _begun(tmp_path) == 3


def test_the_place_of_unfinished_work(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stage and key, below the folder that the environment names, else outputs/work."""
    named = _train(tmp_path)
    assert named.parent == work / "train"
    assert re.fullmatch("[0-9a-f]{16}", named.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.WORK_VARIABLE, "")
    assert _train(tmp_path) == Path("outputs/work/train") / named.name
    monkeypatch.delenv(environment.WORK_VARIABLE)
    assert _train(tmp_path) == Path("outputs/work/train") / named.name


def test_who_may_go_on_from_unfinished_work(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same stage with the same config, inputs and code; with how many processes, and where, does not matter."""
    with pytest.raises(PipelineError):
        _train(tmp_path, PipelineError("out of ink"))
    assert _begun(tmp_path, seed=1) == 0
    assert _begun(tmp_path, name="tune") == 0
    (tmp_path / "source/text.txt").write_text("TEXT")
    assert _begun(tmp_path) == 0
    (tmp_path / "source/text.txt").write_text("text")
    with monkeypatch.context() as changed:
        changed.setattr(lineage, "code_digest", lambda: "another loss")
        assert _begun(tmp_path) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "source").rename(tmp_path / "elsewhere/source")
    lineage.write(tmp_path / "elsewhere/source", {"stage": "made again by another version"})
    assert len(_files(work)) > 1
    assert _begun(tmp_path / "elsewhere", num_processes=8) == 3


def test_inputs_are_read_once_for_key_and_lineage(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be hundreds of gigabytes of weights."""
    digest, digested = lineage.digest, list[Path]()

    def record(path: Path) -> str:
        digested.append(path)
        return digest(path)

    monkeypatch.setattr(lineage, "digest", record)
    assert _train(tmp_path).is_relative_to(work)
    assert digested == [tmp_path / "source"]


def test_what_a_run_killed_at_its_very_end_left_is_removed(tmp_path: Path, work: Path) -> None:
    """Work that was being taken away is no work, and does not stay."""
    left = work / "train/.0123456789abcdef.removed"
    left.mkdir(parents=True)
    (left / "0.txt").write_text("reached")
    assert _begun(tmp_path) == 0
    assert _unfinished(work) == []


def test_a_step_without_work_leaves_no_trace_of_it(tmp_path: Path, work: Path) -> None:
    """Most stages take seconds."""
    _run(_write, tmp_path)
    assert not work.exists()


_LONG_STAGE = '''
import time
from pathlib import Path

from components.shared.config import Config
from components.shared.stage import Stage, main


class TrainConfig(Config):
    """How long it takes."""


def train(config: TrainConfig, *, source: Path, model: Path, work: Path) -> dict[str, float]:
    """Train until the input says that it is enough."""
    with (source.parent / "calls").open("a") as calls:
        calls.write(".")
    (model / "weights.txt").write_text(f"{len(list(work.glob('*.txt')))} found")
    (work / "0.txt").write_text("reached")
    deadline = time.monotonic() + 30
    while not (source.parent / "enough").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"loss": 0.25}


main(Stage("train", train, TrainConfig, ("source",), ("model",), has_work=True))
'''


class _LongStage:
    """A stage with unfinished work, as a command that runs until there is a file `enough`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stage.py").write_text(_LONG_STAGE)
        (folder / "params.yaml").write_text("train: {}")
        (folder / "source").mkdir()

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start the command."""
        command = [sys.executable, "stage.py", "--source", "source", *options]
        variables = {name: value for name, value in os.environ.items() if name != environment.WORK_VARIABLE}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**variables, "PYTHONPATH": str(_ROOT), environment.JOURNAL_VARIABLE: "journal.jsonl"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def work(self) -> Path:
        """The folder of unfinished work, relative to the project's."""
        (found,) = _unfinished(self.folder / "outputs/work")
        return found.relative_to(self.folder)

    def journal(self) -> list[dict[str, Any]]:
        """What all starts have written down."""
        return [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]


def test_a_work_folder_is_no_option(tmp_path: Path) -> None:
    """Nobody has to name it, and nobody can."""
    with _LongStage(tmp_path).start("--help") as shown:
        text, _ = shown.communicate(timeout=60)
    assert "--source" in text
    assert "checkpoints" not in text


def _waiting(stage: _LongStage, first: subprocess.Popen[str], second: subprocess.Popen[str]) -> None:
    """Return once the second run has said for whom it waits."""
    assert second.stdout is not None
    holder = f"process {first.pid} on {platform.node()}"
    expected = f"train: {stage.work()} is in use by {holder}, which does the same work; waiting to take its result\n"
    assert second.stdout.readline() == expected


def test_a_run_waits_for_another_of_the_same_work_and_takes_its_result(tmp_path: Path) -> None:
    """The step is run once; outputs, wherever they are to be, are the same to the last byte, and so are metrics."""
    stage = _LongStage(tmp_path)
    with stage.start("--model", "model") as first:
        _wait_for(tmp_path / ".model.partial/weights.txt")
        with stage.start("--model", "deep/another") as second:
            _waiting(stage, first, second)
            assert not list(tmp_path.glob("deep"))
            (tmp_path / "enough").touch()
            output, error = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), error
    assert output == "train: the other run has finished; this one has the same result\n"
    assert _files(tmp_path / "model") == _files(tmp_path / "deep/another")
    assert lineage.read(tmp_path / "model") == lineage.read(tmp_path / "deep/another")
    assert (tmp_path / "calls").read_text() == "."
    finished = [line for line in stage.journal() if line["event"] == "finished"]
    assert [line["metrics"] for line in finished] == [{"loss": 0.25}, {"loss": 0.25}]
    assert _unfinished(tmp_path / "outputs/work") == []


def test_a_run_that_waits_goes_on_where_a_killed_one_was(tmp_path: Path) -> None:
    """Nothing of what that one has done is lost."""
    stage = _LongStage(tmp_path)
    with stage.start("--model", "model") as first:
        _wait_for(tmp_path / ".model.partial/weights.txt")
        with stage.start("--model", "another") as second:
            _waiting(stage, first, second)
            first.kill()
            (tmp_path / "enough").touch()
            assert second.communicate(timeout=60) == ("", "")
    assert second.returncode == 0
    assert (tmp_path / "another/weights.txt").read_text() == "1 found"
    assert _unfinished(tmp_path / "outputs/work") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_ends_at_once_when_it_is_told_to(tmp_path: Path, number: int) -> None:
    """It leaves nothing, and the other run goes on."""
    stage = _LongStage(tmp_path)
    with stage.start("--model", "model") as first:
        _wait_for(tmp_path / ".model.partial/weights.txt")
        with stage.start("--model", "another") as second:
            _waiting(stage, first, second)
            second.send_signal(number)
            _, error = second.communicate(timeout=60)
        told = f"error: train: told to stop while it waited for {stage.work()}; run the same again\n"
        expected = (130, "") if number == signal.SIGINT else (RetryableError.exit_code, told)
        assert (second.returncode, error) == expected
        assert not list(tmp_path.glob("*another*"))
        (tmp_path / "enough").touch()
        assert first.communicate(timeout=60) == ("", "")
    assert first.returncode == 0


def test_a_result_that_was_replaced_or_removed_is_not_taken(tmp_path: Path, work: Path) -> None:
    """A run that has waited then does the work itself."""
    with pytest.raises(RetryableError):
        _train(tmp_path, RetryableError("a peer was lost"))
    _train(tmp_path)
    (result,) = work.glob("train/*.json")
    waited = WorkFolder("train", result.with_suffix(""), waited=True)
    aside = tmp_path / "aside"
    aside.mkdir()
    assert waited.take({"model": aside}) == {"begun": 3.0}
    assert _files(aside) == _files(tmp_path / "out/model")
    assert WorkFolder("train", result.with_suffix(""), waited=False).take({"model": aside}) is None
    assert waited.take({"another": aside}) is None
    lineage.write(tmp_path / "out/model", {"stage": "train", "config": {"seed": 7}})
    assert waited.take({"model": aside}) is None
    shutil.rmtree(tmp_path / "out/model")
    assert waited.take({"model": aside}) is None
    with pytest.raises(RetryableError):
        _train(tmp_path, RetryableError("a peer was lost"))
    assert not result.exists(), "the result is not that of the run before the last"


@pytest.fixture
def unfinished(tmp_path: Path, work: Path) -> Path:
    """What a run with seed 0 has left after step 40."""
    seen: list[Path] = []
    folders = {"source": tmp_path / "source", "model": tmp_path / "out/model"}
    with pytest.raises(PipelineError):
        run(_long_stage(_long(PipelineError("out of ink"), seen)), _LongConfig(), folders)
    (seen[0] / "checkpoints/step-000040").mkdir(parents=True)
    return seen[0]


ADVICE = (
    "train: this run begins at the first step; to go on with unfinished work restore what differs and start again, "
    "to discard it delete its folder\n"
)


def test_unfinished_work_of_another_config_is_not_passed_over_in_silence(
    tmp_path: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder, its step and each key with both values are named; a key that changes nothing is none of them."""
    assert _begun(tmp_path, seed=1, num_steps=4, num_processes=8) == 0
    line = f"train: {unfinished}: unfinished work, after step 40, is left: "
    assert capsys.readouterr().out == f"{line}train.num_steps: 3 -> 4; train.seed: 0 -> 1\n{ADVICE}"
    assert _begun(tmp_path, num_processes=8) == 3
    assert capsys.readouterr().out == ""


def test_unfinished_work_of_other_code_and_inputs_is_named_too(
    tmp_path: Path, unfinished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the files of code, and the name of the input."""
    (tmp_path / "source/text.txt").write_text("TEXT")
    files = lineage.code_files()
    monkeypatch.setattr(lineage, "code_files", lambda: {**files, "train_grpo/loss.py": "another", "new.py": "new"})
    assert _begun(tmp_path) == 0
    line = f"train: {unfinished}: unfinished work, after step 40, is left: "
    expected = "the input `source`; the code of components/new.py, components/train_grpo/loss.py"
    assert capsys.readouterr().out == f"{line}{expected}\n{ADVICE}"


def test_of_much_unfinished_work_the_latest_is_named(
    tmp_path: Path, unfinished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of many files the first; the others are counted."""
    for number in range(1, 4):
        with pytest.raises(PipelineError):
            _train(tmp_path, PipelineError("out of ink"), seed=number)
    for other in _unfinished(unfinished.parents[1]):
        (other / "checkpoints/step-000001").mkdir(parents=True)
    (unfinished / "fingerprint.json").unlink()
    os.utime(unfinished, (4e9, 4e9))
    files = lineage.code_files()
    monkeypatch.setattr(lineage, "code_files", lambda: {**files, **dict.fromkeys("abcde", "")})
    capsys.readouterr()
    _begun(tmp_path)
    newest, *named, more, advice = capsys.readouterr().out.splitlines()
    assert newest.endswith("after step 40, is left: what it was made from is not known")
    assert all(line.endswith("the code of components/a, components/b, components/c and 2 more files") for line in named)
    assert len(named) == 2
    assert more.endswith("/work/train: unfinished work is in 1 more of its folders")
    assert f"{advice}\n" == ADVICE


def test_work_that_another_run_is_at_is_not_called_unfinished(
    tmp_path: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not given up by anybody."""
    holding = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(unfinished / "run.lock")], cwd=_ROOT, stdin=subprocess.PIPE, stdout=-1
    )
    with holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == b"held\n"
        assert _begun(tmp_path, seed=1) == 0
        holding.kill()
    assert capsys.readouterr().out == ""


_HOLD = """
import sys
from collections.abc import Callable
from pathlib import Path
from components.shared.durable import lock_folder
held = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


class _Stage:
    """The stage above as a command, with its input and params."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stage.py").write_text(_STAGE.replace("FAILURES", _FAILURES))
        (folder / "raw").mkdir()
        (folder / "raw/text.txt").write_text("text")

    @property
    def command(self) -> list[str]:
        """What a person types."""
        options = ["--params", "params.yaml", "--raw-texts", "raw", "--copies", "out/copies", "--notes", "out/notes"]
        return [sys.executable, "stage.py", *options]

    @property
    def environment(self) -> dict[str, str]:
        """The project's code, and a journal."""
        return {**os.environ, "PYTHONPATH": str(_ROOT), environment.JOURNAL_VARIABLE: "journal.jsonl"}

    def use(self, **config: Any) -> None:
        """Write the params."""
        (self.folder / "params.yaml").write_text(json.dumps({"copy": {"times": 2, **config}}))

    def run(self, *command: str, **config: Any) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        self.use(**config)
        return subprocess.run(
            command or self.command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def outputs(self) -> dict[str, bytes]:
        """Every file that it has made, byte for byte."""
        folder = self.folder / "out"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def journal(self) -> list[dict[str, Any]]:
        """What it has written down."""
        return [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]


@pytest.fixture
def stage(tmp_path: Path) -> _Stage:
    """A command that has not been run."""
    return _Stage(tmp_path)


def test_a_step_is_a_command_with_an_option_per_folder(stage: _Stage) -> None:
    """The options are the function's parameters, the description its first line."""
    shown = stage.run(sys.executable, "stage.py", "--help")
    assert shown.returncode == 0
    for text in ("python -m components.copy", "--params", "--raw-texts", "--copies", "--notes", "input folder"):
        assert text in shown.stdout
    assert "Copy the texts, with notes on it." in shown.stdout
    assert "More about it." not in shown.stdout
    done = stage.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert set(stage.outputs()) == {
        *("copies/0.txt", "copies/1.txt", "copies/lineage.json"),
        *("notes/deep/notes.txt", "notes/lineage.json"),
    }


def test_an_option_left_out_is_named(stage: _Stage) -> None:
    """All folders must be given; the params file is params.yaml unless another one is."""
    done = stage.run(*stage.command[:-2])
    assert done.returncode == 2
    assert "the following arguments are required: --notes" in done.stderr
    without_params = [*stage.command[:2], *stage.command[4:]]
    assert stage.run(*without_params).returncode == 0


@pytest.mark.parametrize(
    ("failure", "exit_code", "line"),
    [
        ("data", 2, "copy: text.txt:3: is upside down"),
        ("rejected", 2, "copy: too few texts"),
        ("gate", GateMissedError.exit_code, "copy: the gate is missed"),
        ("retry", RetryableError.exit_code, "copy: a peer was lost"),
        ("share", RetryableError.exit_code, "copy: /shared/text.txt: stale file handle"),
        ("file", 2, "copy: /a/text.txt: no such file or directory"),
        ("memory", 2, "copy: not enough memory for this stage"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(stage: _Stage, failure: str, exit_code: int, line: str) -> None:
    """2 is for correcting something, 3 for a missed gate, 75 for another try; the journal has both."""
    assert (GateMissedError.exit_code, RetryableError.exit_code) == (3, 75)
    done = stage.run(failure=failure)
    assert (done.returncode, done.stderr, done.stdout) == (exit_code, f"error: {line}\n", "")
    failed = stage.journal()[-1]
    assert (failed["event"], failed["exit_code"]) == ("failed", exit_code)
    assert failed["error"].removeprefix("copy: ") == line.removeprefix("copy: ")
    assert bool(stage.outputs()) == (failure == "rejected")


@pytest.mark.parametrize("failure", ["disk", "rust"])
def test_a_full_disk_is_named_with_what_is_on_it(stage: _Stage, failure: str) -> None:
    """Where the system says no path, it is that of the output on the fullest disk, with what is written and free."""
    done = stage.run(failure=failure)
    path = r"(/\S+|out/\.(notes|copies)\.partial)"
    line = (
        rf"error: copy: {path}: no space left on device: [\d,]+ bytes are in {path} so far, [\d,]+ are free; make room"
    )
    assert re.match(line, done.stderr)
    assert (done.returncode, stage.outputs()) == (2, {})


def test_a_disk_for_outputs_that_is_full_is_named(tmp_path: Path) -> None:
    """Not the one with the temporary files, on which there is room."""
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    stage = _Stage(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "raw/text.txt").write_bytes(bytes(100_000))
    script = f"mount -t tmpfs -o size=400k tmpfs {tmp_path}/out && exec {shlex.join(stage.command)}"
    done = stage.run(*own, "sh", "-c", script, times=9)
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip(f"mounting in a namespace of its own is not permitted here: {done.stderr.strip()}")
    line = (
        r"error: copy: \S*out/\.copies\.partial\S*: no space left on device: (4|3)\d\d,\d{3} bytes are in out/\.copies"
    )
    assert re.match(line, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("failure", "error"),
    [("bug", "ValueError: unexpected"), ("silent", "OSError: a bug that looks like it came from the system")],
)
def test_a_bug_keeps_its_traceback(stage: _Stage, failure: str, error: str) -> None:
    """What nobody foresaw is not dressed up as a mistake of the user's; it leaves nothing either."""
    done = stage.run(failure=failure)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith(f"\n{error}\n")
    assert stage.outputs() == {}


def test_a_journal_that_cannot_be_written_does_not_hide_the_error(stage: _Stage) -> None:
    """It may lie on the very disk that is full."""
    code = "import os; from pathlib import Path\n"
    script = stage.folder / "stage.py"
    # The journal's place is taken from it while the stage runs.
    spoil = "    Path('journal.jsonl').unlink(); Path('journal.jsonl').mkdir()\n    if config.failure:"
    script.write_text(code + script.read_text().replace("    if config.failure:", spoil))
    done = stage.run(failure="data")
    assert (done.returncode, done.stderr) == (2, "error: copy: text.txt:3: is upside down\n")


def test_a_run_after_a_kill_gives_what_an_undisturbed_run_gives(stage: _Stage) -> None:
    """SIGKILL in the middle leaves no output; the next run leaves the same bytes, and nothing of the first."""
    stage.run()
    undisturbed = stage.outputs()
    for name in ("copies", "notes"):
        (stage.folder / "out" / name).rename(stage.folder / f"kept_{name}")
    stage.use(times=3, pause_s=60)
    with subprocess.Popen(stage.command, cwd=stage.folder, env=stage.environment) as process:
        _wait_for(stage.folder / "out/.notes.partial/deep/notes.txt")
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in (stage.folder / "out").iterdir() if not path.name.startswith(".")] == []
    assert stage.run().returncode == 0
    assert stage.outputs() == undisturbed


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not been made"
        time.sleep(0.02)
