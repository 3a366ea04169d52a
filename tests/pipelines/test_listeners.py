"""Who can reach the processes of a run on this machine."""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.processes import listeners
from tests.pipelines.project import copy_project

PARAMS = """
extends: distributed.yaml
train_sft: {num_steps: 2, warmup_steps: 1}
train_grpo: {num_steps: 100, validation: null}
"""
MAY_LISTEN = {
    "components.cluster.rank": "gloo, whose tensors are numbers: objects are signed",
    "VLLM::Worker": "gloo in groups of one, which wait for nobody",
}
"""What listens on loopback, and why no other user is obeyed there."""


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _descendants(int(child))


@pytest.mark.long(minutes=3)
def test_a_run_listens_on_loopback_alone_and_only_where_it_must(tmp_path: Path) -> None:
    """Neither the launchers of ranks nor vLLM's servers listen at any port."""
    project = copy_project(tmp_path / "project")
    (project.folder / "params/listeners.yaml").write_text(PARAMS)
    seen: set[str] = set()
    process = project.start("run", "--params", "params/listeners.yaml")
    try:
        deadline = time.monotonic() + 300
        while seen != set(MAY_LISTEN):  # both at once
            seen = set()
            assert process.poll() is None, "the run has ended"
            assert time.monotonic() < deadline, "ranks and servers do not run beside each other"
            for pid in _descendants(process.pid):
                with suppress(FileNotFoundError, ProcessLookupError):
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    ports = listeners(pid)
                    assert all(ports.values()), command
                    if ports:
                        seen.add(next((name for name in MAY_LISTEN if name in command), command))
            assert seen <= set(MAY_LISTEN)
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
