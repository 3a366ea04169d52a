"""The check of a served model, with real vLLM servers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from components.evaluate.worker import probes
from components.policy import checkpoint as checkpoints
from components.rollout.transformers_sampler import TransformersSampler
from components.rollout.vllm.process import ServerProcess
from components.shared.errors import PipelineError
from pipelines.serving import check_served
from tests import tiny
from tests.faults.place import within
from tests.rollout.vllm_policies import policy

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and the probes that its evaluation has stored."""
    folder = tmp_path_factory.mktemp("served") / "model"
    checkpoint = policy(1)
    checkpoints.save(checkpoint, folder)
    generate = TransformersSampler(checkpoint, 64).generate
    return folder, probes(generate, tiny.PROBLEMS, seed=1, max_new_tokens=64, dtype="float32")


@pytest.mark.long(minutes=0.6)
def test_a_server_of_the_evaluated_model_passes(evaluated: tuple[Path, dict[str, Any]]) -> None:
    """It gives the same greedy answers with the same log-probabilities."""
    served = re.fullmatch(
        r"vLLM \S+ in float32: 8 of 8 answers token for token, log-probabilities of (\d+) tokens differ by (\S+) nats "
        r"on average \(at most 0\.0001\)",
        check_served(*evaluated),
    )
    assert served is not None
    assert int(served[1]) > 50
    assert float(served[2]) <= 1e-4


@pytest.mark.long(minutes=1)
def test_a_server_of_other_weights_is_refused(evaluated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """One matrix of one layer with its signs flipped is enough."""
    folder, stored = evaluated
    checkpoint = checkpoints.load(shutil.copytree(folder, tmp_path / "model"), dtype=torch.float32)
    with torch.no_grad():
        checkpoint.model.get_parameter("model.layers.0.mlp.up_proj.weight").neg_()
    checkpoint.model.save_pretrained(tmp_path / "model")
    with pytest.raises(PipelineError, match="the served model computes something else than the evaluated one"):
        check_served(tmp_path / "model", stored)


@pytest.mark.slow
def test_a_check_that_is_interrupted_leaves_no_server(evaluated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Ctrl-C while the server starts."""
    folder, stored = evaluated
    (tmp_path / "probes.json").write_text(json.dumps(stored))
    code = "import json, sys; from pathlib import Path; from pipelines.serving import check_served; "
    code += "check_served(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))"
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "probes.json")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stderr=subprocess.DEVNULL) as check:
        assert within(60, lambda: len(_servers(folder)) > 1 or check.poll() is not None)  # its watchdog and itself
        assert check.poll() is None
        check.send_signal(signal.SIGINT)
    assert within(60, lambda: not _servers(folder))


def test_the_error_of_a_server_is_passed_on(
    evaluated: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers only refer to what it prints, and its log is gone with it."""

    @contextmanager
    def ready(servers: Sequence[ServerProcess], *deadlines: float) -> Iterator[None]:
        printed = "(Worker pid=7) ERROR RuntimeError: head_dim=16\nERROR v1.EngineDeadError: see above\n"
        servers[0].log.write_text(printed)
        with closing(servers[0]):
            yield

    def refuse(url: str, probe: Any) -> Any:
        raise PipelineError("the served model does not answer: HTTP 500")

    monkeypatch.setattr("components.rollout.vllm.process.running", ready)
    monkeypatch.setattr("pipelines.serving._answer", refuse)
    with pytest.raises(PipelineError, match=r"HTTP 500; vLLM: RuntimeError: head_dim=16$"):
        check_served(*evaluated)


def _servers(model: Path) -> list[Path]:
    """The processes that were started to serve a model."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"--model={model}".encode() in command.read_bytes():
                found.append(command)
    return found
