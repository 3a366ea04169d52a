import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from components.cluster.failures import error_of_ranks
from components.cluster.job import Job, name_of
from components.cluster.launch import run_ranks
from components.shared.environment import TRAIN_JOB_VARIABLE
from components.shared.errors import RetryableError
from components.shared.execution import current_environment, current_place, place_of
from tests import tiny
from tests.cluster.processes import ROOT, free_port, is_gone, pids, wait_until
from tests.cluster.ranks import STOP_REQUESTED, JobConfig, act
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
    assert (tmp_path / "work" / "launch" / "rank-1.log").read_text() == "hello from rank 1\n"
    # The ranks tell where they computed, until another attempt does the work in this process.
    assert place_of(tmp_path / "work").environment.variables["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert _run(tmp_path, "go_on", rank=0, num=1)["pid"] == os.getpid()
    assert place_of(tmp_path / "work") == current_place()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "error", "message"),
    [
        ("fill_the_disk", OSError, "No space left on device: '/far/away'"),
        ("be_killed", RetryableError, "^rank 1 was killed by SIGKILL; start the same run again"),
        ("crash", RuntimeError, r"(?s)^rank 1: ZeroDivisionError: there is.*Traceback.*in crash"),
    ],
)
def test_error_of_one_rank_ends_all(tmp_path: Path, ending: str, error: type[Exception], message: str) -> None:
    """It is the error of the call, and no process is left."""
    with pytest.raises(error, match=message):
        _run(tmp_path, ending)
    assert all(is_gone(pid) for pid in pids(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "grace_s", "message"),
    [(signal.SIGTERM, 600, "the current step is lost"), (signal.SIGINT, 1, "longer than checkpoint.grace_s (1 s)")],
)
def test_ranks_that_do_not_stop_are_killed(
    tmp_path: Path, number: signal.Signals, grace_s: float, message: str
) -> None:
    """At a second request, or after checkpoint.grace_s; the current step is lost, and no process is left."""
    with _program(tmp_path, "hang", grace_s) as program:
        program.send_signal(number)
        wait_until((tmp_path / STOP_REQUESTED).exists)
        if grace_s > 1:
            program.terminate()
        out, _ = program.communicate(timeout=GRACE_S)
    assert program.returncode == 75
    assert message in out


NODES, TRAIN_JOB = 2, "grpo-1"


def _job(folder: Path, ending: str = "go_on", num_processes: int = NODES) -> Job:
    config = JobConfig(ending=ending, rank=1, seconds=0 if ending == "go_on" else 60).model_dump(mode="json")
    job = Job(folder / "launch", name_of(act), config, {"folder": str(folder)}, {}, num_processes, grace_s=1)
    job.write(TRAIN_JOB)
    return job


@contextmanager
def _nodes(job: Job) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The process of each pod, with what Kubeflow Trainer tells it."""
    trainer = {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    trainer |= {TRAIN_JOB_VARIABLE: TRAIN_JOB, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "components.cluster.agent", str(job.folder)]
    with ExitStack() as stack:
        nodes = []
        for number in range(NODES):
            environment = {**os.environ, **trainer, "PET_NODE_RANK": str(number)}
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, umask=0))
            stack.callback(nodes[-1].kill)
        yield nodes


@pytest.mark.slow
def test_ranks_of_several_nodes(tmp_path: Path) -> None:
    """Each node runs its ranks, which know of all; their files can be changed by their user and group alone."""
    job = _job(tmp_path, "go_on")
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
    with _nodes(_job(tmp_path, "be_killed")) as nodes:
        assert nodes[1].wait(120) == 137
        nodes[0].terminate()


@pytest.mark.slow
def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    """Their results would look right and be wrong."""
    job = _job(tmp_path, "go_on", num_processes=3)
    with _nodes(job) as nodes:
        assert {node.wait(120) for node in nodes} == {2}
    assert str(error_of_ranks(job)) == "the job is for 3 processes, but 2 were launched (WORLD_SIZE)"


@pytest.mark.slow
def test_node_passes_a_request_to_stop_on(tmp_path: Path) -> None:
    """Its ranks stop as they choose; the job may be started again."""
    job = _job(tmp_path, "stop")
    with _nodes(job) as nodes:
        wait_until(lambda: len(pids(tmp_path)) == NODES)
        nodes[1].send_signal(signal.SIGTERM)
        assert nodes[1].wait(120) == 75
    assert job.outcome(1) == {"error": "stopped: step 3 is saved", "exit_code": 75}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["meeting", pytest.param("collective", marks=pytest.mark.long)])
def test_node_that_loses_the_first_one_ends(tmp_path: Path, where: str) -> None:
    """Where no connection is closed and nothing answers; the job may be started again."""
    config = tiny.engine_config(num_processes=NODES, deadline_s=1).model_dump(mode="json")
    job = replace(_job(tmp_path), function=name_of(be_cut_off), config=config)
    job.write(TRAIN_JOB)
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
