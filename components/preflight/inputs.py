"""What a run needs besides the cluster: data, models, rewards, environments, images, secrets."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from components.environments.pool import environment_error
from components.evaluate.protocols import PROTOCOLS
from components.preflight.config import TOOLS, Params
from components.preflight.form import OVERRIDES, Form, overrides_of
from components.prepare_data.first_rows import first_problems
from components.shared.chat import prompt_format
from components.shared.config import HOLDS_SECRET, keys_with_secrets, named
from components.shared.deployment import OPTIONAL_SECRET_KEYS, SECRET_KEYS, DeploymentConfig, SecretsConfig
from components.shared.errors import PipelineError
from components.shared.model import ChatConfig, context_tokens, model_config
from components.shared.problem import Split
from components.shared.tool_use import wrong_tools
from components.shared.tools import is_own
from components.train_grpo.custom_rewards import is_custom, reward_errors
from components.train_sft.config import TrainSFTConfig

Check = Callable[[], Any]

BASE_MODEL = "train_sft.model.base"
_FIXED_TAG = re.compile(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$")


def base_models(params: Params) -> dict[str, tuple[str, Check]]:
    """Return each model that a run starts from, by key, with its check; that of the policy returns its context."""
    base, reward_model = params.train_sft.model.base, params.train_grpo.reward.model
    models: dict[str, tuple[str, Check]] = {BASE_MODEL: (base, partial(_policy_context, params.train_sft))}
    if reward_model and reward_model.base != "reference":
        models["train_grpo.reward.model.base"] = (reward_model.base, partial(model_config, reward_model.base))
    if teacher := params.train_grpo.teacher:
        models["train_grpo.teacher.base"] = (teacher.base, partial(model_config, teacher.base))
    return models


def _policy_context(config: TrainSFTConfig) -> int | None:
    """The context of the base model; PipelineError where its chat template cannot be used as the config says."""
    context = context_tokens(config.model.base)
    form = prompt_format(config.model.model_copy(update={"tools": None}))
    form.prompt("1 + 1?")
    if config.num_steps:
        form.require_answers()
    return context


def unusable_rewards(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each reward of the user's own, and for a judge or teacher, that cannot be used."""
    reward, teacher = params.train_grpo.reward, params.train_grpo.teacher
    for name, asked in {"reward.judge": reward.judge, "teacher": teacher}.items():
        if asked and asked.key_variable and asked.key_variable not in os.environ:
            return [f"train_grpo.{name}.key_variable: the environment has no {asked.key_variable}"]
    judge = reward.judge.model_dump(mode="json") if reward.judge else None
    custom = list(filter(is_custom, reward.names))
    problem = next(first_problems(params.prepare_data), None) if trained_here and (custom or judge) else None
    return reward_errors(custom, trained_here=trained_here, judge=judge, problem=problem)


def unusable_environment(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each environment of training or evaluation that cannot be made on this machine."""
    trained = params.train_sft.model.tools
    evaluated = params.evaluation_tools
    lines = []
    for section, tools in {TOOLS: trained, "evaluate.tools": None if evaluated == trained else evaluated}.items():
        if tools is not None and (trained_here or is_own(tools.environment)):
            error = environment_error(tools, used_here=trained_here)
            lines += [] if error is None else [error.replace(TOOLS, section)]
    return lines


def unusable_tools(params: Params) -> Iterator[str]:
    """Yield a line for each thing that is wrong with tools of training, or with those of evaluation if they differ."""
    trained, protocol = params.train_sft.model, PROTOCOLS[params.evaluate.protocol]
    yield from wrong_tools(trained, TOOLS, _with_tests(params, tuple(Split)))
    changes: dict[str, object] = {"tools": params.evaluation_tools}
    if protocol.prompt is not None:
        changes["chat"] = ChatConfig(system=params.evaluate.system_prompt) if protocol.chat else None
    evaluated = trained.model_copy(update=changes)
    if evaluated != trained:
        yield from wrong_tools(evaluated, "evaluate.tools", _with_tests(params, (params.evaluate.split,)))


def _with_tests(params: Params, splits: Sequence[Split]) -> list[str]:
    coding = [source for source in params.prepare_data.sources if source.kind == "mbpp"]
    return [source.name for source in coding if any(source.max_problems(split) != 0 for split in splits)]


def run_concurrently(checks: Mapping[str, Check], deadline_s: float) -> dict[str, Any]:
    """Return what each check returns, the PipelineError that it raised, or one where it has hung for `deadline_s`."""
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


def mutable_images(deployment: DeploymentConfig) -> list[str]:
    """Return a line for each image whose reference may come to mean another one: Kubeflow's cache goes by the name."""
    named = {"image_gpu": deployment.image_gpu, "image_light": deployment.image_light}
    return [
        f"deployment.{key}: {image} is a mutable reference; use an immutable tag or a digest"
        for key, image in named.items()
        if _FIXED_TAG.search(image) is None
    ]


def passwords(form: Form) -> list[str]:
    """Return an error for each URL in the form that contains a password: Kubeflow stores and displays parameters."""
    return [f"{named(keys)}: {HOLDS_SECRET}" for keys in keys_with_secrets({**form, OVERRIDES: overrides_of(form)})]


def training_secrets(deployment: DeploymentConfig) -> dict[str, list[str]]:
    """Return those of the secrets for pods of training jobs that exist, with their keys."""
    secrets: dict[str, list[str]] = {}
    for kind in ("hub", "judge", "tracking"):
        keys = [key for key in (*SECRET_KEYS[kind], *OPTIONAL_SECRET_KEYS.get(kind, ())) if key in os.environ]
        secrets |= {getattr(deployment.secrets, kind): keys} if keys else {}
    return secrets


def missing_secrets(deployment: DeploymentConfig) -> Iterator[str]:
    """Check that secrets, which are in the environment, are complete; those with their default names may be missing."""
    for kind, keys in SECRET_KEYS.items():
        name, default = getattr(deployment.secrets, kind), getattr(SecretsConfig(), kind)
        missing = [key for key in keys if key not in os.environ]
        if missing and (name != default or len(missing) < len(keys)):
            yield f"deployment.secrets.{kind}: no secret {name} with the keys {', '.join(missing)} in this namespace"
