import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from components.cluster.failures import first_error
from components.cluster.kube import Json, TrainJobs, connect
from components.cluster.watch import Phase, Watch
from components.shared.errors import PipelineError
from tests.cluster.launched import Launched, add_train_job, clock_of
from tests.fake_cluster import kinds
from tests.fake_cluster.store import key_of
from tests.pipelines.cluster.recorded import RECORDINGS, needs_recordings

LOG = """\
(APIServer pid=1) INFO 11-26 01:53:57 [utils.py:253] non-default args: {'host': '0.0.0.0'}
(EngineCore pid=88) WARNING 11-26 01:54:21 [cpu.py:667] Failed to import from vllm._C: ImportError('libnuma.so.1: \
cannot open shared object file: No such file or directory')
(EngineCore pid=88) ERROR 11-26 01:54:30 [core.py:866] EngineCore failed to start.
(EngineCore pid=88) ERROR 11-26 01:54:30 [core.py:866] Traceback (most recent call last):
(EngineCore pid=88) ERROR 11-26 01:54:30 [core.py:866] AttributeError: '_OpNamespace' '_C' object has no attribute \
'init_cpu_memory_env'
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
MISSING = "the image lacks the library libnuma.so.1"


class Replay:
    """Recorded changes in the fake cluster, in their order: one each time that the watch sleeps."""

    def __init__(self, job: Launched, events: Iterable[Json], log: str) -> None:
        self._job, self._events, self._log, self._has_log = job, iter(events), log, set[str]()

    def sleep(self, seconds: float) -> None:
        """Let time pass, and the next thing happen."""
        self._job.server.clock.advance(seconds)
        event, store = next(self._events), self._job.cluster.store
        document: Json = event["object"]
        with store.clock.changed:
            document["metadata"] |= {"namespace": self._job.server.namespace}
            document["metadata"].pop("ownerReferences", None)
            key = key_of(document)
            if event["type"] == "DELETED":
                store.remove(key)
            elif store.get(*key) is None:
                store.create(document)
            else:
                store.replace(document)
        has_ended = "terminated" in str(document.get("status", {}).get("containerStatuses"))
        if has_ended and document["metadata"]["uid"] not in self._has_log:
            self._has_log.add(document["metadata"]["uid"])
            container = document["spec"]["containers"][0]["name"]
            self._job.cluster.print(document, *self._log.splitlines(), container=container)


def _recorded(name: str, *files: str) -> list[Json]:
    """Return the recorded changes of objects that belong to a job, in their order."""
    paths = [RECORDINGS / "third-trial" / f"{file}.jsonl" for file in files]
    every = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    changes = [each for each in every if name in each["object"]["metadata"]["name"]]
    return sorted(changes, key=lambda each: int(each["object"]["metadata"]["resourceVersion"]))


def _watch(job: Launched, name: str, log: str, events: Sequence[Json]) -> Phase:
    """Watch a job: the recorded one where it is among what changes."""
    replay = Replay(job, events, log)
    if events[0]["object"]["kind"] == "TrainJob":
        replay.sleep(0)
        for workload in job.cluster.all(kinds.WORKLOADS):  # recorded ones follow
            job.cluster.remove(kinds.WORKLOADS, workload["metadata"]["name"])
    else:
        add_train_job(job.server, name, {})
    jobs = TrainJobs(connect(), job.server.namespace)
    found = jobs.get(name)
    assert found is not None
    clock = replace(clock_of(job.server), sleep=replay.sleep)
    watch = Watch(jobs, job.stage, clock, found)
    try:
        return watch.until_end()
    finally:
        watch.stop()


def _said(out: str, name: str, *, reasons: bool) -> list[str]:
    """Return the phases of a job that were printed, or the reasons of its waits."""
    lines = [line.removeprefix(f"train_grpo: {name} ") for line in out.splitlines() if line.startswith("train_grpo: ")]
    return [line for line in lines if (": " in line) == reasons]


@needs_recordings
def test_second_server_that_ends_for_the_same_reason_ends_the_run(
    job: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recorded servers lacked a library, which a warning in the middle of their logs names."""
    name = "grpo-9d5493e1-f0973707"
    with pytest.raises(PipelineError, match=f"^{MISSING}: {name}-rollout-0-0-j292r is the second"):
        _watch(job, name, LOG, _recorded(f"{name}-rollout", "server-pods"))
    named = [line for line in capfd.readouterr().out.splitlines() if "ended with" in line]
    pods = [f"{name}-rollout-0-0-{each}" for each in ("hk9nk", "j292r")]
    assert [line.split()[1] for line in named] == pods
    assert all(line.endswith(f"ended with exit code 1 before it was ready: {MISSING}") for line in named)
    assert [job.records(f"{pod}.log") for pod in pods] == [LOG, LOG]


@needs_recordings
def test_server_that_was_ready_ends_without_ending_the_run(job: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """The recorded server ran to the end of the training, and nothing is said about it."""
    name = "grpo-36612237-d24c8981"
    with pytest.raises(StopIteration):
        _watch(job, name, LOG, _recorded(f"{name}-rollout", "server-pods"))
    assert "ended with" not in capfd.readouterr().out


@needs_recordings
def test_recorded_eviction_of_a_training_pod_ends_nothing(job: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """The pod ended with 75 and another one took its place, twice: the job waits, and nothing counts as a failure."""
    name = "grpo-77012f6a-340d32d0"
    job.changes.update(nodes=1)
    job.cluster.controllers_return_s = math.inf
    with pytest.raises(StopIteration):
        _watch(job, name, "step 585", _recorded(f"{name}-node", "evicted-pods"))
    out = capfd.readouterr().out
    again = ["is waiting for its pods again", "runs again"]
    assert _said(out, name, reasons=False)[:6] == ["is waiting for its pods", "runs", *again, *again]
    assert "ended with" not in out


@needs_recordings
def test_recorded_queue_is_drained_and_opened_again(job: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """The job waits in the queue a second time, with Kueue's reason, and is complete in the end."""
    name = "grpo-46381143-81562f1c"
    job.changes.update(queue="grpo-pipeline")
    job.cluster.controllers_return_s = math.inf
    events = _recorded(name, "trainjobs", "workloads")
    assert _watch(job, name, "", events) is Phase.COMPLETE
    out, waits = capfd.readouterr().out, ["waits in the queue", "is waiting for its pods"]
    assert _said(out, name, reasons=False) == [*waits, *(f"{each} again" for each in waits), "is complete"]
    stopped = "ClusterQueueStopped: The ClusterQueue is stopped"
    assert any(stopped in line for line in _said(out, name, reasons=True))


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (LOG.splitlines(), MISSING),
        (
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "RuntimeError: See root cause"],
            "memory does not suffice: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            ["(APIServer pid=1) OSError: qwen/none is not a local folder and is not a valid model identifier"],
            "there is no such model: OSError: qwen/none is not a local folder and is not a valid model identifier",
        ),
        (["warning: may run out of memory", "KeyError: 'x'", "RuntimeError: later"], "KeyError: 'x'"),
        (["loading weights"], ""),
    ],
)
def test_cause_is_the_first_error_of_a_log(lines: list[str], cause: str) -> None:
    """In plain words where they are known; a warning of something else is no cause."""
    assert first_error(lines) == cause
