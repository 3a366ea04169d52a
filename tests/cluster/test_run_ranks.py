import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.cluster.launch import run_ranks
from components.shared.errors import PipelineError, RetryableError
from tests.cluster.ranks import STEP_ENDS, TOLD, JobConfig, act

pytestmark = pytest.mark.slow
GRACE_S = 60
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from components.cluster.launch import run_ranks
from components.policy import stopping
from components.shared.errors import PipelineError
from tests.cluster.ranks import JobConfig, act
stopping._SAME_S = 0.0
config = JobConfig(ending=sys.argv[1], rank=0, seconds=120)
folder = Path(sys.argv[2])
options = {"num_processes": 2, "work": folder / "work", "grace_s": float(sys.argv[3])}
try:
    run_ranks(act, config, {"folder": folder}, **options)
except PipelineError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def _run(
    folder: Path, ending: str, *, rank: int = 1, seconds: float = 120, num_processes: int = 2, grace_s: float = 1
) -> dict[str, float]:
    config = JobConfig(ending=ending, rank=rank, seconds=seconds)
    return run_ranks(
        act,
        config,
        {"folder": folder},
        num_processes=num_processes,
        work=folder / "work",
        grace_s=grace_s,
    )


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def _gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked for its exit code has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_every_rank_runs_and_the_first_one_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it prints is seen; what the other prints is in its log."""
    found = _run(tmp_path, "go_on", seconds=0)
    first, second = _pids(tmp_path)
    assert found == {"rank": 0, "size": 2, "pid": first}
    assert len({first, second, os.getpid()}) == 3
    assert capfd.readouterr().out == "hello from rank 0\n"
    assert (tmp_path / "work" / "launch" / "rank-1.log").read_text() == "hello from rank 1\n"


@pytest.mark.parametrize(
    ("ending", "rank", "error", "message"),
    [
        ("be_refused", 1, PipelineError, "^the data are no data$"),
        ("lose_another", 0, RetryableError, "^rank 7 did not come$"),
        ("fill_the_disk", 1, OSError, "No space left on device: '/far/away'"),
        ("be_killed", 0, RetryableError, "^rank 0 was killed by SIGKILL; run the same again"),
        ("be_killed", 1, RetryableError, "^rank 1 was killed by SIGKILL; run the same again"),
    ],
)
def test_what_ends_one_rank_ends_all_with_its_error(
    tmp_path: Path, ending: str, rank: int, error: type[Exception], message: str
) -> None:
    """The error of either rank is that of the call, and no process is left."""
    with pytest.raises(error, match=message) as raised:
        _run(tmp_path, ending, rank=rank)
    assert isinstance(raised.value, error)
    assert all(_gone(pid) for pid in _pids(tmp_path))


def test_a_bug_in_another_rank_is_shown_with_its_traceback(tmp_path: Path) -> None:
    """Though that rank prints into a log."""
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1: ZeroDivisionError: there is.*Traceback.*have_a_bug"):
        _run(tmp_path, "have_a_bug")


def test_a_request_to_stop_reaches_the_ranks(tmp_path: Path) -> None:
    """They end as they find right, within their time, and that is how the call ends."""
    command = [sys.executable, "-c", PROGRAM, "stop_when_told", str(tmp_path), "5"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert _within(30, lambda: len(_pids(tmp_path)) == 2)
        program.terminate()
        out, _ = program.communicate(timeout=20)
    assert program.returncode == 75
    assert out.endswith("told to stop: all is kept\n")
    assert all(_gone(pid) for pid in _pids(tmp_path))


def test_a_step_under_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it ends after the launcher was last looked at without a request to stop."""
    wait, waits = subprocess.Popen.wait, list[float | None]()

    def record(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(timeout)
        return wait(self, timeout)

    def stop() -> None:
        assert _within(30, lambda: len(_pids(tmp_path)) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert _within(30, lambda: waits[-1] is not None and waits[-1] > GRACE_S)
        (tmp_path / STEP_ENDS).touch()

    monkeypatch.setattr(subprocess.Popen, "wait", record)
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(RetryableError, match=r"^told to stop: all is kept$"):
            _run(tmp_path, "finish_the_step", rank=0, grace_s=GRACE_S)
    finally:
        thread.join()
    assert all(_gone(pid) for pid in _pids(tmp_path))


def test_a_second_request_to_stop_is_not_waited_for(tmp_path: Path) -> None:
    """The step is lost, and no process is left, long before the time for the step is over."""
    command = [sys.executable, "-c", PROGRAM, "stay", str(tmp_path), "600"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert _within(30, lambda: len(_pids(tmp_path)) == 2)
        program.terminate()
        assert _within(30, (tmp_path / TOLD).exists)
        program.terminate()
        out, _ = program.communicate(timeout=60)
    assert program.returncode == 75
    assert out.endswith("the current step is lost; run the same again to go on from the last checkpoint\n")
    assert _within(5, lambda: all(map(_gone, _pids(tmp_path))))


def test_ranks_that_do_not_stop_are_ended(tmp_path: Path) -> None:
    """Once their time is over."""
    command = [sys.executable, "-c", PROGRAM, "stay", str(tmp_path), "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert _within(30, lambda: len(_pids(tmp_path)) == 2)
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=20)
    assert program.returncode == 75
    assert all(_gone(pid) for pid in _pids(tmp_path))


def test_nothing_outlives_a_killed_program(tmp_path: Path) -> None:
    """Neither the launcher nor a rank."""
    command = [sys.executable, "-c", PROGRAM, "stay", str(tmp_path), "60"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as program:
        assert _within(30, lambda: len(_pids(tmp_path)) == 2)
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        program.kill()
    assert children
    left = [*map(int, children), *_pids(tmp_path)]
    assert _within(5, lambda: all(map(_gone, left)))


def test_one_process_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched for it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _run(tmp_path, "go_on", num_processes=1, rank=0)["pid"] == os.getpid()
