"""Ranks in real processes: launched on this machine, or by the pods of a TrainJob."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from components.cluster.failures import error_of_ranks
from components.cluster.job import Job, RankFunction, name_of
from components.cluster.launch import run_ranks
from components.shared.config import Config
from components.shared.environment import TRAIN_JOB_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from components.shared.execution import current_environment, current_place, place_of
from tests import tiny
from tests.cluster.processes import ROOT, is_gone, pids, wait_until
from tests.cluster.ranks import STEP_ENDS, STOP_REQUESTED, JobConfig, act
from tests.policy.test_parallel import CUT, be_cut_off

GRACE_S = 60
PROGRAM = """
import sys
from pathlib import Path
from components.cluster.launch import run_ranks
from components.policy import shutdown
from components.shared.errors import PipelineError
from tests.cluster.ranks import JobConfig, act
shutdown._ONE_REQUEST_S = 0.0
folder = Path(sys.argv[2])
options = {"num_processes": 2, "work": folder / "work", "grace_s": float(sys.argv[3])}
try:
    run_ranks(act, JobConfig(ending=sys.argv[1], rank=0, seconds=120), {"folder": folder}, **options)
except PipelineError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def _run(folder: Path, ending: str, *, rank: int = 1, seconds: float = 120, num: int = 2) -> dict[str, float]:
    config = JobConfig(ending=ending, rank=rank, seconds=seconds)
    return run_ranks(act, config, {"folder": folder}, num_processes=num, work=folder / "work", grace_s=GRACE_S)


@contextmanager
def _program(folder: Path, ending: str, grace_s: float) -> Iterator["subprocess.Popen[str]"]:
    """A process that has launched two ranks."""
    command = [sys.executable, "-c", PROGRAM, ending, str(folder), str(grace_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        wait_until(lambda: len(pids(folder)) == 2)
        yield program
    assert all(is_gone(pid) for pid in pids(folder))


def test_single_process_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched for it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _run(tmp_path, "go_on", rank=0, num=1)["pid"] == os.getpid()


@pytest.mark.slow
def test_every_rank_runs_and_the_first_one_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is that of the launching process; the other's is in its log."""
    current_environment()  # cached from here on
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    result = _run(tmp_path, "go_on", seconds=0)
    first, second = pids(tmp_path)
    assert result == {"rank": 0, "size": 2, "pid": first}
    assert len({first, second, os.getpid()}) == 3
    assert capfd.readouterr().out == "hello from rank 0\n"
    # The ranks tell where they computed, until another attempt does the work in this process.
    assert place_of(tmp_path / "work").environment.variables["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    _run(tmp_path, "go_on", rank=0, num=1)
    assert place_of(tmp_path / "work") == current_place()
    assert (tmp_path / "work" / "launch" / "rank-1.log").read_text() == "hello from rank 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "rank", "error", "message"),
    [
        ("refuse", 1, PipelineError, "^the data are no data$"),
        ("fill_the_disk", 1, OSError, "No space left on device: '/far/away'"),
        ("be_killed", 1, RetryableError, "^rank 1 was killed by SIGKILL; start the same run again"),
        ("crash", 1, RuntimeError, r"(?s)^rank 1: ZeroDivisionError: there is.*Traceback.*in crash"),
    ],
)
def test_error_of_one_rank_ends_all(
    tmp_path: Path, ending: str, rank: int, error: type[Exception], message: str
) -> None:
    """It is the error of the call, and no process is left."""
    with pytest.raises(error, match=message):
        _run(tmp_path, ending, rank=rank)
    assert all(is_gone(pid) for pid in pids(tmp_path))


@pytest.mark.slow
def test_current_step_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ends after the last poll of the launcher before the request to stop."""
    wait, timeouts = subprocess.Popen.wait, list[float | None]()

    def record(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        timeouts.append(timeout)
        return wait(self, timeout)

    def request_stop() -> None:
        wait_until(lambda: len(pids(tmp_path)) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: timeouts[-1] is not None and timeouts[-1] > GRACE_S)
        (tmp_path / STEP_ENDS).touch()

    monkeypatch.setattr(subprocess.Popen, "wait", record)
    thread = threading.Thread(target=request_stop)
    thread.start()
    try:
        with pytest.raises(RetryableError, match=r"^stopped: step 3 is saved$"):
            _run(tmp_path, "finish_step", rank=0)
    finally:
        thread.join()
    assert all(is_gone(pid) for pid in pids(tmp_path))


@pytest.mark.slow
def test_second_request_to_stop_ends_ranks_at_once(tmp_path: Path) -> None:
    """The current step is lost, and no process is left."""
    with _program(tmp_path, "hang", 600) as program:
        program.terminate()
        wait_until((tmp_path / STOP_REQUESTED).exists)
        program.terminate()
        out, _ = program.communicate(timeout=GRACE_S)
    assert program.returncode == 75
    assert out.endswith("the current step is lost; start the same run again to resume from the last checkpoint\n")


@pytest.mark.slow
def test_ranks_that_do_not_stop_are_killed(tmp_path: Path) -> None:
    """After checkpoint.grace_s, with SIGKILL."""
    with _program(tmp_path, "hang", 1) as program:
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=GRACE_S)
    assert program.returncode == 75
    assert "which took longer than checkpoint.grace_s (1 s)" in out


@pytest.mark.slow
def test_nothing_outlives_a_killed_program(tmp_path: Path) -> None:
    """Neither the launcher nor a rank."""
    with _program(tmp_path, "hang", GRACE_S) as program:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        program.kill()
        assert children
        wait_until(lambda: all(map(is_gone, [*map(int, children), *pids(tmp_path)])))


NODES, TRAIN_JOB = 2, "grpo-1"


def _job(folder: Path, config: Config, function: RankFunction = act, num_processes: int = NODES) -> Job:
    folders, name = {"folder": str(folder)}, name_of(function)
    job = Job(folder / "launch", name, config.model_dump(mode="json"), folders, {}, num_processes, grace_s=1)
    job.write(TRAIN_JOB)
    return job


def _act(ending: str) -> JobConfig:
    return JobConfig(ending=ending, rank=1, seconds=0 if ending == "go_on" else 60)


@contextmanager
def _nodes(job: Job) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The process of each pod, with what Kubeflow Trainer tells it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    trainer |= {TRAIN_JOB_VARIABLE: TRAIN_JOB, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "components.cluster.agent", str(job.folder)]
    with ExitStack() as stack:
        nodes = []
        for number in range(NODES):
            environment = {**os.environ, **trainer, "PET_NODE_RANK": str(number)}
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, umask=0))
            stack.callback(nodes[-1].kill)
        yield nodes


@pytest.mark.slow
def test_pod_that_waits_for_its_turn_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """As the first process of a container, which ignores the signal by default."""
    job = _job(tmp_path, _act("go_on"))
    job.end_turn()
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); from components.cluster.job import Job;"
    wait = f"{ignore} Job.read_in_pod(__import__('pathlib').Path({str(job.folder)!r}))"
    environment = {**os.environ, TRAIN_JOB_VARIABLE: TRAIN_JOB}
    with subprocess.Popen([sys.executable, "-c", wait], cwd=ROOT, env=environment) as pod:

        def handles_the_signal() -> bool:
            caught = re.search(r"SigCgt:\s(\w+)", Path(f"/proc/{pod.pid}/status").read_text())
            return caught is not None and bool(int(caught[1], 16) >> signal.SIGTERM - 1 & 1)

        wait_until(handles_the_signal)
        pod.terminate()
        assert pod.wait(60) == RetryableError.exit_code


@pytest.mark.slow
def test_ranks_of_several_nodes(tmp_path: Path) -> None:
    """Each node runs its ranks, which know of all; their files can be changed by their user and group alone."""
    job = _job(tmp_path, _act("go_on"))
    with _nodes(job) as nodes:
        assert [node.wait(120) for node in nodes] == [0, 0]
    results = job.results()
    assert results is not None
    assert [(each["rank"], each["size"]) for each in results] == [(0, NODES), (1, NODES)]
    assert job.log(1).read_text() == "hello from rank 1\n"
    written = [job.log(1), *job.folder.glob("rank-*.json"), *tmp_path.glob("*.pid")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o664}


@pytest.mark.slow
def test_node_ends_with_the_exit_code_of_its_rank(tmp_path: Path) -> None:
    """From it the cluster decides whether to restart."""
    with _nodes(_job(tmp_path, _act("be_killed"))) as nodes:
        assert nodes[1].wait(120) == 137
        nodes[0].terminate()


@pytest.mark.slow
def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    """Their results would look right and be wrong."""
    job = _job(tmp_path, _act("go_on"), num_processes=3)
    with _nodes(job) as nodes:
        assert {node.wait(120) for node in nodes} == {2}
    assert str(error_of_ranks(job)) == "the job is for 3 processes, but 2 were launched (WORLD_SIZE)"


@pytest.mark.slow
def test_node_passes_a_request_to_stop_on(tmp_path: Path) -> None:
    """Its ranks stop as they choose; the job may be started again."""
    job = _job(tmp_path, _act("stop"))
    with _nodes(job) as nodes:
        wait_until(lambda: len(pids(tmp_path)) == NODES)
        nodes[1].send_signal(signal.SIGTERM)
        assert nodes[1].wait(120) == 75
    assert job.outcome(1) == {"error": "stopped: step 3 is saved", "exit_code": 75}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["meeting", pytest.param("collective", marks=pytest.mark.long)])
def test_node_that_loses_the_first_one_ends(tmp_path: Path, where: str) -> None:
    """Where no connection is closed and nothing answers; the job may be started again."""
    job = _job(tmp_path, tiny.engine_config(num_processes=NODES, deadline_s=1), be_cut_off)
    with _nodes(job) as nodes:
        wait_until(lambda: len(pids(tmp_path)) == NODES)
        for pid in (nodes[0].pid, pids(tmp_path)[0]):  # the launcher of the first node holds the store
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / CUT).write_text(where)
        assert nodes[1].wait(120) == 75
    outcome = job.outcome(1)
    assert outcome is not None
    assert re.fullmatch(r"the rendezvous store does not answer at .*", outcome["error"])


def test_launching_needs_none_of_the_libraries_of_ranks() -> None:
    """A pod that only submits and watches a job has none of them."""
    heavy = ("torch", "transformers", "deepspeed", "vllm", "safetensors", "tokenizers")
    modules = "components.train_sft.train, components.train_grpo.train, components.cluster.trainjob"
    program = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
