"""The nodes of a job, as pods run them: torchrun's settings from the environment, on this machine."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from components.cluster.failures import error_of_ranks
from components.cluster.job import Job
from tests import tiny
from tests.policy.test_parallel import CUT

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NODES = 2


def _job(folder: Path, ending: str, *, num_processes: int = NODES) -> Job:
    job = Job(
        folder=folder / "launch",
        function="tests.cluster.ranks:act",
        config={"ending": ending, "rank": 1, "seconds": 0 if ending == "go_on" else 60},
        folders={"folder": str(folder)},
        outputs={},
        num_processes=num_processes,
        grace_s=1,
    )
    job.write()
    return job


@contextmanager
def _nodes(job: Job) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The processes of all nodes, with what Kubeflow Trainer tells them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {
        "PET_NNODES": str(NODES),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "components.cluster.agent", str(job.folder)]
    with ExitStack() as ending:
        nodes = []
        for number in range(NODES):
            environment = {**os.environ, **told, "PET_NODE_RANK": str(number)}
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, umask=0))
            ending.callback(nodes[-1].kill)
        yield nodes


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid")) if path.read_text()]


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_nodes_find_one_another(tmp_path: Path) -> None:
    """Every node runs its ranks, all of them know of all, and their results are on the volume."""
    job = _job(tmp_path, "go_on")
    with _nodes(job) as nodes:
        assert [node.wait(120) for node in nodes] == [0, 0]
    results = job.results()
    assert results is not None
    assert [(each["rank"], each["size"]) for each in results] == [(0, NODES), (1, NODES)]
    assert job.log(1).read_text() == "hello from rank 1\n"
    written = [job.log(1), *job.folder.glob("rank-*.json"), *tmp_path.glob("*.pid")]
    assert not any(path.stat().st_mode & stat.S_IRWXO for path in written), "for their user and group alone"


@pytest.mark.parametrize(("ending", "code"), [("be_refused", 2), ("lose_another", 75), ("be_killed", 137)])
def test_a_node_ends_as_its_rank_does(tmp_path: Path, ending: str, code: int) -> None:
    """With that exit code the cluster tells what a restart would cure."""
    with _nodes(_job(tmp_path, ending)) as nodes:
        assert nodes[1].wait(120) == code
        nodes[0].terminate()


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    """What they computed would look right and be wrong."""
    job = _job(tmp_path, "go_on", num_processes=3)
    with _nodes(job) as nodes:
        assert {node.wait(120) for node in nodes} == {2}
    assert str(error_of_ranks(job)) == "the job is for 3 processes, but 2 were launched (WORLD_SIZE)"


def test_a_node_that_is_told_to_stop_passes_it_on(tmp_path: Path) -> None:
    """Its ranks end as they find right; it may be started again."""
    job = _job(tmp_path, "stop_when_told")
    with _nodes(job) as nodes:
        assert _within(120, lambda: len(_pids(tmp_path)) == NODES)
        time.sleep(0.5)  # until the rank listens
        nodes[1].send_signal(signal.SIGTERM)
        assert nodes[1].wait(20) == 75
    assert job.outcome(1) == {"error": "told to stop: all is kept", "exit_code": 75}


@pytest.mark.parametrize("where", ["barrier", pytest.param("collective", marks=pytest.mark.long)])
def test_a_node_that_is_cut_off_from_the_first_ends(tmp_path: Path, where: str) -> None:
    """Though nothing answers any more, nor ends the connection; its rank says so, and the job may be started again."""
    job = Job(
        folder=tmp_path / "launch",
        function="tests.policy.test_parallel:be_cut_off",
        config=tiny.engine_config(num_processes=NODES, deadline_s=1).model_dump(),
        folders={"folder": str(tmp_path)},
        outputs={},
        num_processes=NODES,
        grace_s=1,
    )
    job.write()
    with _nodes(job) as nodes:
        assert _within(120, lambda: len(_pids(tmp_path)) == NODES)
        for pid in (nodes[0].pid, _pids(tmp_path)[0]):  # the launcher of the first node holds the store
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / CUT).write_text(where)
        assert nodes[1].wait(120) == 75
    outcome = job.outcome(1)
    assert outcome is not None
    assert re.fullmatch(
        r"the store of the processes does not answer at .*: is this host cut off from the first one\?", outcome["error"]
    )


def test_ranks_end_with_their_node(tmp_path: Path) -> None:
    """However it ends."""
    with _nodes(_job(tmp_path, "stay")) as nodes:
        assert _within(120, lambda: len(_pids(tmp_path)) == NODES)
        for node in nodes:
            node.kill()
        assert _within(5, lambda: all(map(_gone, _pids(tmp_path))))
