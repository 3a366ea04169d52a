import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from components.policy import checkpoint as checkpoints
from components.policy.checkpoint import Checkpoint
from components.policy.config import LoraConfig
from components.policy.lora import add_adapters, save_adapters
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.servers import VllmServers
from components.rollout.vllm.verification import StaleWeightsError, shapes, verify_weights, weights_in
from tests.rollout.vllm_policies import VLLM, beside, difference, drawn, largest_difference, policy, trainer_logprobs

_CONFIG = VllmConfig.model_validate({**VLLM, "start_deadline_s": 300, "synchronise": "adapters"})
_STEP = 1e-6
"""The learning rate: what a step of Adam moves each weight by."""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkpoint, VllmServers, Path]]:
    """A policy with a tied output layer and adapters, an engine that holds its base, and a folder."""
    folder = tmp_path_factory.mktemp("adapters")
    checkpoint = policy(1, tied=True)
    checkpoints.save(checkpoint, folder / "base")
    lora = LoraConfig(rank=4, alpha=6.0)
    engine = beside(folder / "base", _CONFIG, folder, lora=lora)
    add_adapters(checkpoint.model, lora, seed=1)
    yield checkpoint, engine, folder
    engine.close()


def _moved(checkpoint: Checkpoint, folder: Path, version: int, size: float) -> Path:
    """Save the adapters after a step that moves each element by about `size`."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, weight in checkpoint.model.named_parameters():
            if "lora_" in name:
                weight.add_(size * torch.randn(weight.shape, generator=generator))
    (folder / str(version)).mkdir()
    save_adapters(checkpoint.model, folder / str(version))
    return folder / str(version)


def _differences(checkpoint: Checkpoint, engine: VllmServers) -> list[float]:
    """The largest differences from the trainer's log-probabilities, of sampled tokens and of those it is asked for."""
    completions = drawn(engine, checkpoint)
    tokens = [completion.tokens for completion in completions]
    exact, scores = trainer_logprobs(checkpoint, tokens, 1.0), engine.score(tokens, 1.0)
    return [difference(completions, checkpoint), *(largest_difference(each, exact) for each in scores.values())]


@pytest.mark.slow
def test_the_engine_samples_with_each_version_of_the_adapters(adapted: tuple[Checkpoint, VllmServers, Path]) -> None:
    """New ones change nothing; later ones replace those before, in whatever was computed of a prompt as well."""
    checkpoint, engine, folder = adapted
    for version, size in enumerate((0.0, 0.05, 0.05)):
        engine.set_weights(version, _moved(checkpoint, folder, version, size))
        assert max(_differences(checkpoint, engine)) < 1e-4


@pytest.mark.slow
def test_all_but_the_adapters_sent_is_refused(adapted: tuple[Checkpoint, VllmServers, Path], tmp_path: Path) -> None:
    """A step of 1e-6 that did not arrive, one that was scaled, a layer that was left out, and another base."""
    checkpoint, engine, folder = adapted
    current = _moved(checkpoint, folder, 10, 0.0)
    engine.set_weights(10, current)
    behind = weights_in(_moved(checkpoint, folder, 11, _STEP))

    def verify(sent: dict[str, torch.Tensor]) -> None:
        (server,) = engine._servers
        verify_weights(sent, server.call_workers("loaded_weights", shapes=shapes(sent)), name="vLLM")

    with pytest.raises(StaleWeightsError, match=r"adapter of model\.layers\.0\.self_attn\.qkv_proj differs from the"):
        verify(behind)
    scaled = tmp_path / "scaled"
    shutil.copytree(folder / "11", scaled)
    settings = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 2 * settings["r"]}))
    with pytest.raises(StaleWeightsError, match=r"differs from the .*lora_B\.weight that was sent"):
        engine.set_weights(12, scaled)
    engine.set_weights(13, folder / "11")
    sent = {name: each for name, each in behind.items() if "layers.0.mlp.down_proj" not in name}
    with pytest.raises(StaleWeightsError, match=r"adapter of model\.layers\.0\.mlp\.down_proj has elements that were"):
        verify(sent)
    with pytest.raises(StaleWeightsError, match=r"base_model\.model\.other\.lora_A\.weight is not loaded"):
        verify({**behind, "base_model.model.other.lora_A.weight": torch.ones(4, 8)})
    base = weights_in(folder / "base")
    with pytest.raises(StaleWeightsError, match=r"lm_head\.weight differs from the model\.embed_tokens\.weight"):
        verify({**base, "model.embed_tokens.weight": base["model.embed_tokens.weight"] + _STEP})
