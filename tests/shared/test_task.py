"""What a stage does differently as a task in a pod of Kubeflow: file modes, retries, plain values."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.cluster import task as cluster_task
from components.shared import stage as contract
from components.shared.config import Config
from components.shared.environment import POD_VARIABLE, WORK_VARIABLE
from components.shared.errors import GateMissedError, PipelineError, RetriesExhaustedError, RetryableError
from components.shared.stage import PAUSES_S, Stage, run_task, with_retries

_BUSY = RetryableError("the server is busy")
_STALE = OSError(errno.ESTALE, "Stale file handle", "/work/x")


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Be in a pod of Kubeflow."""
    monkeypatch.setenv(POD_VARIABLE, "launcher-1")
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "outputs/work"))


class Attempts:
    """Fails with each of the errors in turn, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)
        self.count = 0

    def __call__(self) -> str:
        """Make one."""
        self.count += 1
        if self.left:
            raise self.left.pop(0)
        return "done"


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize("errors", [(), (_BUSY,), (_STALE,), (_BUSY, _STALE)])
def test_a_transient_error_is_retried(errors: tuple[Exception, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """After a pause each time, with a line in the log."""
    attempts, slept = Attempts(*errors), list[float]()
    assert with_retries("register", attempts, slept.append) == "done"
    assert attempts.count == 1 + len(errors)
    assert slept == list(PAUSES_S[: len(errors)])
    texts = {_BUSY: "the server is busy", _STALE: "/work/x: stale file handle"}
    lines = [
        f"register: {texts[error]}; trying again in {pause:g} s" for error, pause in zip(errors, PAUSES_S, strict=False)
    ]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize(
    ("error", "count"),
    [
        (_BUSY, 1 + len(PAUSES_S)),
        (PipelineError("a key is wrong"), 1),
        (GateMissedError("the gate is missed"), 1),
        (RetriesExhaustedError("tried three times"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (ValueError("a bug"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_retries_end(error: Exception, count: int) -> None:
    """After the last pause, and at once where the next attempt would fail in the same way."""
    attempts = Attempts(*[error] * 9)
    with pytest.raises(type(error)):
        with_retries("register", attempts, lambda _: None)
    assert attempts.count == count


def test_nothing_is_retried_on_a_laptop() -> None:
    """A person is there to do it."""
    attempts = Attempts(_BUSY)
    with pytest.raises(RetryableError):
        with_retries("register", attempts, lambda _: None)
    assert attempts.count == 1


class WriteConfig(Config):
    """The section `write`."""

    seed: int = 0


def _stage(attempt: Callable[[], object] = lambda: None) -> Stage:
    def write(config: WriteConfig, *, model: Path, work: Path) -> dict[str, float]:
        for folder in (model, work):
            (folder / "deep").mkdir(parents=True, exist_ok=True)
            (folder / "deep" / "weights").write_text("learned")
        attempt()
        return {"seed": config.seed}

    return Stage("write", write, WriteConfig, (), ("model",), has_work=True)


def _run_task(stage: Stage, folder: Path, *, on_cluster: bool) -> dict[str, float]:
    model = str(folder / "out" / "model")
    if on_cluster:
        cluster = {"image": "gpu:1", "mount": str(folder)}
        return cluster_task.run_task(stage, {"seed": 3.0}, cluster=cluster, run_id="run-1", model=model)
    return run_task(stage, {"seed": 3.0}, model=model)


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize("on_cluster", [True, False])
def test_a_task_takes_plain_values_and_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cluster: bool
) -> None:
    """Kubeflow passes floats for integers and paths as text; both kinds of tasks retry."""
    monkeypatch.setattr(contract, "PAUSES_S", (0.0,))
    attempts = Attempts(_BUSY)
    assert _run_task(_stage(attempts), tmp_path, on_cluster=on_cluster) == {"seed": 3}
    assert attempts.count == 2
    assert (tmp_path / "out/model/deep/weights").read_text() == "learned"


def test_a_task_with_a_wrong_config_ends_like_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """One line and the exit code."""
    with pytest.raises(SystemExit) as ended:
        run_task(_stage(), {"sed": 3.0}, model="model")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: write: write.sed: unknown key; did you mean `seed`?\n"


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """That of Argo's tasks, and that of a container runtime."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _modes(folder: Path) -> set[tuple[bool, int]]:
    """The mode of each file and folder, and whether it is a folder."""
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")}


@pytest.mark.usefixtures("pod", "umask")
@pytest.mark.parametrize("on_cluster", [True, False])
def test_files_of_a_task_are_for_its_user_and_group(tmp_path: Path, on_cluster: bool) -> None:
    """Other pods that mount the volume can change neither weights nor checkpoints nor the registry."""
    with pytest.raises(SystemExit):
        _run_task(_stage(Attempts(PipelineError("unfinished"))), tmp_path, on_cluster=on_cluster)
    _run_task(_stage(), tmp_path, on_cluster=on_cluster)
    modes = _modes(tmp_path)
    assert modes == {(True, 0o770), (False, 0o660)}


def test_file_modes_on_a_laptop_are_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """Only the user decides who reads the files of a local run."""
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "work"))
    run_task(_stage(), {}, model=str(tmp_path / "model"))
    assert _modes(tmp_path / "model") == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}
