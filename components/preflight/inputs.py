"""Checks of what a run needs besides the cluster: data, models, rewards, environments, images, secrets."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from components.environments.pool import environment_error
from components.evaluate.protocols import PROTOCOLS
from components.preflight.config import TOOLS, Params
from components.preflight.form import OVERRIDES, Form, overrides_of
from components.prepare_data.first_rows import first_problems
from components.shared.chat import prompt_format
from components.shared.config import HOLDS_SECRET, keys_with_secrets, named
from components.shared.custom_code import is_custom
from components.shared.deployment import OPTIONAL_SECRET_KEYS, SECRET_KEYS, DeploymentConfig, SecretsConfig
from components.shared.errors import PipelineError
from components.shared.model import ChatConfig, context_tokens, model_config, require_weights
from components.shared.problem import Split
from components.shared.tool_use import wrong_tools
from components.train_grpo.config import EXPECTED_CLASSIFIER
from components.train_grpo.custom_rewards import reward_errors
from components.train_sft.config import TrainSFTConfig

Check = Callable[[], Any]

BASE_MODEL = "train_sft.model.base"
_WITHOUT_SCORE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of architectures' names
_NUM_TRIALS = 3  # problems for which an environment is tried: it may reject some, such as those with words as answers
_FIXED_TAG = re.compile(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$")


def base_models(params: Params) -> dict[str, tuple[str, Check]]:
    """Return the models that a run starts from, by key, with a check for each.

    The check of the policy's base model returns its context in tokens.
    """
    base, reward_model = params.train_sft.model.base, params.train_grpo.reward.model
    models: dict[str, tuple[str, Check]] = {BASE_MODEL: (base, partial(_context, params.train_sft))}
    if reward_model and reward_model.base != "reference":
        models["train_grpo.reward.model.base"] = (reward_model.base, partial(_require_classifier, reward_model.base))
    if teacher := params.train_grpo.teacher:
        models["train_grpo.teacher.base"] = (teacher.base, partial(require_weights, teacher.base))
    return models


def _require_classifier(base: str) -> None:
    """Raise PipelineError unless a model has its files, and is not of a kind that has no score."""
    for kind in model_config(base).get("architectures") or ():
        if kind.endswith(_WITHOUT_SCORE):
            raise PipelineError(f"{base}: is a {kind}; {EXPECTED_CLASSIFIER}")
    require_weights(base)


def _context(config: TrainSFTConfig) -> int | None:
    """Return the base model's context in tokens; PipelineError if its chat template cannot be used as configured."""
    context = context_tokens(config.model.base)
    if not config.model.scratch:
        require_weights(config.model.base)
    template = prompt_format(config.model.model_copy(update={"tools": None}))  # `unusable_tools` checks the tools
    template.prompt("1 + 1?")
    if config.num_steps:
        template.require_answers()
    return context


def unusable_rewards(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each custom reward, judge or teacher that cannot be used; if `trained_here`, call rewards."""
    reward, teacher = params.train_grpo.reward, params.train_grpo.teacher
    for name, service in {"reward.judge": reward.judge, "teacher": teacher}.items():
        if service and service.key_variable and service.key_variable not in os.environ:
            return [f"train_grpo.{name}.key_variable: the environment has no {service.key_variable}"]
    judge = reward.judge.model_dump(mode="json") if reward.judge else None
    custom = list(filter(is_custom, reward.names))
    problem = None
    if trained_here and (custom or judge):
        problem = next(first_problems(params.prepare_data), None)
    return reward_errors(
        custom, supervision=reward.supervision, trained_here=trained_here, judge=judge, problem=problem
    )


def unusable_environment(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each environment that fails; unless `trained_here`, custom ones are only created."""
    environments = {TOOLS: params.train_sft.model.tools}
    if params.evaluation_tools != environments[TOOLS]:
        environments["evaluate.tools"] = params.evaluation_tools
    lines = []
    for section, tools in environments.items():
        if tools is not None and (trained_here or is_custom(tools.environment)):
            problems = list(islice(first_problems(params.prepare_data), _NUM_TRIALS)) if trained_here else []
            error = environment_error(tools, used_here=trained_here, problems=problems)
            if error is not None:
                lines.append(error.replace(TOOLS, section))
    return lines


def unusable_tools(params: Params) -> Iterator[str]:
    """Yield a line for each error in the tools of training, and in those of evaluation if tools or prompts differ."""
    trained, protocol = params.train_sft.model, PROTOCOLS[params.evaluate.protocol]
    yield from wrong_tools(trained, TOOLS, _coding_sources(params, tuple(Split)))
    changes: dict[str, object] = {"tools": params.evaluation_tools}
    if protocol.prompt is not None:  # otherwise evaluation has the prompt of training
        changes["chat"] = ChatConfig(system=params.evaluate.system_prompt) if protocol.chat else None
    evaluated = trained.model_copy(update=changes)
    if evaluated != trained:
        yield from wrong_tools(evaluated, "evaluate.tools", _coding_sources(params, (params.evaluate.split,)))


def _coding_sources(params: Params, splits: Sequence[Split]) -> list[str]:
    """Return the names of the sources that have programming problems, with unit tests, in some of the splits."""
    coding = [source for source in params.prepare_data.sources if source.kind == "mbpp"]
    return [source.name for source in coding if any(source.max_problems(split) != 0 for split in splits)]


def run_concurrently(checks: Mapping[str, Check], deadline_s: float) -> dict[str, Any]:
    """Return the result of each check by name, or its PipelineError: also that it has not ended within `deadline_s`."""
    results: dict[str, Any] = {}

    def run(name: str, check: Check) -> None:
        try:
            results[name] = check()
        except Exception as error:  # raised below in this thread, unless it is a PipelineError
            results[name] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    timeout = PipelineError(f"no answer within {deadline_s:g} s; the network or a service is down")
    answers = {name: results.get(name, timeout) for name in checks}
    for answer in answers.values():
        if isinstance(answer, Exception) and not isinstance(answer, PipelineError):
            raise answer
    return answers


def mutable_images(deployment: DeploymentConfig) -> list[str]:
    """Return a line for each mutable image reference: Kubeflow's cache would not notice another image of that name."""
    images = {"image_gpu": deployment.image_gpu, "image_light": deployment.image_light}
    return [
        f"deployment.{key}: {image} is a mutable reference; use an immutable tag or a digest"
        for key, image in images.items()
        if _FIXED_TAG.search(image) is None
    ]


def passwords(form: Form) -> list[str]:
    """Return an error for each URL in the form that contains a password: Kubeflow stores and displays parameters."""
    return [f"{named(keys)}: {HOLDS_SECRET}" for keys in keys_with_secrets({**form, OVERRIDES: overrides_of(form)})]


def training_secrets(deployment: DeploymentConfig) -> dict[str, list[str]]:
    """Return the keys of the secrets for training pods, by the secret's name, as far as this process has them."""
    secrets: dict[str, list[str]] = {}
    for kind in ("hub", "judge", "tracking"):
        keys = [key for key in (*SECRET_KEYS[kind], *OPTIONAL_SECRET_KEYS.get(kind, ())) if key in os.environ]
        if keys:
            secrets[getattr(deployment.secrets, kind)] = keys
    return secrets


def missing_secrets(deployment: DeploymentConfig) -> Iterator[str]:
    """Yield a line for each secret that lacks a key, unless it has its default name and lacks all: it is optional."""
    for kind, keys in SECRET_KEYS.items():
        name, default = getattr(deployment.secrets, kind), getattr(SecretsConfig(), kind)
        missing = [key for key in keys if key not in os.environ]
        if missing and (name != default or len(missing) < len(keys)):
            yield f"deployment.secrets.{kind}: no secret {name} with the keys {', '.join(missing)} in this namespace"
