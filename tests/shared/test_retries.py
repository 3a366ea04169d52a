"""What a task in a pod of Kubeflow tries again itself, and what not."""

import errno
from pathlib import Path

import pytest

from components.cluster import task as cluster_task
from components.shared import task
from components.shared.config import Config
from components.shared.environment import POD_VARIABLE
from components.shared.errors import GateMissedError, PipelineError, RetriesExhaustedError, RetryableError
from components.shared.stage import Stage
from components.shared.task import PAUSES_S, with_retries
from components.shared.versioning import Workspace

BUSY = RetryableError("the server is busy")
STALE = OSError(errno.ESTALE, "Stale file handle", "/work/x")


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a pod of Kubeflow."""
    monkeypatch.setenv(POD_VARIABLE, "launcher-1")


class Attempts:
    """Fails with each of the errors in turn, and then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)
        self.number = 0

    def __call__(self) -> str:
        """Make one."""
        self.number += 1
        if self.left:
            raise self.left.pop(0)
        return "done"


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize("errors", [(), (BUSY,), (STALE,), (BUSY, STALE)])
def test_what_may_pass_is_tried_again(errors: tuple[Exception, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """After a pause each time, which the log tells with the reason."""
    attempts, slept = Attempts(*errors), list[float]()
    assert with_retries("register", attempts, slept.append) == "done"
    assert attempts.number == 1 + len(errors)
    assert slept == list(PAUSES_S[: len(errors)])
    said = capsys.readouterr().out.splitlines()
    expected = [
        f"register: {error}; trying again in {pause:g} s" for error, pause in zip(errors, PAUSES_S, strict=False)
    ]
    assert said == expected


@pytest.mark.usefixtures("pod")
def test_there_is_an_end_to_trying() -> None:
    """The error of the last attempt is that of the task."""
    attempts = Attempts(*[BUSY] * (1 + len(PAUSES_S)))
    with pytest.raises(RetryableError, match="busy"):
        with_retries("register", attempts, lambda _: None)
    assert attempts.left == []


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize(
    "error",
    [
        PipelineError("a key is wrong"),
        GateMissedError("the gate is missed"),
        RetriesExhaustedError("tried three times"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("a mistake in the code"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    """A mistake, a verdict, what was tried often enough, a full disk: the next attempt would end the same way."""
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        with_retries("register", attempts, lambda _: None)
    assert attempts.number == 1


def test_nothing_is_tried_again_where_somebody_is_there_to_do_it() -> None:
    """On a laptop the error is shown at once."""
    attempts = Attempts(BUSY)
    with pytest.raises(RetryableError):
        with_retries("register", attempts, lambda _: None)
    assert attempts.number == 1


class CopyConfig(Config):
    """The section of a stage that needs two attempts."""


_attempts = Attempts()


def copy(config: CopyConfig, *, copies: Path) -> dict[str, float]:
    """Fail until the server answers."""
    del config
    (copies / "copy.txt").write_text(_attempts())
    return {"copies": 1.0}


STAGE = Stage("copy", copy, CopyConfig, (), ("copies",))


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize("on_cluster", [True, False])
def test_every_task_of_kubeflow_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cluster: bool) -> None:
    """Stages in their own pod, and the steps of training jobs."""
    monkeypatch.setattr(task, "PAUSES_S", (0.0,))
    _attempts.left = [BUSY]
    copies = tmp_path / "copies"
    if on_cluster:
        cluster = {"image": "gpu:1", "mount": str(tmp_path)}
        found = cluster_task.run_task(STAGE, {}, cluster=cluster, run_id="run-1", copies=str(copies))
    else:
        found = task.run_task(STAGE, {}, copies=str(copies))
    assert found == {"copies": 1.0}
    assert (copies / "copy.txt").read_text() == "done"


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("fatal: unable to access 'https://git.example/': The requested URL returned error: 503", RetryableError),
        ("fatal: unable to access 'https://git.example/': Failed to connect to git.example port 443", RetryableError),
        ("fatal: the remote end hung up unexpectedly", RetryableError),
        ("fatal: unable to access 'https://git.example/': The requested URL returned error: 403", PipelineError),
        ("fatal: Authentication failed for 'https://git.example/'", PipelineError),
        ("fatal: unable to access 'https://gti.example/': Could not resolve host: gti.example", RetryableError),
    ],
)
def test_a_repository_that_is_away_is_told_from_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, kind: type[PipelineError]
) -> None:
    """Registering and reading data are tried again where the server is away; preflight has looked up its name."""
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "{printed}" >&2\nexit 128\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    with pytest.raises(PipelineError, match="git: ") as raised:
        Workspace(tmp_path, tmp_path).git("push")
    assert type(raised.value) is kind
