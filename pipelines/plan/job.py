"""Hours of the whole job: fine-tuning, GRPO, and the evaluation of each model."""

from dataclasses import dataclass, replace

from components.preflight.config import Params
from components.prepare_data.source import FileSource
from components.shared.problem import Split
from pipelines.plan.hardware import Gpu
from pipelines.plan.run import MEAN_COMPLETION_FRACTION, Run, engine_values
from pipelines.plan.step_time import SAMPLING, SCORING, UPDATE, StepTime, step_time

_START_S = 180.0
"""Time until a stage on GPUs computes: imports, loading the model, and vLLM's compilation (assumed)."""
_TEST_PROBLEMS = 1000
"""Of a source of which no number is published, without a limit (assumed)."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Job:
    """What a job takes, by stage that uses GPUs."""

    step: StepTime
    """Of GRPO."""
    hours: dict[str, float]
    gpu_hours: dict[str, float]


def job_of(params: Params, run: Run, gpu: Gpu, disk_rate: float) -> Job:
    """Return the time of a job; what runs on fewer GPUs than training occupies the others no less."""
    step = step_time(run, gpu, disk_rate)
    num_models = 3 if params.train_sft.num_steps else 2
    seconds = {
        "train_sft": params.train_sft.num_steps * _sft_step_s(params, run, gpu),
        "train_grpo": params.train_grpo.num_steps * step.total + _validations_s(params, run, gpu),
        "evaluate": num_models * _evaluation_s(params, run, gpu),
    }
    starts = {"train_sft": 1, "train_grpo": 1, "evaluate": num_models}
    hours = {stage: (each + _START_S * starts[stage]) / _HOUR_S for stage, each in seconds.items() if each}
    return Job(step, hours, {stage: run.num_gpus * each for stage, each in hours.items()})


def _sft_step_s(params: Params, run: Run, gpu: Gpu) -> float:
    """The seconds of an optimizer step of fine-tuning, on as many GPUs."""
    config, tokens = params.train_sft, params.validate_data.max_solution_tokens
    tuning = replace(
        run,
        prompts=config.examples_per_step,
        group_size=1,
        shared_prompts=False,
        completion_tokens=tokens,
        mean_completion_tokens=MEAN_COMPLETION_FRACTION * tokens,
        minibatches=1,
        updates=1,
        num_servers=0,
        **engine_values(config.engine),
    )
    return step_time(tuning, gpu).phases[UPDATE]


def _validations_s(params: Params, run: Run, gpu: Gpu) -> float:
    """The seconds of all validations: a greedy answer to each of their problems, by the sampler of training."""
    config = params.train_grpo.validation
    if config is None:
        return 0.0
    times = 2 + (params.train_grpo.num_steps - 1) // config.every_steps
    return times * step_time(replace(run, prompts=config.num_problems, group_size=1), gpu).phases[SAMPLING]


def _evaluation_s(params: Params, run: Run, gpu: Gpu) -> float:
    """The seconds to answer the test problems with one model: once, and as often as is sampled."""
    config = params.evaluate
    published = [
        source.expected_problems(Split.TEST, None)
        if isinstance(source, FileSource)
        else source.max_problems(Split.TEST)
        for source in params.prepare_data.sources
    ]
    num_problems = sum(_TEST_PROBLEMS if number is None else number for number in published)
    answering = replace(
        run,
        num_gpus=min(config.num_gpus, run.num_gpus),
        prompts=config.limit or num_problems,
        group_size=1 + config.num_samples,
        completion_tokens=config.max_new_tokens + params.evaluation_observed_tokens,
        mean_completion_tokens=min(run.mean_completion_tokens, config.max_new_tokens),
        minibatches=1,
        num_servers=0,
        sampler="vllm" if config.vllm else "transformers",
        max_batch_size=gpu.engine_sequences if config.vllm else max(config.max_batch_size, 1 + config.num_samples),
        tensor_parallel=config.vllm.gpus_per_engine if config.vllm else 1,
        cache_bytes=config.vllm.cache_gib * 2**30 if config.vllm else 0.0,
    )
    phases = step_time(answering, gpu).phases
    return phases[SAMPLING] + phases[SCORING]
