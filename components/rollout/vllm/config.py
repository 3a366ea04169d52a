"""Settings of vLLM: the params, and the arguments and environment variables made of them."""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from components.policy.config import LoraConfig
from components.shared.config import Config
from components.shared.environment import available_cores
from components.shared.errors import NotEnoughMemoryError, out_of_memory_in_log, out_of_memory_message

WeightsBy = Literal["folder", "nccl", "ipc"]
Synchronise = Literal["weights", "adapters"]
SamplerDtype = Literal["float32", "bfloat16", "float16"]
_ROOT = Path(__file__).parents[3]
_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of variables that would make vLLM's torch join the processes of the training run."""
_CPU_ARGUMENTS = {
    # Sequences that are computed together; more wait.
    "max_num_seqs": 256,
    # A prompt that is computed in parts stops vLLM on CPUs where its completions have seeds.
    "enable_chunked_prefill": False,
}
"""Arguments that vLLM chooses by itself on a GPU, by its memory and generation."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for the maximal rank of adapters."""
MAX_LORA_RANK = _LORA_RANKS[-1]


class _EngineConfig(Config):
    """Settings of every use of vLLM."""

    cache_gib: float = Field(16.0, gt=0)
    """GiB of memory for keys and values; sequences that do not fit wait."""
    compile: bool = True
    """Whether the model is compiled at the start: takes a minute or more, and samples faster on GPUs."""
    start_deadline_s: float = Field(1800, gt=0)
    """Time to start, load the model and compile it."""
    request_deadline_s: float = Field(1800, gt=0)
    """Time for the completions of a rollout, or for loading weights; an engine that takes longer counts as hung."""


class EnginesConfig(_EngineConfig):
    """How vLLM samples from a model that does not change."""

    num_engines: int = Field(1, gt=0)
    """Engines that share the prompts; each holds the whole model, and has GPUs of its own."""
    gpus_per_engine: int = Field(1, gt=0)
    """GPUs over which each engine splits the model; not read on a machine without GPUs."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines."""
        return self.num_engines * self.gpus_per_engine

    def for_sequences(self, max_tokens: int) -> "VllmConfig":
        """Return the settings of an engine for sequences of up to `max_tokens` tokens."""
        return _EvaluationConfig(max_tokens=max_tokens, **self.model_dump(exclude={"num_engines", "gpus_per_engine"}))


class VllmConfig(_EngineConfig):
    """How vLLM samples from a copy of the policy."""

    section: ClassVar[str] = "train_grpo.sampler.vllm"
    """Where these settings are in a params file."""

    max_tokens: int = Field(2048, gt=0)
    """Tokens of the longest sequence, prompt and completion."""
    weights_by: WeightsBy = "folder"
    """How new weights come from the trainer. `folder`: by files, in memory if it is on the same host; works everywhere.
    Without files: `nccl` from a GPU to the GPUs of a server, `ipc` within a GPU, for a server beside a rank."""
    synchronise: Synchronise = "weights"
    """What comes from the trainer after each update. `weights`: all of them, adapters merged; `adapters`: with
    `engine.lora`, the adapters alone, by files of some megabytes, which are computed beside the weights that vLLM has
    loaded at its start. Sampling is a little slower then; in bf16 nothing is lost by rounding merged weights."""

    lost_deadline_s: float = Field(600, gt=0)
    """Time without any server after which the run stops; long enough for one to restart."""
    health_deadline_s: float = Field(30, gt=0)
    """Time without an answer to /health after which a server counts as hung and is restarted. One that reports a dead
    engine, or no longer listens, is restarted at once. In pods, the liveness probe of the runtime grpo-torch-vllm
    decides instead."""

    @model_validator(mode="after")
    def _adapters_go_by_files(self) -> "VllmConfig":
        if self.synchronise == "adapters" and self.weights_by != "folder":
            raise ValueError(f"synchronise: adapters needs weights_by: folder; {self.weights_by} carries whole weights")
        return self


class ServersConfig(VllmConfig):
    """How vLLM samples in servers."""

    section: ClassVar[str] = "train_grpo.sampler.servers"
    num_servers: int = Field(1, gt=0)
    """Servers that are started; each holds the whole policy."""
    devices: list[str] | None = None
    """The GPUs of each server, such as "4,5", over which the model is split. Null on a machine without GPUs."""

    @property
    def numbered_devices(self) -> dict[int, str | None]:
        """The number of each server, with its GPUs."""
        return dict(enumerate(self.devices or [None] * self.num_servers))

    @field_validator("weights_by")
    @classmethod
    def _reaches_a_server(cls, value: WeightsBy) -> WeightsBy:
        if value == "ipc":
            raise ValueError("ipc is for a server beside each process (sampler.vllm); accepted: folder, nccl")
        return value

    @model_validator(mode="after")
    def _each_server_has_devices(self) -> "ServersConfig":
        if self.devices is not None and len(self.devices) != self.num_servers:
            raise ValueError(f"devices has {len(self.devices)} entries, but num_servers is {self.num_servers}")
        return self


class _EvaluationConfig(VllmConfig):
    section: ClassVar[str] = "evaluate.vllm"


def engine_arguments(
    config: VllmConfig, dtype: str, lora: LoraConfig | None = None, *, gpu_seed: int | None, has_tokenizer: bool = False
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine, with which it samples from exactly softmax(logits / T).

    `gpu_seed` is the seed of an engine on a GPU, different for each engine; None on CPUs, where each request has a
    seed. To synchronise adapters, `lora` must have names of layers as targets. Stop texts need `has_tokenizer`.
    """
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": config.max_tokens,
        "kv_cache_memory_bytes": int(config.cache_gib * 2**30),
        "enforce_eager": not config.compile,
        "logprobs_mode": "processed_logprobs",
        # A model's generation_config.json would bring its own top-p, top-k and penalties.
        "generation_config": "vllm",
        # Tokens in, tokens out: text is never tokenised again.
        "skip_tokenizer_init": not has_tokenizer,
        "enable_prefix_caching": True,
        "worker_extension_cls": "components.rollout.vllm.worker.WeightLoading",
        "disable_log_stats": True,
    }
    if gpu_seed is None:
        arguments |= _CPU_ARGUMENTS
    else:
        # At its start vLLM requires this share of the memory to be free; nearly all by default, even with cache_gib.
        arguments |= {"seed": gpu_seed, "gpu_memory_utilization": 0.01}
    if config.weights_by != "folder":
        arguments["weight_transfer_config"] = {"backend": config.weights_by}
    if config.synchronise == "adapters":
        assert lora is not None, "the config requires engine.lora"
        # Memory for one set of adapters: those of an older version are replaced.
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        arguments["max_lora_rank"] = min(rank for rank in _LORA_RANKS if rank >= lora.rank)
        # By default vLLM adds an adapter of the output layer, with which log-probabilities of prompts fail.
        arguments["lora_target_modules"] = lora.targets
    return arguments


def raise_if_out_of_memory(printed: str, log: Path, section: str) -> None:
    """Raise NotEnoughMemoryError if the output of vLLM, which is in `log`, shows that it ran out of memory."""
    refused = out_of_memory_in_log(printed)
    if refused is not None:
        remedies = (f"lower {section}.cache_gib", f"lower {section}.max_tokens")
        message = out_of_memory_message(refused, "the start of vLLM", *remedies)
        raise NotEnoughMemoryError(f"{message}; its output is in {log}")


def environment(config: VllmConfig, folder: str) -> dict[str, str]:
    """Return the environment variables of vLLM, whose sockets are in `folder`: its path has to be short."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    path = inherited.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": str(available_cores()),
        **inherited,
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT),
        "TMPDIR": folder,
        "VLLM_RPC_BASE_PATH": folder,
        "HF_HUB_OFFLINE": "1",
        # A fork of a process with threads may inherit a lock that nobody releases.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Threads may use any cores: if bound to cores, all engines of a machine would use the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Even with enforce_eager, vLLM compiles some functions.
        "TORCHDYNAMO_DISABLE": "0" if config.compile else "1",
    }
