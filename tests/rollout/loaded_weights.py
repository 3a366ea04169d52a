"""Asks vLLM's own model, in one or two processes, what it computes with: before and after loading, rightly and wrongly.

`torchrun -m tests.rollout.loaded_weights FOLDER tied|untied DTYPE`; each process writes a file `held-RANK.json`.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from components.policy import checkpoint as checkpoints
from components.policy.lora import merged_state_dict
from components.rollout.vllm.loaded_weights import loaded_weights, renew_output_layer
from components.rollout.vllm.verification import StaleWeightsError, shapes, verify_weights
from tests.rollout.vllm_policies import policy

_STEP = 1e-6
"""The learning rate: what a step of Adam moves each weight by."""


def _started(folder: Path, dtype: str, processes: int) -> VllmConfig:
    _set_torch_accelerator_to_noop()
    current_platform.import_kernels()
    arguments = EngineArgs(
        model=str(folder), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, tensor_parallel_size=processes
    )
    return arguments.create_engine_config()


def _said(model: nn.Module, sent: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    """What is wrong with the weights."""
    held = loaded_weights(model, shapes(sent), dtype)
    try:
        verify_weights(sent, [held], name="vLLM")
    except StaleWeightsError as error:
        return str(error).partition(": ")[2].split("; ")
    return []


def _moved(sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights after a small step; those that are the same tensor stay it."""
    generator = torch.Generator().manual_seed(1)
    moved = {
        id(each): each + _STEP * torch.randn(each.shape, generator=generator).sign() * each.abs().clamp(min=1)
        for each in sent.values()
    }
    return {name: moved[id(each)] for name, each in sent.items()}


def main(folder: Path, tied: bool, dtype: str) -> None:
    """Write what is said of the weights after each of the steps."""
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made = policy(1, tied=tied)
    checkpoints.save(made, folder / f"policy-{rank}")
    config = _started(folder / f"policy-{rank}", dtype, processes)
    found: dict[str, Any] = {}
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(processes, rank, "env://", rank, "gloo")
        ensure_model_parallel_initialized(processes, 1)
        model, own_dtype = get_model(vllm_config=config), config.model_config.dtype
        sent = merged_state_dict(made.model)
        if tied:  # as in a folder, where the embeddings come once
            del sent["lm_head.weight"]
        found["started"] = _said(model, sent, own_dtype)
        sent = _moved(sent)
        found["behind"] = _said(model, sent, own_dtype)
        reload_weights(config, model, iter(sent.items()), None, True)
        found["loaded"] = _said(model, sent, own_dtype)
        renew_output_layer(model)
        found["renewed"] = _said(model, sent, own_dtype)
        both = sent | {"lm_head.weight": sent["model.embed_tokens.weight"]} if tied else sent
        found["by both names"] = _said(model, both, own_dtype)
        lost = "model.layers.0.mlp.down_proj.weight"
        found["not sent"] = _said(model, {name: each for name, each in sent.items() if name != lost}, own_dtype)
        model.get_parameter("model.norm.weight")[-1] += 0.01
        found["one element"] = _said(model, sent, own_dtype)
        model.model.norm.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        found["another form"] = _said(model, sent, own_dtype)
    (folder / f"held-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "tied", sys.argv[3])
