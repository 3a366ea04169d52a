"""What a run reads before anything else: raw files, base models, rewards of the user's own, repositories."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from components.grading.verifier import Verifier, require_sandbox
from components.preflight.config import Params, exceeded_limits
from components.preflight.remotes import references
from components.prepare_data.config import PrepareConfig
from components.prepare_data.source import FileSource, MalformedRow
from components.register.catalogue import Catalogue
from components.register.registry import is_url
from components.shared.errors import PipelineError
from components.shared.model import context_tokens, model_config
from components.shared.problem import Split
from components.train_grpo.custom_rewards import import_errors, is_custom

Check = Callable[[], Any]

_BASE_MODEL = "train_sft.model.base"
_DEADLINE_S = 30.0
_NUM_ROWS_TRIED = 20
"""From the beginning of each file: enough to see that it is of another format."""


def missing_here(params: Params, *, containers: bool = False) -> list[str]:
    """Return a line for each thing that a run on this machine needs and would not find.

    With `containers` its stages run in their images, which may hold more than this environment.
    What is looked up elsewhere (repositories, the hub) is requested concurrently, and has half a minute to answer.
    """
    answers = run_concurrently(_lookups(params), _DEADLINE_S)
    context = answers[_BASE_MODEL]
    return [
        *_files(params.prepare_data),
        *(f"{key}: {answer}" for key, answer in answers.items() if isinstance(answer, PipelineError)),
        *(exceeded_limits(params, context) if isinstance(context, int) else []),
        *unusable_rewards(params, trained_here=not containers),
        *([] if containers else _sandbox(params)),
        *_registry(params.register.registry),
    ]


def base_models(params: Params) -> dict[str, tuple[str, Check]]:
    """Return each model that a run starts from, by key, with its check; that of the policy returns its context."""
    base, reward_model = params.train_sft.model.base, params.train_grpo.reward.model
    models: dict[str, tuple[str, Check]] = {_BASE_MODEL: (base, partial(context_tokens, base))}
    if reward_model and reward_model.base != "reference":
        models["train_grpo.reward.model.base"] = (reward_model.base, partial(model_config, reward_model.base))
    return models


def unusable_rewards(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each reward of the user's own that cannot be loaded."""
    custom = [name for name in params.train_grpo.reward.weights if is_custom(name)]
    return import_errors(custom, trained_here=trained_here)


def run_concurrently(checks: Mapping[str, Check], deadline_s: float) -> dict[str, Any]:
    """Return what each check returns, or the PipelineError that it raised, or one that says it timed out.

    Nobody waits longer than `deadline_s`: threads that hang are left behind, and end with the process.
    """
    results: dict[str, Any] = {}

    def run(name: str, check: Check) -> None:
        try:
            results[name] = check()
        except Exception as error:  # raised below, if it is not meant for people
            results[name] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = PipelineError(f"no answer within {deadline_s:g} s; the network or a service is down")
    answers = {name: results.get(name, late) for name in checks}
    for answer in answers.values():
        if isinstance(answer, Exception) and not isinstance(answer, PipelineError):
            raise answer
    return answers


def _lookups(params: Params) -> dict[str, Check]:
    """What is requested from elsewhere, by key."""
    register, repository = params.register, params.prepare_data.repository
    checks = {key: check for key, (_, check) in base_models(params).items()}
    if repository:
        checks["prepare_data.repository.url"] = partial(references, repository.url)
    if is_url(register.registry):
        checks["register.registry"] = partial(references, register.registry)
    if register.model_registry:
        checks["register.model_registry"] = partial(Catalogue, register.model_registry)
    return checks


def _files(config: PrepareConfig) -> Iterator[str]:
    if config.repository:
        return
    with Verifier() as verify:
        for index, source in enumerate(config.sources):
            if not isinstance(source, FileSource):
                continue
            for split in Split:
                if source.path(split) and (wrong := _unreadable(source, split, verify)):
                    yield f"prepare_data.sources.{index}.{split}: {wrong}"


def _unreadable(source: FileSource, split: Split, verify: Verifier) -> str | None:
    """Say why the raw file of a split cannot be used, as far as its first rows show."""
    try:
        rows = list(islice(source.read(split, Path(), verify), _NUM_ROWS_TRIED))
    except PipelineError as error:
        return str(error)
    if not rows:
        return f"{source.path(split)}: contains no row"
    malformed = [row for row in rows if isinstance(row, MalformedRow)]
    if len(malformed) < len(rows):
        return None
    file, line, reason = malformed[0]
    return f"{source.path(split)}: none of its first {len(rows)} rows can be used; {file}:{line}: {reason}"


def _sandbox(params: Params) -> Iterator[str]:
    if any(source.kind == "mbpp" for source in params.prepare_data.sources):
        try:
            require_sandbox()
        except PipelineError as error:
            yield f"prepare_data.sources: mbpp has code to run: {error}"


def _registry(location: str) -> Iterator[str]:
    if not is_url(location) and Path(location).exists() and not Path(location).is_dir():
        yield f"register.registry: {location} is not a folder"
