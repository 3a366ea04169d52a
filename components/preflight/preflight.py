"""The first task of a run on a cluster: finds all errors before anything else starts."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes import client

from components.cluster.config import ClusterConfig
from components.cluster.kube import Clock, RetryPolicy, UnavailableError, connect, own_namespace
from components.cluster.manifest import RUNTIME, RUNTIME_WITH_SERVERS
from components.preflight import capacity, cluster, inputs
from components.preflight.config import (
    CLUSTER,
    DEPLOYMENT,
    Params,
    Sections,
    advisories,
    contradictions,
    exceeded_limits,
)
from components.preflight.form import (
    PRESET,
    SKIP_IF_UNCHANGED,
    Form,
    complete,
    in_the_form,
    page,
    parameters,
    sections_of,
    wrong_sections,
)
from components.preflight.inputs import Check, run_concurrently
from components.preflight.resources import shape_of_base, with_memory
from components.prepare_data.first_rows import hub_datasets
from components.register import checks as register_checks
from components.shared.config import validate
from components.shared.deployment import MOUNT, DeploymentConfig
from components.shared.errors import PipelineError, RetryableError, raise_all
from components.shared.progress import say
from components.shared.stage import exit_on_error
from components.shared.versioning import commit_of, is_url

DEADLINE_S = 75.0
"""Time for all checks together. The task's own time limit is longer, to pull the image and start the pod."""
_RETRY_S = 60.0
"""Time for which a request is repeated if the cluster, or a webhook, is busy."""
_REVISION = "data_revision"
_BASE_MODEL = in_the_form("train_sft.model.base")
_MEMORY = ("memory_per_node_gib", "evaluate_memory_gib")
_MADE_BY = ("prepare_data", "train_sft", "train_grpo")
"""Stages whose config determines the policy."""


@dataclass(frozen=True)
class Ready:
    """The configuration of a run, and a page in HTML that shows it."""

    params: Params
    page: str
    unchanged: bool
    """Whether the run ends now, because it would only reproduce the newest registered version."""

    @property
    def sections(self) -> Sections:
        """See `complete`."""
        return complete(self.params)

    @property
    def outputs(self) -> dict[str, Any]:
        """The inputs of the next tasks, by the names of preflight's outputs."""
        sections, config = self.sections, self.params.cluster
        return {
            **{f"{name}_config": section for name, section in sections.items()},
            "unchanged": self.unchanged,
            # Kubeflow takes the memory and the number of GPUs of a task only as text.
            "evaluate_memory": f"{config.evaluation_gib}Gi",
            "evaluate_gpus": str(_evaluation_gpus(self.params)),
            "evaluate_node_selector": config.labels,
            "evaluate_tolerations": sections[CLUSTER]["tolerations"],
        }


def run(arguments: dict[str, Any]) -> None:
    """Do preflight as a Kubeflow task; `arguments` are the form, the deployment, and a path for each output."""
    form = {name: arguments[name] for name in (*parameters(), PRESET)}
    with exit_on_error("preflight"):
        ready = preflight(form, validate(DeploymentConfig, arguments[DEPLOYMENT], name=DEPLOYMENT))
        for name, value in ready.outputs.items():
            path = Path(arguments[name])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        Path(arguments["configuration"].path).write_text(ready.page, encoding="utf-8")


def preflight(
    form: Form, deployment: DeploymentConfig, *, deadline_s: float = DEADLINE_S, clock: Clock | None = None
) -> Ready:
    """Return the configuration of a run with this form, in which a commit replaces the branch or tag of the data.

    Raises:
        PipelineError: There are errors; its message has a line for each.
        RetryableError: No error was found, but the cluster or one of its webhooks does not answer.
    """
    # First, so that no other message repeats a password.
    raise_all(inputs.passwords(form))
    secrets = inputs.training_secrets(deployment)
    sections, wrong = sections_of(form, deployment, secrets=secrets)
    wrong += wrong_sections(sections)
    params = None if wrong else Params.model_validate(sections)
    wrong += inputs.mutable_images(deployment)
    if form[SKIP_IF_UNCHANGED] and not is_url(form["registry"]):
        wrong.append(f"{SKIP_IF_UNCHANGED}: needs registry to be a URL; preflight does not mount the volume")
    if params:
        wrong += [*_wrong_files(form, params), *map(in_the_form, contradictions(params))]
    checks = _checks(form, deployment, params)
    try:
        checks |= _checks_of_cluster(sections, params, deployment.volume, RetryPolicy(clock or Clock(), _RETRY_S))
    except PipelineError as error:
        wrong.append(f"cluster: {error}")
    answers = run_concurrently(checks, deadline_s)
    _raise_errors(answers, wrong, params)
    commit = answers.get(_REVISION, "")
    params = Params.model_validate(sections_of(form, deployment, commit=commit, secrets=secrets)[0])
    params = params.model_copy(update={CLUSTER: with_memory(params, shape_of_base(params))})
    say("preflight", f"{len(answers)} checks passed" + (f"; data at commit {commit}" if commit else ""))
    for line in advisories(params):
        say("preflight", f"warning: {in_the_form(line)}")
    nothing_new = _nothing_new(params) if form[SKIP_IF_UNCHANGED] else ""
    notes = {name: value for name, value in {"nothing new": nothing_new, "data at commit": commit}.items() if value}
    notes |= capacity.pods_in_words(params.cluster, _evaluation_gpus(params))
    return Ready(params, page(form, complete(params), notes), unchanged=bool(nothing_new))


def _nothing_new(params: Params) -> str:
    """Return a sentence about the version that the run would reproduce; empty if it would make a new one."""
    configs = {stage: getattr(params, stage) for stage in _MADE_BY}
    newest, changed, undone = register_checks.changes_since_newest(params.register, configs)
    if not newest:
        say("preflight", f"{params.register.registry} has no version of {params.register.name} yet")
    elif changed:
        say("preflight", f"changed since {newest}: {', '.join(changed)}")
    else:
        text = f"code, data and config are those of {newest}, the newest registered version, so nothing is run"
        if undone:
            text += f"; its registration is not complete: {'; '.join(undone)}; press Retry on the run that made it"
        say("preflight", text)
        return text
    return ""


def _evaluation_gpus(params: Params) -> int:
    """Return the number of GPUs of the pod that evaluates: none if training has none."""
    return params.evaluate.num_gpus if params.cluster.gpus_per_node else 0


def _raise_errors(answers: dict[str, Any], wrong: list[str], params: Params | None) -> None:
    """Raise PipelineError with `wrong` and the errors in `answers`, or else RetryableError if an answer is missing."""
    not_checked = [] if params else ["models", "data sets", "rewards", "tools", "storage", "training job", "capacity"]
    if isinstance(answers.get(_BASE_MODEL), PipelineError) and "capacity" in answers:
        del answers["capacity"]  # it depends on the size of the model
        not_checked = ["capacity"]
    unanswered = []
    for name, answer in answers.items():
        if isinstance(answer, UnavailableError):
            unanswered.append(f"{name}: {answer}")
        elif isinstance(answer, PipelineError):
            wrong.append(f"{name}: {answer}")
        elif isinstance(answer, list):
            wrong += answer
        elif params and isinstance(answer, int):  # the context of the base model
            wrong += map(in_the_form, exceeded_limits(params, answer))
    note = "not checked until this is right: " + ", ".join(not_checked) if not_checked else ""
    raise_all([*wrong, *unanswered] if wrong else [], note)  # which raises nothing for an empty list
    if unanswered:
        problem = "the cluster does not answer, so this run could not be checked; start it again later"
        raise RetryableError("\n".join([problem, *unanswered]))


def _wrong_files(form: Form, params: Params) -> Iterator[str]:
    """Yield a line if sources read files and no repository is named, or if one is named and no source reads files."""
    data, url = params.prepare_data, form["data_repository"]
    files = [path for path in data.files if path not in data.hub_ids]
    if files and not url:
        reason = f"{files[0]} is read from a git and DVC repository"
        yield f"data_repository: is empty, and {reason}; set it, with data_revision"
    if url and not data.files:
        yield "data_repository: no source in prepare_data.sources reads a file; leave it empty"


def _checks(form: Form, deployment: DeploymentConfig, params: Params | None) -> dict[str, Check]:
    """Return every check that waits for a service, by its subject.

    Most return a list with a line for each error, that of the data its commit, that of the base model its context.
    """
    storage, url = form["weights_storage"], form["data_repository"]
    checks: dict[str, Check] = {
        "registry": partial(_form_lines, register_checks.unusable_registry, form["registry"], MOUNT),
        "weights_storage": partial(_form_lines, register_checks.unusable_storage, storage, MOUNT),
        "secrets": partial(_lines, inputs.missing_secrets, deployment),
    }
    if params:
        models = {
            # A path is a folder of the volume.
            key: partial(_folder, base, params.cluster) if base.startswith(("/", ".")) else check
            for key, (base, check) in inputs.base_models(params).items()
        }
        datasets = hub_datasets(params.prepare_data)
        checks |= {in_the_form(key): check for key, check in (models | datasets).items()}
        listing = partial(register_checks.list_storage, has_folders=False)  # the volume is not mounted
        checks["storage"] = partial(_form_lines, listing, params.register)
        checks["rewards"] = partial(_form_lines, inputs.unusable_rewards, params)
        checks["environment"] = partial(_form_lines, inputs.unusable_environment, params)
        checks["tools"] = partial(_form_lines, inputs.unusable_tools, params)
        if address := params.register.model_registry:
            checks["model registry"] = partial(_form_lines, register_checks.unusable_model_registry, address, storage)
    if url:
        checks[_REVISION] = partial(commit_of, url, form[_REVISION])
    return checks


def _checks_of_cluster(
    sections: Sections, params: Params | None, volume: str, retries: RetryPolicy
) -> dict[str, Check]:
    """Return the checks of the cluster, by name; `params` is None if the configuration is wrong."""
    section = sections[CLUSTER] if isinstance(sections[CLUSTER], dict) else {}
    api = connect()
    namespace = str(section.get("namespace") or own_namespace())
    runtime = RUNTIME_WITH_SERVERS if section.get("rollout_servers") else RUNTIME
    grace_s = max(params.train_sft.checkpoint.grace_s, params.train_grpo.checkpoint.grace_s) if params else None
    wanted = (*cluster.LAUNCH, *(cluster.QUEUE if section.get("queue") else ()))
    checks: dict[str, Check] = {
        "runtime": partial(_lines, cluster.runtime, api, namespace, runtime, grace_s),
        "volume": partial(_lines, cluster.volume, api, namespace, volume),
        "permissions": partial(_lines, cluster.permissions, api, namespace, wanted),
    }
    if params:
        checks["training job"] = partial(_lines, cluster.dry_run, api, namespace, params)
        checks["capacity"] = partial(_lines, _capacity, api, params)
    if section.get("queue"):
        checks["cluster_queue"] = partial(_lines, cluster.local_queue, api, namespace, str(section["queue"]))
    return {name: partial(retries.call, "answer", check) for name, check in checks.items()}


def _capacity(api: client.ApiClient, params: Params) -> Iterator[str]:
    """Yield a line for each request of a pod that is too large; it says if its memory is a default."""
    config = with_memory(params, shape_of_base(params))
    base = params.train_sft.model.base
    unknown = f"; {base} cannot be looked into before the run starts: set the memory that it takes"
    for line in capacity.too_large_for_nodes(api, config, _evaluation_gpus(params)):
        key = line.partition(":")[0].rpartition(".")[2]
        is_default = key in _MEMORY and getattr(config, key) is None
        yield in_the_form(f"{line}{unknown}" if is_default else line)


def _folder(base: str, config: ClusterConfig) -> list[str]:
    """Raise PipelineError for a folder that is not on the volume; those on it are not checked, as it is not mounted."""
    if not Path(base).is_relative_to(config.mount):
        raise PipelineError(f"{base}: no such folder in pods, which have the volume at {config.mount}; name one there")
    return []


def _lines(check: Callable[..., Iterable[str]], *arguments: Any) -> list[str]:
    return list(check(*arguments))


def _form_lines(check: Callable[..., Iterable[str]], *arguments: Any) -> list[str]:
    return list(map(in_the_form, check(*arguments)))
