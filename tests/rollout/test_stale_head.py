"""Real vLLM engines beside this process whose output layer does not follow the weights that are sent."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.policy import checkpoint as checkpoints
from components.policy.lora import merged_state_dict
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.engine import VllmEngine
from components.rollout.vllm.verification import StaleWeightsError
from tests.rollout.vllm_policies import QUESTIONS, largest_difference, policy, sampler, trainer_logprobs

_ROOT = Path(__file__).parents[2]
_CONFIG = VllmConfig(
    max_tokens=512, cache_gib=0.25, compile=False, start_deadline_s=500, request_deadline_s=120, weights_by="gloo"
)


def keep_head(worker: Any) -> None:
    """Have vLLM's worker forget to renew the output layer, as vLLM itself does on CPUs."""
    from components.rollout.vllm import gloo
    from components.rollout.vllm import worker as vllm_worker

    assert worker.weights_version is not None
    modules: list[Any] = [gloo, vllm_worker]
    for module in modules:
        module.renew_output_layer = lambda _: None


def _said(load: Callable[[], None]) -> str:
    """What is wrong with the weights after they were loaded."""
    try:
        load()
    except StaleWeightsError as error:
        return str(error)
    return ""


def main(folder: Path, kind: str) -> None:
    """Take a step of 1e-6, load it by both ways, rightly and without the output layer; write what was found."""
    made = policy(1, tied=kind == "tied")
    checkpoints.save(made, folder / "old")
    engine = VllmEngine(folder / "old", _CONFIG, dtype="float32", log=folder / "vllm.log")
    found: dict[str, Any] = {}
    for version, name in ((1, "right"), (3, "stale")):
        with torch.no_grad():
            for weight in made.model.parameters():
                weight.add_(1e-6 * torch.randn_like(weight).sign())
        checkpoints.save(made, folder / name)
        sent = merged_state_dict(made.model)
        if kind == "tied":  # sent by its own name as well, the output layer would be renewed
            del sent["lm_head.weight"]
        if name == "stale":
            engine._llm.collective_rpc(keep_head)
        found[f"{name} folder"] = _said(lambda: engine.load_weights(folder / name, version))  # noqa: B023
        found[f"{name} sent"] = _said(lambda: engine.receive_weights(sent, version + 1))  # noqa: B023
        groups = sampler(engine, made).generate(QUESTIONS, num_samples=4, temperature=1.0, max_new_tokens=20, seed=1)
        drawn = [completion for group in groups for completion in group]
        exact = trainer_logprobs(made, [each.tokens for each in drawn], 1.0)
        found[f"{name} mismatch"] = largest_difference([list(each.logprobs) for each in drawn], exact)
    engine.close()
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_an_output_layer_that_is_one_small_step_behind_is_named(kind: str) -> None:
    """By its log-probabilities nobody would notice; with its output layer renewed, or one of its own, it passes."""
    with tempfile.TemporaryDirectory(prefix="head-", dir="/tmp") as folder:  # short: there are sockets in it
        command = [sys.executable, "-m", "tests.rollout.test_stale_head", folder, kind]
        own = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # so that a function can be sent to the worker
        ended = subprocess.run(command, cwd=_ROOT, env=os.environ | own, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        found = json.loads((Path(folder) / "found.json").read_text())
    print(found)
    assert not found["right folder"]
    assert not found["right sent"]
    assert max(found["right mismatch"], found["stale mismatch"]) < 1e-3
    for way in ("stale folder", "stale sent"):
        assert ("lm_head.weight differs" in found[way]) == (kind == "tied"), found[way]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
