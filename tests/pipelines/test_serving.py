"""The check of a served model, with real vLLM servers."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from components.evaluate.worker import probes
from components.policy import checkpoint as checkpoints
from components.rollout.transformers_sampler import TransformersSampler
from components.rollout.vllm.process import ServerProcess
from components.shared.errors import PipelineError
from pipelines.promotion import check_served
from tests import tiny
from tests.rollout.vllm_policies import policy


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
        r"vLLM \S+ in float32: 8 of 8 answers have the same tokens as in evaluation; "
        r"log-probabilities of (\d+) tokens differ by (\S+) nats on average \(limit 0\.0001\)",
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
    monkeypatch.setattr("pipelines.promotion._answer", refuse)
    with pytest.raises(PipelineError, match=r"HTTP 500; vLLM: RuntimeError: head_dim=16$"):
        check_served(*evaluated)
