"""Checks before the first stage of a run on this machine: data, models, rewards, trackers, disk."""

import importlib.util
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path

from rich.filesize import decimal

from components.grading.verifier import require_sandbox
from components.policy.config import TrackingConfig
from components.preflight import inputs
from components.preflight.config import Params, exceeded_limits
from components.preflight.resources import shape_of_base
from components.prepare_data.first_rows import first_problems, hub_datasets, unusable_files
from components.prepare_data.source import FileSource
from components.register.catalogue import Catalogue
from components.register.checks import list_storage, unusable_folder
from components.shared.errors import PipelineError
from components.shared.problem import Split
from components.shared.tokenizer import token_lengths
from components.shared.versioning import is_url, references
from components.validate_data.gradable import ungradable
from pipelines.base_models import with_advice

_LOOKUP_DEADLINE_S, _ANSWER_DEADLINE_S = 30.0, 10.0
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
_OPTIMIZER_BYTES = 12
"""Bytes of the optimizer for each trained parameter in a checkpoint: the weight and two moments in fp32."""


def missing_here(params: Params) -> list[str]:
    """Return a line for each thing that a run on this machine needs and would not find.

    Lookups on other machines, such as repositories and the hub, run concurrently, and have half a minute to answer.
    """
    lookups = {key: check for key, (_, check) in inputs.base_models(params).items()}
    register, repository = params.register, params.prepare_data.repository
    trackings = {"train_sft": params.train_sft.tracking, "train_grpo": params.train_grpo.tracking}
    if repository:
        lookups["prepare_data.repository.url"] = partial(references, repository.url)
    if is_url(register.registry):
        lookups["register.registry"] = partial(references, register.registry)
    lookups |= hub_datasets(params.prepare_data)
    lookups |= {
        f"{stage}.tracking.mlflow.uri": partial(_require_server, tracking.mlflow.uri)
        for stage, tracking in trackings.items()
        if tracking.mlflow and tracking.mlflow.uri.startswith("http")
    }
    if (teacher := params.train_grpo.teacher) and teacher.server:
        lookups["train_grpo.teacher.server"] = partial(_require_server, teacher.server)
    lookups["register.storage"] = partial(list_storage, register)
    if register.model_registry:
        lookups["register.model_registry"] = partial(Catalogue, register.model_registry)
    answers = inputs.run_concurrently(lookups, _LOOKUP_DEADLINE_S)
    context = answers[inputs.BASE_MODEL]  # length of the model's context, None if it has no limit, or an error
    lines = [
        *unusable_files(params.prepare_data, imitated=params.train_sft.num_steps > 0),
        *(f"{key}: {with_advice(str(answer))}" for key, answer in answers.items() if isinstance(answer, PipelineError)),
    ]
    if isinstance(answers["register.storage"], list):
        lines += answers["register.storage"]
    if isinstance(context, int):
        lines += exceeded_limits(params, context)
    if not isinstance(context, PipelineError):
        # Prompts contain the tools, so they can be measured only if these are usable.
        lines += list(inputs.unusable_tools(params)) or _exceeded_by_data(params)
    return [
        *lines,
        *inputs.unusable_rewards(params, trained_here=True),
        *inputs.unusable_environment(params, trained_here=True),
        *_missing_trackers(trackings),
        *_missing_vllm(params),
        *_refused_answers(params),
        *_missing_sandbox(params),
        *unusable_folder(register.registry),
    ]


def _require_server(url: str) -> None:
    """Raise PipelineError unless a server answers at a URL, even with an HTTP error."""
    try:
        urllib.request.urlopen(url, timeout=_ANSWER_DEADLINE_S).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError, HTTPException) as error:  # ValueError, InvalidURL: not an address
        raise PipelineError(f"{url} does not answer ({getattr(error, 'reason', error)})") from None


def _missing_trackers(trackings: Mapping[str, TrackingConfig]) -> Iterator[str]:
    """Yield a line for each tracker, named like its Python package, whose package is not installed."""
    # SFT uses the trackers of GRPO by default: a package is reported once, for the last stage that uses it.
    stages = {package: stage for stage, config in trackings.items() for package, settings in config if settings}
    for package, stage in stages.items():
        if importlib.util.find_spec(package) is None:
            yield f"{stage}.tracking.{package}: needs the Python package {package}, which is not installed"


def _missing_vllm(params: Params) -> Iterator[str]:
    """Yield a line for each section that needs vLLM, if it is not installed."""
    sampler = params.train_grpo.sampler
    engines = {"train_grpo.sampler.vllm": sampler.vllm, "train_grpo.sampler.servers": sampler.servers}
    for key, engine in {**engines, "evaluate.vllm": params.evaluate.vllm}.items():
        if engine is not None and importlib.util.find_spec("vllm") is None:
            remedy = "`make setup` installs it (Linux on x86-64, or a GPU)"
            yield f"{key}: needs vLLM, which is not installed here; {remedy}, or set {key}: null"


def _exceeded_by_data(params: Params) -> Iterator[str]:
    """Yield a line if the first problems cannot be put to the model, or for each limit that most of them exceed."""
    model, limits = params.train_sft.model, params.validate_data
    if params.prepare_data.repository:  # the data would have to be downloaded
        return
    problems = list(first_problems(params.prepare_data))
    try:
        prompts, solutions = token_lengths(model, problems)
    except PipelineError as error:
        yield f"train_sft.model: {error}"
        return
    if model.scratch:  # the tokenizer of a run is made from all problems
        return
    rows = zip(problems, prompts, solutions, strict=True)
    examples = [prompt + solution + 1 for each, prompt, solution in rows if each.split == Split.TRAIN]  # 1: end token
    checks = [("validate_data.max_prompt_tokens", limits.max_prompt_tokens, "prompts", prompts)]
    if params.train_sft.num_steps:
        checks.append(("train_sft.max_tokens", params.train_sft.max_tokens, "prompts with their solutions", examples))
    for key, limit, texts, tokens in checks:
        num_longer = sum(each > limit for each in tokens)
        if 2 * num_longer > len(tokens):
            yield f"{key}: is {limit:,}, and {num_longer} of the first {len(tokens)} {texts} have up to {max(tokens):,}"


def _refused_answers(params: Params) -> Iterator[str]:
    """Yield a line about the answers in the first rows of the files that data validation would refuse."""
    file_sources = [source for source in params.prepare_data.sources if isinstance(source, FileSource)]
    if file_sources and not params.prepare_data.repository:  # a repository would have to be downloaded
        problems = [*first_problems(params.prepare_data.model_copy(update={"sources": file_sources}))]
        if defect := ungradable(problems, params.train_sft.model.answer, imitated=params.train_sft.num_steps > 0):
            yield f"prepare_data.sources: among the first rows, {defect}"


def _missing_sandbox(params: Params) -> Iterator[str]:
    """Yield a line if the data need a sandbox for code, and this machine cannot run one."""
    if any(source.kind == "mbpp" for source in params.prepare_data.sources):
        try:
            require_sandbox()
        except PipelineError as error:
            yield f"prepare_data.sources: mbpp has code to run: {error}"


def short_of_disk(params: Params, outputs: Path) -> str | None:
    """Return a line if a run does not fit on the disk of `outputs`; None if it fits or the model's size is unknown.

    It counts the models that a run keeps and the checkpoints of the stage with more bytes of them, including the one
    that is being written, but not data, reports and adapters.
    """
    shape = shape_of_base(params)
    if shape is None:
        return None
    sft, grpo = params.train_sft, params.train_grpo
    # The policy, the reference if it is trained, and the base model if it is made; an existing one is not copied.
    num_models = 1 + (1 if sft.num_steps else 0) + (1 if sft.model.scratch else 0)
    element_bytes = max(_ELEMENT_BYTES[engine.precision] for engine in (sft.engine, grpo.engine))
    models = num_models * element_bytes * shape.num_parameters
    per_parameter = 0  # bytes of a stage's checkpoints
    for stage in (sft, grpo):
        if stage.num_steps and not stage.engine.lora:
            num_checkpoints = stage.checkpoint.keep_last + (2 if stage.checkpoint.keep_best else 1)
            state_bytes = _OPTIMIZER_BYTES + _ELEMENT_BYTES[stage.engine.precision]
            per_parameter = max(per_parameter, num_checkpoints * state_bytes)
    checkpoints = per_parameter * shape.num_parameters
    folder = next(path for path in (outputs.resolve(), *outputs.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if models + checkpoints <= free:
        return None
    return (
        f"{folder}: {decimal(free)} are free, and a run takes about {decimal(models + checkpoints)} there "
        f"({decimal(models)} for models, {decimal(checkpoints)} for checkpoints); make room, or lower "
        "checkpoint.keep_last"
    )
