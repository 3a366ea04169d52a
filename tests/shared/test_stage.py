"""Running a stage: all outputs or none, one line for an error, and the exit code that says what to do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.shared import environment, lineage
from components.shared.config import Config
from components.shared.errors import DataRejectedError, GateMissedError, PipelineError, RetryableError
from components.shared.stage import Stage, main, run

_ROOT = Path(__file__).parents[2]
_NEW = {"out/first/a.txt": "new", "out/first/lineage.json": "", "second/b.txt": "new", "second/lineage.json": ""}


class CopyConfig(Config):
    """The section `copy`."""

    seed: int = 0


def _copy(config: CopyConfig, *, source: Path, first: Path, second: Path) -> dict[str, float]:
    """Copy a text, twice.

    More about it.
    """
    (first / "a.txt").write_text((source / "text.txt").read_text())
    (second / "b.txt").write_text("new")
    return {"files": 2.0}


def _stage(then: Callable[[], object] = lambda: None, name: str = "copy") -> Stage:
    """A stage that fills its outputs and then does something else, such as failing."""

    def copy(config: CopyConfig, *, source: Path, first: Path, second: Path) -> dict[str, float]:
        metrics = _copy(config, source=source, first=first, second=second)
        then()
        return metrics

    copy.__doc__ = _copy.__doc__
    return Stage(name, copy, CopyConfig, ("source",), ("first", "second"))


def _failing(error: BaseException) -> Stage:
    def fail() -> None:
        raise error

    return _stage(fail)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """The folders of the stage; its input is there."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/text.txt").write_text("new")
    return {"source": tmp_path / "source", "first": tmp_path / "out/first", "second": tmp_path / "second"}


@pytest.fixture
def earlier(tmp_path: Path, folders: dict[str, Path]) -> dict[str, str]:
    """The outputs of an earlier run, with a file that a later one does not write."""
    for name in ("first", "second"):
        folders[name].mkdir(parents=True)
        (folders[name] / "old.txt").write_text("old")
        lineage.write(folders[name], {})
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
    leftover = tmp_path / ".second.partial"
    leftover.mkdir()
    (leftover / "half.txt").write_text("half")
    during: list[bool] = []
    stage = _stage(lambda: during.append((tmp_path / "second/old.txt").exists()))
    assert run(stage, CopyConfig(), folders) == {"files": 2.0}
    assert during == [True]
    assert _files(tmp_path) == _NEW


def test_every_file_is_on_disk_before_an_output_is_renamed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files and folders of all outputs are synced first, then each is renamed."""
    done: list[str] = []
    rename = os.rename

    def record_rename(old: Path, new: Path) -> None:
        done.append(f"rename {new.name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: done.append(Path(f"/proc/self/fd/{file}").readlink().name))
    monkeypatch.setattr(os, "rename", record_rename)
    run(_stage(), CopyConfig(), folders)
    files = {".first.partial", "a.txt", ".second.partial", "b.txt", "lineage.json"}
    assert set(done[: done.index("rename first")]) == files
    assert done[-4:] == ["rename first", "out", "rename second", folders["second"].parent.name]


@pytest.mark.parametrize("error", [PipelineError("out of ink"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_failed_stage_leaves_earlier_outputs_unchanged(
    tmp_path: Path, folders: dict[str, Path], earlier: dict[str, str], error: BaseException
) -> None:
    """And nothing of its own; without earlier outputs it leaves nothing at all."""
    with pytest.raises(type(error)):
        run(_failing(error), CopyConfig(), folders)
    assert _files(tmp_path) == earlier


@pytest.mark.usefixtures("earlier")
def test_a_verdict_keeps_its_outputs_and_is_still_an_error(tmp_path: Path, folders: dict[str, Path]) -> None:
    """A person whose data are rejected can read why."""
    with pytest.raises(DataRejectedError, match="all of it is wrong"):
        run(_failing(DataRejectedError("all of it is wrong")), CopyConfig(), folders)
    assert _files(tmp_path) == _NEW


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a_file", "a_file is not a folder; name a new one"),
        ("a_link", "a_link is not a folder; name a new one"),
        ("mine", "mine has files that no stage made; name a new folder"),
        ("outside", "outside overlaps with the input "),  # which is a folder in it
        ("outside/source/in", "outside/source/in overlaps with the input "),
        ("mine/../outside", "mine/../outside overlaps with the input "),
    ],
)
def test_an_output_that_would_destroy_something_is_refused_first(tmp_path: Path, output: str, message: str) -> None:
    """Files at a mistyped path stay there, inputs above all."""
    source = tmp_path / "outside/source"
    for folder in (source, tmp_path / "mine"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("mine")
    lineage.write(tmp_path / "outside", {})
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "a_link").symlink_to(tmp_path / "mine")
    before = _files(tmp_path)
    folders = {"source": source, "first": tmp_path / output, "second": tmp_path / "new"}
    with pytest.raises(PipelineError) as refused:
        run(_stage(lambda: pytest.fail("it was run")), CopyConfig(), folders)
    assert str(refused.value).startswith(f"copy: output `first`: {tmp_path}/{message}")
    assert _files(tmp_path) == before


def test_a_stage_declares_the_folders_of_its_function() -> None:
    """A name that differs is found when the stage is imported."""
    with pytest.raises(AssertionError, match=r"copy: the function takes \['config', 'first', 'second', 'source'\]"):
        Stage("copy", _copy, CopyConfig, ("sources",), ("first", "second"))


def test_an_input_that_is_missing_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    """With its name, its path and what to do; an empty output folder, which some runners make, is accepted."""
    folders["second"].mkdir()
    run(_stage(), CopyConfig(), folders)
    source = tmp_path / "source/text.txt"
    with pytest.raises(PipelineError) as refused:
        run(_stage(), CopyConfig(), {**folders, "source": source})
    assert str(refused.value) == f"copy: input `source`: {source} is not a folder; run the stage that makes it first"


def test_equal_runs_have_equal_lineage(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Every output has it; neither place nor time is in it, but the config and each input with its own lineage."""
    lineage.write(folders["source"], {"stage": "raw"})
    for place, seed in (("here", 1), ("there", 1), ("other", 2)):
        outputs = {name: tmp_path / place / name for name in ("first", "second")}
        run(_stage(), CopyConfig(seed=seed), {**folders, **outputs})
    here, there, other, first = (
        (tmp_path / path / lineage.FILE_NAME).read_bytes()
        for path in ("here/second", "there/second", "other/second", "here/first")
    )
    assert here == there == first != other
    made = json.loads(here)
    assert (made["stage"], made["config"]) == ("copy", {"seed": 1})
    digest = lineage.digest(folders["source"])
    assert made["inputs"] == {"source": {"digest": digest, "lineage": {"stage": "raw"}}}


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of a run."""
    monkeypatch.setenv(environment.JOURNAL_VARIABLE, str(tmp_path / "journal.jsonl"))
    return tmp_path / "journal.jsonl"


def test_the_journal_has_the_start_and_the_end_of_a_stage(folders: dict[str, Path], journal: Path) -> None:
    """One line per event, with the outputs, and the seconds and metrics at the end."""
    run(_stage(), CopyConfig(), folders)
    started, finished = map(json.loads, journal.read_text().splitlines())
    outputs = {name: str(folders[name]) for name in ("first", "second")}
    assert started == {"stage": "copy", "event": "started", "outputs": outputs}
    assert finished.pop("seconds") >= 0
    assert finished == {"stage": "copy", "event": "finished", "metrics": {"files": 2.0}}


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


def test_a_stage_is_a_command_with_an_option_per_folder(
    tmp_path: Path, command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its description is the first line of the function's docstring; the params file is params.yaml by default."""
    with pytest.raises(SystemExit, match="0"):
        command(_stage(), "--help")
    text = capsys.readouterr().out
    for part in (
        "python -m components.copy",
        "--params",
        "--source",
        "input folder",
        "--second",
        "Copy a text, twice.",
    ):
        assert part in text
    assert "More about it." not in text
    with pytest.raises(SystemExit, match="2"):
        command(_stage())
    assert "the following arguments are required: --second" in capsys.readouterr().err
    command(_stage(), "--second", "second")
    made = lineage.read(tmp_path / "second")
    assert made is not None
    assert made["config"] == {"seed": 1}


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (PipelineError("copy: text.txt:3: is upside down"), 2, "text.txt:3: is upside down"),
        (DataRejectedError("too few texts"), 2, "too few texts"),
        (GateMissedError("the gate is missed"), 3, "the gate is missed"),
        (RetryableError("a peer was lost"), 75, "a peer was lost"),
        (OSError(116, "Stale file handle", "/shared/text.txt"), 75, "/shared/text.txt: stale file handle"),
        (FileNotFoundError(2, "No such file", "/a/text.txt"), 2, "/a/text.txt: no such file or directory"),
        (MemoryError(), 2, "not enough memory for this stage"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("is_journal_writable", [True, False])
def test_an_error_is_one_line_and_an_exit_code(
    command: Callable[..., None],
    journal: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    exit_code: int,
    line: str,
    is_journal_writable: bool,
) -> None:
    """2: correct something, 3: a missed gate, 75: try again. The journal has it too, unless its disk is full."""

    def fail() -> None:
        if not is_journal_writable:
            journal.unlink()
            journal.mkdir()
        raise error

    with pytest.raises(SystemExit) as ended:
        command(_stage(fail), "--second", "second")
    assert ended.value.code == exit_code
    assert capsys.readouterr() == ("", f"error: copy: {line}\n")
    if is_journal_writable:
        failed = json.loads(journal.read_text().splitlines()[-1])
        assert (failed["event"], failed["exit_code"]) == ("failed", exit_code)
        assert failed["error"].removeprefix("copy: ") == line


@pytest.mark.parametrize("error", [ValueError("unexpected"), OSError("without a number")])
def test_a_bug_keeps_its_traceback(tmp_path: Path, command: Callable[..., None], error: Exception) -> None:
    """It is not disguised as a mistake of the user; it leaves no outputs either."""
    with pytest.raises(type(error)) as raised:
        command(_failing(error), "--second", "second")
    assert raised.value is error
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),  # safetensors
    ],
)
def test_a_full_disk_is_named_with_what_is_on_it(folders: dict[str, Path], error: Exception) -> None:
    """Where the system names no file: the fullest folder, what is written there and what is free."""
    path = r"(/\S+|\S*/\.(first|second)\.partial)"
    message = rf"^{path}: no space left on device: [\d,]+ bytes are in {path} so far, [\d,]+ are free; make room"
    with pytest.raises(PipelineError, match=message):
        run(_failing(error), CopyConfig(), folders)


_COMMAND = """
import sys, time
from pathlib import Path
from components.shared.stage import Stage, main
from components.shared.config import Config

class CopyConfig(Config):
    size: int = 100
    pause_s: float = 0

def copy(config: CopyConfig, *, copies: Path, notes: Path) -> dict[str, float]:
    (copies / "copy").write_bytes(bytes(config.size))
    (notes / "note").write_text("copied")
    time.sleep(config.pause_s)
    return {}

main(Stage("copy", copy, CopyConfig, (), ("copies", "notes")))
"""


def _command(folder: Path, **config: float) -> list[str]:
    (folder / "params.yaml").write_text(json.dumps({"copy": config}))
    return [sys.executable, "-c", _COMMAND, "--copies", "out/copies", "--notes", "out/notes"]


@pytest.mark.slow
def test_a_killed_run_leaves_no_output_and_the_next_is_unaffected(tmp_path: Path) -> None:
    """SIGKILL in the middle; the next run gives the bytes of an undisturbed one."""
    variables = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(_command(tmp_path, pause_s=60), cwd=tmp_path, env=variables) as process:
        while not (tmp_path / "out/.notes.partial/note").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")] == []
    subprocess.run(_command(tmp_path), cwd=tmp_path, env=variables, check=True)
    assert {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()} == {"copy", "note", "lineage.json"}


@pytest.mark.slow
def test_a_full_output_disk_is_named(tmp_path: Path) -> None:
    """Not the one with the temporary files, on which there is room."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    (tmp_path / "out").mkdir()
    script = 'mount -t tmpfs -o size=400k tmpfs out && exec "$@"'
    done = subprocess.run(
        [*namespace, "sh", "-c", script, "sh", *_command(tmp_path, size=900_000)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip(f"mounting in a namespace of its own is not permitted here: {done.stderr.strip()}")
    line = (
        r"error: copy: \S*out/\.copies\.partial\S*: no space left on device: [34]\d\d,\d{3} bytes are in out/\.copies"
    )
    assert re.match(line, done.stderr), done.stderr
