"""Running a stage: all outputs or none, one line for an error, and the exit code that says what to do."""

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from components.cluster import task as cluster_task
from components.shared import durable, environment, lineage
from components.shared import stage as contract
from components.shared.config import Config
from components.shared.environment import CLUSTER_VARIABLE
from components.shared.errors import (
    DataRejectedError,
    GateMissedError,
    PipelineError,
    RetriesExhaustedError,
    RetryableError,
)
from components.shared.execution import person
from components.shared.stage import PAUSES_S, Stage, main, run, with_retries
from components.shared.task import run_task
from tests.lineages import made

_Command = Callable[..., None]
_Output = pytest.CaptureFixture[str]
_Patch = pytest.MonkeyPatch
_NEW = {"out/first/a.txt": "new", "out/first/lineage.json": "", "second/b.txt": "new", "second/lineage.json": ""}


class CopyConfig(Config):
    """The section `copy`."""

    seed: int = 0


def _stage(then: Callable[[], object] | BaseException = lambda: None) -> Stage:
    """A stage that fills its outputs and then does something else, or fails."""

    def copy(config: CopyConfig, *, source: Path, first: Path, second: Path) -> dict[str, float]:
        """Copy a text, twice."""
        (first / "a.txt").write_text((source / "text.txt").read_text())
        (second / "b.txt").write_text("new")
        if isinstance(then, BaseException):
            raise then
        then()
        return {"files": 2.0}

    return Stage("copy", copy, CopyConfig, {"source": "write/text"}, ("first", "second"))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """The folders of the stage; its input is there."""
    source = _folder(tmp_path / "source", "text.txt", "new")
    return {"source": source, "first": tmp_path / "out/first", "second": tmp_path / "second"}


def _folder(path: Path, name: str, text: str) -> Path:
    path.mkdir(parents=True)
    (path / name).write_text(text)
    return path


@pytest.fixture
def earlier(tmp_path: Path, folders: dict[str, Path]) -> dict[str, str]:
    """The outputs of an earlier run, with a file that a later one does not write."""
    for name in ("first", "second"):
        lineage.write(_folder(folders[name], "old.txt", "old"), made("copy"))
    return _files(tmp_path)


def _files(folder: Path) -> dict[str, str]:
    """Every file below a folder but the source, hidden ones too, with its text; lineage only by name."""
    return {
        name: "" if path.name == lineage.FILE_NAME else path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not (name := path.relative_to(folder).as_posix()).startswith("source/")
    }


@pytest.mark.usefixtures("earlier")
def test_outputs_replace_earlier_ones_when_the_stage_is_done(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Not before, and as a whole: no file of an earlier or a killed run stays among the new ones."""
    _folder(tmp_path / ".second.partial", "half.txt", "half")
    during: list[bool] = []
    stage = _stage(lambda: during.append((tmp_path / "second/old.txt").exists()))
    assert run(stage, CopyConfig(), folders) == {"files": 2.0}
    assert during == [True]
    assert _files(tmp_path) == _NEW


def test_every_file_is_on_disk_before_an_output_is_renamed(folders: dict[str, Path], monkeypatch: _Patch) -> None:
    """All outputs are synced first, then each is renamed."""
    calls = Mock()
    for name in ("sync_tree", "replace"):
        monkeypatch.setattr(durable, name, Mock(wraps=getattr(durable, name)))
        calls.attach_mock(getattr(durable, name), name)
    run(_stage(), CopyConfig(), folders)
    done = [f"{call[0]} {call.args[0].name}" for call in calls.mock_calls]
    assert done == ["sync_tree .first.partial", "sync_tree .second.partial", "replace first", "replace second"]


@pytest.mark.parametrize("error", [PipelineError("out of ink"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_failed_stage_leaves_earlier_outputs_unchanged(
    tmp_path: Path, folders: dict[str, Path], earlier: dict[str, str], error: BaseException
) -> None:
    """And nothing of its own; without earlier outputs it leaves nothing at all."""
    with pytest.raises(type(error)):
        run(_stage(error), CopyConfig(), folders)
    assert _files(tmp_path) == earlier


@pytest.mark.usefixtures("earlier")
def test_a_verdict_keeps_its_outputs_and_is_still_an_error(tmp_path: Path, folders: dict[str, Path]) -> None:
    """A person whose data are rejected can read why."""
    with pytest.raises(DataRejectedError, match="all of it is wrong"):
        run(_stage(DataRejectedError("all of it is wrong")), CopyConfig(), folders)
    assert _files(tmp_path) == _NEW


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a_file", "a_file is not a folder; name a new one"),
        ("a_link", "a_link is not a folder; name a new one"),
        ("mine", "mine has files that no stage made; name a new folder"),
        ("mine/../outside", "mine/../outside overlaps with the input "),  # which is a folder in it
        ("outside/source/in", "outside/source/in overlaps with the input "),
    ],
)
def test_an_output_that_would_destroy_something_is_refused_first(tmp_path: Path, output: str, message: str) -> None:
    """Files at a mistyped path stay there, inputs above all."""
    source = tmp_path / "outside/source"
    for folder in (source, tmp_path / "mine"):
        _folder(folder, "a.txt", "mine")
    lineage.write(tmp_path / "outside", made("copy"))
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "a_link").symlink_to(tmp_path / "mine")
    before = _files(tmp_path)
    folders = {"source": source, "first": tmp_path / output, "second": tmp_path / "new"}
    with pytest.raises(PipelineError) as refused:
        run(_stage(lambda: pytest.fail("it was run")), CopyConfig(), folders)
    assert str(refused.value).startswith(f"copy: output `first`: {tmp_path}/{message}")
    assert _files(tmp_path) == before


def test_an_input_that_is_missing_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    """With its name, its path and what to do; an empty output folder, which some runners make, is accepted."""
    folders["second"].mkdir()
    run(_stage(), CopyConfig(), folders)
    source = tmp_path / "source/text.txt"
    with pytest.raises(PipelineError) as refused:
        run(_stage(), CopyConfig(), {**folders, "source": source})
    assert str(refused.value) == f"copy: input `source`: {source} is not a folder; run the stage that makes it first"


def test_equal_runs_have_equal_lineage(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Every output has it: config and each input with its own lineage; only the runs tell who made it, and when."""
    raw = made("raw")
    lineage.write(folders["source"], raw)
    for place in ("here", "there"):
        outputs = {name: tmp_path / place / name for name in ("first", "second")}
        run(_stage(), CopyConfig(seed=1), {**folders, **outputs})
    first, here, there = (lineage.read(tmp_path / place) for place in ("here/first", "here/second", "there/second"))
    assert here
    assert there
    assert first == here != there
    assert here.model_dump(exclude={"runs"}) == there.model_dump(exclude={"runs"})
    assert (here.work.stage, here.work.config) == ("copy", {"seed": 1})
    source = here.work.inputs["source"]
    assert (source.digest, here.maker(source)) == (lineage.digest(folders["source"]), raw.work)
    (its_run,) = here.runs
    assert its_run.started <= its_run.finished < datetime.now(UTC)
    assert its_run.by == person()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of a run."""
    monkeypatch.setenv(environment.JOURNAL_VARIABLE, str(tmp_path / "journal.jsonl"))
    return tmp_path / "journal.jsonl"


@pytest.fixture
def command(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a stage as a person does from the command line."""

    def run_command(stage: Stage, *options: str) -> None:
        place = folders["source"].parent
        (place / "params.yaml").write_text("copy: {seed: 1}")
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["copy", "--source", "source", "--first", "out/first", *options])
        main(stage)

    return run_command


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (PipelineError("copy: text.txt:3: is upside down"), 2, "text.txt:3: is upside down"),
        (GateMissedError("the gate is missed"), 3, "the gate is missed"),
        (RetryableError("a peer was lost"), 75, "a peer was lost"),
        (OSError(116, "Stale file handle", "/shared/text.txt"), 75, "/shared/text.txt: stale file handle"),
        (FileNotFoundError(2, "No such file", "/a/text.txt"), 2, "/a/text.txt: no such file or directory"),
        (MemoryError(), 2, "not enough memory for this stage"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_is_one_line_and_an_exit_code(
    command: _Command, journal: Path, capsys: _Output, error: Exception, exit_code: int, line: str
) -> None:
    """2: correct something, 3: a missed gate, 75: try again. The journal has it too, unless its disk is full."""
    with pytest.raises(SystemExit) as ended:
        command(_stage(error), "--second", "second")
    assert ended.value.code == exit_code
    assert capsys.readouterr() == ("", f"error: copy: {line}\n")
    started, failed = map(json.loads, journal.read_text().splitlines())
    assert started == {"stage": "copy", "event": "started", "outputs": {"first": "out/first", "second": "second"}}
    assert failed == {"stage": "copy", "event": "failed", "error": line, "exit_code": exit_code}
    journal.unlink()
    journal.mkdir()  # it cannot be written any more
    with pytest.raises(SystemExit, match=str(exit_code)):
        command(_stage(error), "--second", "second")


@pytest.mark.parametrize("error", [ValueError("unexpected"), OSError("without a number")])
def test_a_bug_keeps_its_traceback(command: _Command, error: Exception) -> None:
    """It is not disguised as a mistake of the user."""
    with pytest.raises(type(error), match=str(error)):
        command(_stage(error), "--second", "second")


@pytest.mark.parametrize(
    ("error", "last_lines"),
    [
        (
            PipelineError(f"no learning signal {'in 30 ' * 9}steps (reward 0). Train on other problems; do not repeat"),
            [
                f"error: copy: no learning signal {'in 30 ' * 6}in",
                "  30 in 30 in 30 steps (reward 0).",
                "  Train on other problems;",
                "  do not repeat",
            ],
        ),
        (
            ValueError("unexpected"),
            ["error: copy: ValueError: unexpected;", "  this looks like a bug: its traceback is above"],
        ),
    ],
)
def test_the_log_of_a_failed_task_ends_with_the_reason(
    command: _Command, capsys: _Output, monkeypatch: _Patch, error: Exception, last_lines: list[str]
) -> None:
    """What, why and what to do begin on lines of their own, none wider than the log window of Kubeflow's page."""
    monkeypatch.setenv(CLUSTER_VARIABLE, "10.0.0.1")
    with pytest.raises(SystemExit):
        command(_stage(error), "--second", "second")
    assert capsys.readouterr().err.splitlines()[-len(last_lines) :] == last_lines


def test_a_full_disk_is_named_with_what_is_on_it(folders: dict[str, Path]) -> None:
    """Where the system names no file: the fullest folder, what is written there and what is free."""
    path = r"(/\S+|\S*/\.(first|second)\.partial)"
    message = rf"^{path}: no space left on device: [\d,]+ bytes are in {path} so far, [\d,]+ are free; make room"
    of_safetensors = ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    for error in (OSError(28, "No space left on device"), of_safetensors):
        with pytest.raises(PipelineError, match=message):
            run(_stage(error), CopyConfig(), folders)


_BUSY = RetryableError("the server is busy")
_STALE = OSError(errno.ESTALE, "Stale file handle", "/work/x")


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Be in a pod of Kubeflow, with the umask of Argo's tasks."""
    monkeypatch.setenv(environment.POD_VARIABLE, "launcher-1")
    monkeypatch.setenv(environment.WORK_VARIABLE, str(tmp_path / "outputs/work"))
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize(
    ("errors", "count"),
    [
        ((), 1),
        ((_BUSY, _STALE), 3),
        ((_BUSY,) * 9, 1 + len(PAUSES_S)),
        ((RetriesExhaustedError("tried three times"),), 1),
        ((OSError(errno.ENOSPC, "No space left on device"),), 1),
        ((ValueError("a bug"),), 1),
    ],
)
def test_only_a_transient_error_is_retried(errors: tuple[Exception, ...], count: int, capsys: _Output) -> None:
    """After a pause each time, with a line in the log, and not for ever."""
    attempts, slept = Mock(side_effect=[*errors, None]), list[float]()
    with pytest.raises(type(errors[-1])) if count <= len(errors) else nullcontext():
        with_retries("register", attempts, slept.append)
    assert attempts.call_count == count
    assert slept == list(PAUSES_S[: count - 1])
    printed = capsys.readouterr().out
    assert printed.count("trying again in") == count - 1
    if _STALE in errors:
        assert "register: the server is busy; trying again in 30 s\nregister: /work/x: stale file handle;" in printed


def test_nothing_is_retried_on_a_laptop() -> None:
    """A person is there to do it."""
    with pytest.raises(RetryableError):
        with_retries("register", Mock(side_effect=_BUSY), lambda _: pytest.fail("it slept"))


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize("on_cluster", [True, False])
def test_a_task_takes_plain_values_and_retries(tmp_path: Path, monkeypatch: _Patch, on_cluster: bool) -> None:
    """Kubeflow passes floats for integers and paths as text. Other pods of the volume read its files, no others."""
    monkeypatch.setattr(contract, "PAUSES_S", (0.0,))
    attempt = Mock(side_effect=[PipelineError("unfinished"), _BUSY, None])

    def write(config: CopyConfig, *, model: Path, work: Path) -> dict[str, float]:
        for folder in (model, work):
            (folder / "deep").mkdir(parents=True, exist_ok=True)
            (folder / "deep" / "weights").write_text("learned")
        attempt()
        return {"seed": config.seed}

    def run_it() -> dict[str, float]:
        if on_cluster:
            cluster = {"image": "gpu:1", "mount": str(tmp_path)}
            return cluster_task.run_task(stage, {"seed": 3.0}, artifact, cluster=cluster, run_id="run-1").metrics
        return run_task(stage, {"seed": 3.0}, artifact).metrics

    stage, artifact = Stage("write", write, CopyConfig, {}, ("model",), has_work=True), str(tmp_path / "out")
    with pytest.raises(SystemExit):
        run_it()
    assert run_it() == {"seed": 3}
    assert attempt.call_count == 3
    assert (tmp_path / "out/model/deep/weights").read_text() == "learned"
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.rglob("*")}
    assert modes == {(True, 0o775), (False, 0o664)}
