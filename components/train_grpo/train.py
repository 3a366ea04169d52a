"""Group Relative Policy Optimization: from the reference checkpoint to the policy."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from components.cluster.config import current_stage
from components.cluster.launch import run_ranks
from components.shared import durable
from components.shared.custom_code import custom_code_materials, is_custom
from components.shared.environment import ON_LOOPBACK, SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.shared.images import GPU
from components.shared.lineage import Material, digest
from components.shared.model import has_tools, local_model, model_file, weights_folder
from components.shared.progress import say
from components.shared.stage import Stage
from components.shared.watchdog import memory_folder, watched
from components.train_grpo.config import TrainGRPOConfig

_STAGING, _LOCK = "publishing-", "run.lock"
"""Prefix of a run's staging folder in its work folder, and the file by which the run locks it."""
_LAST_PUSH_S, _LAST_PUSH_OF_FAILED_S = 600.0, 20.0
"""Time to push the last checkpoint after the end of training, and after a failure or a request to stop."""


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


@contextmanager
def checkpoints_published(config: TrainGRPOConfig, work: Path) -> Iterator[None]:
    """Push the checkpoints written into `work` in the background while the block runs, then wait for the last push.

    Failed pushes do not fail the training. The pushing process ends with this one, even if this one is killed.
    """
    settings = config.checkpoint
    if not config.publishes_checkpoints:
        yield
        return
    _remove_abandoned(work)
    # A random name: another run of the same work, for which this one waits in a queue, may have its own folder there.
    staging = work / f"{_STAGING}{secrets.token_hex(4)}"
    lock = durable.lock_folder(staging / _LOCK, wait=True)
    command = [sys.executable, "-m", "components.register.checkpoints", "--work", str(work), "--staging", str(staging)]
    command += ["--registry", config.registry, "--keep-last", str(settings.keep_in_registry)]
    command += ["--storage", config.storage] if config.storage else []
    command += ["--storage-endpoint", config.storage_endpoint] if config.storage_endpoint else []
    command += ["--keep-best"] if settings.keep_best else []
    limit_s = _LAST_PUSH_OF_FAILED_S
    # A new session, because Ctrl-C is for the training. The watchdog ends it when this end of the pipe is closed.
    with subprocess.Popen(watched(staging, command), stdin=subprocess.PIPE, start_new_session=True) as publisher:
        try:
            yield
            limit_s = _LAST_PUSH_S
        finally:
            try:
                (staging / "end").touch()
            except FileNotFoundError:  # another run has finished the work and removed the work folder
                publisher.kill()
            try:
                publisher.wait(limit_s)
            except subprocess.TimeoutExpired:
                say("train_grpo", f"warning: the last checkpoint is not in the registry: no end within {limit_s:g} s")
            durable.remove(staging)
            lock.release()


def _remove_abandoned(work: Path) -> None:
    """Remove the staging folders of runs that were killed together with their watchdog, as with their pod."""
    for staging in work.glob(f"{_STAGING}*"):
        with suppress(durable.InUseError, OSError):  # it is in use, or belongs to another user
            lock = durable.lock_folder(staging / _LOCK)
            durable.remove(staging)
            lock.release()
