"""Group Relative Policy Optimization: from the reference checkpoint to the policy."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from components.cluster.config import current_stage
from components.cluster.launch import run_ranks
from components.shared.custom_code import custom_code_materials, is_custom
from components.shared.environment import ON_LOOPBACK, SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.shared.images import GPU
from components.shared.lineage import Material, digest
from components.shared.model import has_tools, local_model, model_file, weights_folder
from components.shared.stage import Stage
from components.shared.watchdog import memory_folder
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.publishing import checkpoints_published


def train(
    config: TrainGRPOConfig, *, problems: Path, reference: Path, policy: Path, training: Path, timings: Path, work: Path
) -> dict[str, float]:
    """Optimise the reference checkpoint with GRPO on the training problems; return the metrics of the policy."""
    with sampling_services(config, reference, work), checkpoints_published(config, work):
        return run_ranks(
            _train_rank,
            config,
            {"problems": problems, "reference": reference, "work": work},
            {"policy": policy, "training": training, "timings": timings},
            num_processes=config.engine.num_processes,
            work=work,
            grace_s=config.checkpoint.grace_s,
            with_samplers=config.sampler.servers is not None,
        )


def _materials(config: TrainGRPOConfig) -> dict[str, Material]:
    """Return the versions of custom rewards, of the reward model's base and of the teacher, for the lineage."""
    materials = custom_code_materials(filter(is_custom, config.reward.names))
    for settings in (config.reward.model, config.teacher):
        if settings and settings.base != "reference":
            model = local_model(settings.base)
            if Path(model).exists():
                materials[settings.base] = Material(sha256=digest(Path(model)))
            else:  # a model of the hub, whose cache has a folder per commit
                commit = model_file(model, "config.json").parent.name
                materials[settings.base] = Material(repository=model, commit=commit)
    return materials


STAGE = Stage(
    name="train_grpo",
    function=train,
    config=TrainGRPOConfig,
    inputs={"problems": "prepare_data/problems", "reference": "train_sft/reference"},
    outputs=("policy", "training", "timings"),
    image=GPU,
    has_work=True,
    sources=_materials,
)


def _train_rank(config: TrainGRPOConfig, **folders: Path) -> dict[str, float]:
    """Train in this process. torch is imported here: a process that only launches others does not need it."""
    from components.train_grpo.worker import train_rank

    return train_rank(config, **folders)


@contextmanager
def sampling_services(config: TrainGRPOConfig, reference: Path, work: Path) -> Iterator[None]:
    """Run what all processes share for sampling: vLLM servers, and the folder through which weights reach vLLM.

    Environment variables tell both to the processes; servers that are named there already are used. On a cluster the
    servers are pods of the job, and the folder is on the volume.
    """
    servers, stage, weights = config.sampler.servers, current_stage(), work / "weights"
    if servers is None and config.sampler.vllm is None:
        yield
        return
    with ExitStack() as stack:
        if stage is not None:
            if servers is not None and not stage.config.rollout_servers:
                raise PipelineError("sampler.servers needs pods to run in: set cluster.rollout_servers to their number")
            weights.mkdir(exist_ok=True)
            stack.enter_context(_default_variable(WEIGHTS_VARIABLE, str(weights)))
        else:
            for name, value in ON_LOOPBACK.items():
                stack.enter_context(_default_variable(name, value))
            model = weights_folder(reference)
            folder = stack.enter_context(memory_folder(model, weights))
            stack.enter_context(_default_variable(WEIGHTS_VARIABLE, str(folder)))
            if servers is not None and SERVERS_VARIABLE not in os.environ:
                from components.rollout.vllm.process import vllm_servers

                server_urls = vllm_servers(
                    model,
                    servers,
                    servers.numbered_devices,
                    dtype=config.sampler_dtype,
                    logs=work / "servers",
                    lora=config.engine.lora,
                    has_tokenizer=has_tools(reference),
                )
                urls = stack.enter_context(server_urls)
                stack.enter_context(_default_variable(SERVERS_VARIABLE, ",".join(urls)))
        yield


@contextmanager
def _default_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the processes that are started in the block, unless it is set already."""
    is_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]
