"""What a person reads while the pods of a job end before they are ready."""

import json
from dataclasses import replace

import pytest

from components.cluster.failures import first_error
from components.cluster.kube import Json, TrainJobs, connect
from components.cluster.watch import Watch
from components.shared.errors import PipelineError
from tests.cluster.launched import Launched, add_train_job, clock_of
from tests.fake_cluster.store import key_of
from tests.pipelines.cluster.recorded import RECORDINGS

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
    """The recorded pods of a job in the fake cluster: one change each time that the watch sleeps."""

    def __init__(self, job: Launched, name: str, log: str) -> None:
        lines = (RECORDINGS / "third-trial" / "server-pods.jsonl").read_text().splitlines()
        every = list(map(json.loads, lines))
        self._events = iter(each for each in every if each["object"]["metadata"]["name"].startswith(name))
        self._job, self._log, self._has_log = job, log, set[str]()

    def sleep(self, seconds: float) -> None:
        """Let time pass, and the next thing happen."""
        self._job.server.clock.advance(seconds)
        event, store = next(self._events), self._job.cluster.store
        pod: Json = event["object"]
        with store.clock.changed:
            pod["metadata"] |= {"namespace": self._job.server.namespace}
            pod["metadata"].pop("ownerReferences", None)
            key = key_of(pod)
            if event["type"] == "DELETED":
                store.remove(key)
            elif event["type"] == "ADDED":
                store.create(pod)
            else:
                store.replace(pod)
        has_ended = "terminated" in str(pod["status"].get("containerStatuses"))
        if has_ended and pod["metadata"]["uid"] not in self._has_log:
            self._has_log.add(pod["metadata"]["uid"])
            self._job.cluster.print(pod, *self._log.splitlines(), container=pod["spec"]["containers"][0]["name"])


def _watch(job: Launched, name: str, log: str) -> None:
    add_train_job(job.server, name, {})
    jobs = TrainJobs(connect(), job.server.namespace)
    found = jobs.get(name)
    assert found is not None
    clock = replace(clock_of(job.server), sleep=Replay(job, f"{name}-rollout", log).sleep)
    watch = Watch(jobs, job.stage, clock, found)
    try:
        watch.until_end()
    finally:
        watch.stop()


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
def test_second_server_that_ends_for_the_same_reason_ends_the_run(
    job: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recorded servers lacked a library, which a warning in the middle of their logs names."""
    with pytest.raises(PipelineError, match=f"^{MISSING}: grpo-9d5493e1-f0973707-rollout-0-0-j292r is the second"):
        _watch(job, "grpo-9d5493e1-f0973707", LOG)
    named = [line for line in capfd.readouterr().out.splitlines() if "ended with" in line]
    pods = [f"grpo-9d5493e1-f0973707-rollout-0-0-{each}" for each in ("hk9nk", "j292r")]
    assert [line.split()[1] for line in named] == pods
    assert all(line.endswith(f"ended with exit code 1 before it was ready: {MISSING}") for line in named)
    assert [job.records(f"{pod}.log") for pod in pods] == [LOG, LOG]


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
def test_server_that_was_ready_ends_without_ending_the_run(job: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """The recorded server ran to the end of the training, and nothing is said about it."""
    with pytest.raises(StopIteration):
        _watch(job, "grpo-36612237-d24c8981", LOG)
    assert "ended with" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (LOG.splitlines(), MISSING),
        (
            [
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
                "RuntimeError: See root cause above",
            ],
            "memory does not suffice: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (
            ["(APIServer pid=1) OSError: qwen/none is not a local folder and is not a valid model identifier"],
            "there is no such model: OSError: qwen/none is not a local folder and is not a valid model identifier",
        ),
        (["warning: may run out of memory", "KeyError: 'x'", "RuntimeError: later"], "KeyError: 'x'"),
        (["loading weights"], ""),
    ],
    ids=["library", "memory", "model", "first error", "no error"],
)
def test_cause_is_the_first_error_of_a_log(lines: list[str], cause: str) -> None:
    """In plain words where they are known; a warning of something else is no cause."""
    assert first_error(lines) == cause
