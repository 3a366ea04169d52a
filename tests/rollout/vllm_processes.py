"""What tests run with vLLM in processes of their own, which they kill, or which importing vLLM changes for good.

`python -m tests.rollout.vllm_processes FUNCTION ARGUMENTS...`
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.policy import checkpoint as checkpoints
from components.policy.lora import merged_state_dict
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.process import vllm_servers
from components.rollout.vllm.verification import StaleWeightsError, shapes, verify_weights
from tests.rollout.vllm_policies import VLLM, beside, difference, drawn, policy, servers_config

STEP = 1e-6
"""The learning rate: what a step of Adam moves each weight by."""


def servers(checkpoint: str, logs: str) -> None:
    """Run vLLM servers of a checkpoint until this process is killed, as a launcher does."""
    config = servers_config(start_deadline_s=600)
    with vllm_servers(Path(checkpoint), config, {0: None}, dtype="float32", logs=Path(logs)) as urls:
        print("urls", *urls, flush=True)
        time.sleep(600)


def engine(path: str) -> None:
    """Start vLLM for a policy, sample, load another one, and sample again; print how far both are off."""
    folder, config = Path(path), VllmConfig.model_validate({**VLLM, "start_deadline_s": 300})
    policies = [policy(seed) for seed in (1, 2)]
    for number, made in enumerate(policies):
        checkpoints.save(made, folder / str(number))
    started = beside(folder / "0", config, folder)
    differences = []
    for number, made in enumerate(policies):
        if number:
            started.set_weights(number, folder / str(number))
        differences.append(difference(drawn(started, made), made))
    started.close()
    print(json.dumps(differences))


def weights(path: str, kind: str, dtype: str) -> None:
    """Ask vLLM's own model, in one or two ranks, what it computes with: after each of some steps, right and wrong."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from components.rollout.vllm.worker import renew_output_layer

    number, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(path) / f"policy-{number}"
    checkpoint = policy(1, tied=kind == "tied")
    checkpoints.save(checkpoint, folder)
    config = _vllm_config(folder, dtype, processes)
    results: dict[str, list[str]] = {}
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(processes, number, "env://", number, "gloo")
        ensure_model_parallel_initialized(processes, 1)
        model, own_dtype = get_model(vllm_config=config), config.model_config.dtype
        sent = merged_state_dict(checkpoint.model)
        if kind == "tied":  # as in a folder, where the embeddings come once
            del sent["lm_head.weight"]
        results["started"] = _problems(model, sent, own_dtype)
        sent = _moved(sent)
        results["behind"] = _problems(model, sent, own_dtype)
        reload_weights(config, model, iter(sent.items()), None, True)
        results["loaded"] = _problems(model, sent, own_dtype)
        renew_output_layer(model)
        results["renewed"] = _problems(model, sent, own_dtype)
        both = sent | ({"lm_head.weight": sent["model.embed_tokens.weight"]} if kind == "tied" else {})
        results["by both names"] = _problems(model, both, own_dtype)
        lost = {name: each for name, each in sent.items() if name != "model.layers.0.mlp.down_proj.weight"}
        results["not sent"] = _problems(model, lost, own_dtype)
        model.get_parameter("model.norm.weight")[-1] += 0.01
        results["one element"] = _problems(model, sent, own_dtype)
        model.model.norm.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        results["another form"] = _problems(model, sent, own_dtype)
    (folder.parent / f"results-{number}.json").write_text(json.dumps(results))


def _vllm_config(folder: Path, dtype: Any, processes: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    current_platform.import_kernels()
    arguments = EngineArgs(
        str(folder), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, tensor_parallel_size=processes
    )
    return arguments.create_engine_config()


def _problems(model: nn.Module, sent: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    """What is wrong with the weights."""
    from components.rollout.vllm.worker import loaded_weights

    try:
        verify_weights(sent, [loaded_weights(model, shapes(sent), dtype)], name="vLLM")
    except StaleWeightsError as error:
        return str(error).partition(": ")[2].split("; ")
    return []


def _moved(sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights after a small step."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: each + STEP * torch.randn(each.shape, generator=generator).sign() * each.abs().clamp(min=1)
        for name, each in sent.items()
    }


if __name__ == "__main__":
    functions: dict[str, Callable[..., None]] = {"servers": servers, "engine": engine, "weights": weights}
    functions[sys.argv[1]](*sys.argv[2:])
