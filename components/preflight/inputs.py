"""What a run needs besides the cluster: raw files, models, rewards, repositories, DVC remotes, images, secrets."""

import importlib.util
import os
import re
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.environments.pool import environment_error
from components.grading.verifier import Verifier, require_sandbox
from components.policy.config import TrackingConfig
from components.preflight.config import (
    MOUNT,
    OPTIONAL_SECRET_KEYS,
    SECRET_KEYS,
    DeploymentConfig,
    Params,
    SecretsConfig,
    exceeded_limits,
)
from components.preflight.form import OVERRIDES, SKIP_IF_UNCHANGED, Form, overrides_of
from components.preflight.tools import wrong_tools
from components.prepare_data.config import PrepareConfig, Source
from components.prepare_data.dataset import Dataset
from components.prepare_data.source import FileSource, MalformedRow
from components.register.catalogue import Catalogue, left_undone
from components.register.config import RegisterConfig
from components.register.snapshot import read_registry
from components.register.storage import CONFIG, check_storage, new_config
from components.shared import lineage
from components.shared.chat import prompt_format
from components.shared.config import HOLDS_SECRET, Config, keys_with_secrets, named, without_operational
from components.shared.errors import PipelineError, UnchangedRunError
from components.shared.model import context_tokens, model_config
from components.shared.problem import Problem, Split
from components.shared.progress import say
from components.shared.tokenizer import token_lengths
from components.shared.tools import is_own
from components.shared.versioning import Workspace, is_url
from components.train_grpo.custom_rewards import is_custom, reward_errors
from components.train_sft.config import TrainSFTConfig
from components.validate_data.gradable import ungradable

Check = Callable[[], Any]

_BASE_MODEL = "train_sft.model.base"
_DEADLINE_S, _ANSWER_S = 30.0, 10.0
_NUM_ROWS_TRIED = 20
"""From the beginning of each file: enough to see that it is of another format."""


_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_REFERENCES_SHOWN = 5
_FIXED_TAG = re.compile(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$")
_PACKAGES = {"s3": "dvc_s3", "gs": "dvc_gs", "azure": "dvc_azure", "ssh": "dvc_ssh"}
"""Package that DVC needs for a kind of remote."""
_LISTED = ("s3", "ssh")
"""Kinds of remotes that are asked, with the credentials of the tasks, before anything is trained."""
_MADE_BY = ("prepare_data", "train_sft", "train_grpo")
"""Stages whose config decides what a policy is."""


def missing_here(params: Params, *, containers: bool = False) -> list[str]:
    """Return a line for each thing that a run on this machine needs and would not find.

    With `containers` its stages run in their images, which may hold more than this environment.
    What is looked up elsewhere (repositories, the hub) is requested concurrently, and has half a minute to answer.
    """
    lookups = {key: check for key, (_, check) in base_models(params).items()}
    register, repository = params.register, params.prepare_data.repository
    if repository:
        lookups["prepare_data.repository.url"] = partial(references, repository.url)
    if is_url(register.registry):
        lookups["register.registry"] = partial(references, register.registry)
    lookups |= hub_datasets(params.prepare_data)
    lookups |= {
        f"{stage}.tracking.mlflow.uri": partial(_require_server, tracking.mlflow.uri)
        for stage, tracking in _trackings(params).items()
        if tracking.mlflow and tracking.mlflow.uri.startswith("http")
    }
    if register.model_registry:
        lookups["register.model_registry"] = partial(Catalogue, register.model_registry)
    if register.storage:
        lookups["register.storage"] = partial(list_storage, register)
    answers = run_concurrently(lookups, _DEADLINE_S)
    context = answers[_BASE_MODEL]
    lines = [
        *_files(params),
        *_ungradable(params),
        *(f"{key}: {answer}" for key, answer in answers.items() if isinstance(answer, PipelineError)),
        *(exceeded_limits(params, context) if isinstance(context, int) else []),
        *([] if isinstance(context, PipelineError) else list(wrong_tools(params)) or _exceeded_by_data(params)),
        *unusable_rewards(params, trained_here=not containers),
        *unusable_environment(params, trained_here=not containers),
        *([] if containers else _missing_trackers(params)),
    ]
    if not containers and any(source.kind == "mbpp" for source in params.prepare_data.sources):
        try:
            require_sandbox()
        except PipelineError as error:
            lines.append(f"prepare_data.sources: mbpp has code to run: {error}")
    return [*lines, *_unusable_folder(register.registry)]


def _unusable_folder(registry: str) -> Iterator[str]:
    if is_url(registry):
        return
    path = Path(registry).resolve()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        yield f"register.registry: {registry} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"register.registry: {registry}: {existing} cannot be written to by this user"


def _require_server(url: str) -> None:
    """Raise PipelineError unless something answers at a URL, whatever it answers."""
    try:
        urllib.request.urlopen(url, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise PipelineError(f"{url} does not answer ({getattr(error, 'reason', error)})") from None


def _trackings(params: Params) -> dict[str, TrackingConfig]:
    return {"train_sft": params.train_sft.tracking, "train_grpo": params.train_grpo.tracking}


def _missing_trackers(params: Params) -> Iterator[str]:
    both = _trackings(params)
    # Each tracker has the name of its package. SFT has those of GRPO where nothing else is set.
    keys = {package: f"{stage}.tracking" for stage, config in both.items() for package, settings in config if settings}
    for package, key in keys.items():
        if importlib.util.find_spec(package) is None:
            yield f"{key}.{package}: needs the Python package {package}, which is not installed"


def base_models(params: Params) -> dict[str, tuple[str, Check]]:
    """Return each model that a run starts from, by key, with its check; that of the policy returns its context."""
    base, reward_model = params.train_sft.model.base, params.train_grpo.reward.model
    models: dict[str, tuple[str, Check]] = {_BASE_MODEL: (base, partial(_policy_context, params.train_sft))}
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


def _exceeded_by_data(params: Params) -> Iterator[str]:
    """Yield a line for each limit that most of the first problems exceed, so that a later stage would stop at it."""
    model, limits = params.train_sft.model, params.validate_data
    problems = [] if model.scratch or params.prepare_data.repository else [*_first_problems(params.prepare_data)]
    prompts, solutions = token_lengths(model, problems)
    pairs = zip(problems, prompts, solutions, strict=True)
    examples = [prompt + solution + 1 for problem, prompt, solution in pairs if problem.split == Split.TRAIN]
    longest = {"validate_data.max_prompt_tokens": (limits.max_prompt_tokens, prompts)}
    if params.train_sft.num_steps:
        longest["train_sft.max_tokens"] = (params.train_sft.max_tokens, examples)
    for key, (limit, tokens) in longest.items():
        num_longer = sum(each > limit for each in tokens)
        if 2 * num_longer > len(tokens):
            what = "prompts" if key.startswith("validate") else "prompts with their solutions"
            yield f"{key}: is {limit:,}, and {num_longer} of the first {len(tokens)} {what} have up to {max(tokens):,}"


def _ungradable(params: Params) -> Iterator[str]:
    """Say which answers of the user's own data validation would refuse, as far as their first rows show."""
    own = [source for source in params.prepare_data.sources if isinstance(source, Dataset)]
    if own and not params.prepare_data.repository:
        problems = [*_first_problems(params.prepare_data.model_copy(update={"sources": own}))]
        if defect := ungradable(problems, params.train_sft.model.answer):
            yield f"prepare_data.sources: among the first rows, {defect}"


def _first_problems(config: PrepareConfig) -> Iterator[Problem]:
    """The first problems of each source; of a file that cannot be read none, which is reported elsewhere."""
    with Verifier() as verify:
        for source in config.sources:
            if not isinstance(source, FileSource):
                yield from islice(source.problems(config.seed), _NUM_ROWS_TRIED)
                continue
            for split in (Split.TRAIN, Split.TEST):
                rows = _first_rows(source, split, verify)
                yield from () if isinstance(rows, str) else (row for row in rows if isinstance(row, Problem))


def unusable_rewards(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each reward of the user's own, and for a judge, that cannot be used."""
    reward = params.train_grpo.reward
    if reward.judge and reward.judge.key_variable and reward.judge.key_variable not in os.environ:
        return [f"train_grpo.reward.judge.key_variable: the environment has no {reward.judge.key_variable}"]
    judge = reward.judge.model_dump(mode="json") if reward.judge else None
    custom = list(filter(is_custom, reward.names))
    problem = next(_first_problems(params.prepare_data), None) if trained_here and (custom or judge) else None
    return reward_errors(custom, trained_here=trained_here, judge=judge, problem=problem)


def unusable_environment(params: Params, *, trained_here: bool = False) -> list[str]:
    """Return a line for each environment that cannot be made, of training or of evaluation with another one.

    Files and the sandbox are those of this machine.
    """
    trained, key = params.train_sft.model.tools, "train_sft.model.tools"
    evaluated = params.evaluation_tools
    lines = []
    for section, tools in {key: trained, "evaluate.tools": None if evaluated == trained else evaluated}.items():
        if tools is not None and (trained_here or is_own(tools.environment)):
            error = environment_error(tools, used_here=trained_here)
            lines += [] if error is None else [error.replace(key, section)]
    return lines


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


def hub_datasets(config: PrepareConfig) -> dict[str, Check]:
    """Return a check of each dataset that is read from the hub, by key; none where a repository may have a folder."""
    return {
        f"prepare_data.sources.{index}.{split}": partial(source.check_on_hub, split, Path())
        for index, source in enumerate(config.sources)
        for split in (Split.TRAIN, Split.TEST)
        if isinstance(source, Dataset) and config.repository is None
        if not source.is_held_out(split) and source.is_on_hub(split, Path())
    }


def _files(params: Params) -> Iterator[str]:
    """Say what is wrong with files as far as their first rows show, and with fine-tuning on what has no solution."""
    if params.prepare_data.repository:
        return
    unsolved = []
    with Verifier() as verify:
        for index, source in enumerate(params.prepare_data.sources):
            for split in (Split.TRAIN, Split.TEST):
                rows = _first_rows(source, split, verify)
                if isinstance(rows, str):
                    yield f"prepare_data.sources.{index}.{split}: {rows}"
                elif split == Split.TRAIN and rows:
                    unsolved.append(not any(isinstance(row, Problem) and row.solution for row in rows))
                elif split == Split.TRAIN and source.max_problems(split) != 0:  # not known yet
                    unsolved.append(False)
    if params.train_sft.num_steps > 0 and unsolved and all(unsolved):
        yield (
            "train_sft.num_steps: no train problem has a solution to imitate; set train_sft.num_steps: 0, or name the "
            "column of solutions (prepare_data.sources.0.columns.solution)"
        )


def _first_rows(source: Source, split: Split, verify: Verifier) -> list[Problem | MalformedRow] | str:
    """Return the first rows in the file of a split, or why it cannot be used; none where it has no file here."""
    on_hub = isinstance(source, Dataset) and source.is_on_hub(split, Path())
    if not isinstance(source, FileSource) or source.path(split) is None or source.is_held_out(split) or on_hub:
        return []
    try:
        rows = list(islice(source.read(split, Path(), verify), _NUM_ROWS_TRIED))
    except PipelineError as error:
        return str(error)
    if not rows:
        return f"{source.path(split)}: contains no row"
    malformed = [row for row in rows if isinstance(row, MalformedRow)]
    if len(malformed) < len(rows):
        return rows
    file, line, reason = malformed[0]
    return f"{source.path(split)}: none of its first {len(rows)} rows can be used; {file}:{line}: {reason}"


def commit_of(url: str, revision: str) -> str:
    """Return the commit of a branch, tag or commit in a repository; tags go before branches, as in git.

    Raises:
        PipelineError: The repository does not answer, or has no such branch or tag.
    """
    if not revision:
        raise PipelineError("is empty; accepted: a branch, a tag or a commit")
    refs = references(url)
    for name in (f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}", revision):
        if name in refs:
            return refs[name]
    if _COMMIT.fullmatch(revision):  # a server lists no commits but those that have names
        return revision
    known = [name.split("/", 2)[2] for name in refs if name.startswith(("refs/heads/", "refs/tags/"))]
    names = [name for name in known if not name.endswith("^{}")][:_NUM_REFERENCES_SHOWN]
    raise PipelineError(
        f"{url} has no branch or tag `{revision}`; accepted: {', '.join(['a commit of 40 digits', *names])}"
    )


def references(url: str) -> dict[str, str]:
    """Return the commit behind each name in a repository; PipelineError if it does not answer."""
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-git-") as scratch:
        listed = Workspace(Path(scratch), Path(scratch)).git("ls-remote", "--", url)
    return {name: commit for commit, name in (line.split("\t") for line in listed.splitlines())}


def registry(location: str) -> Iterator[str]:
    """Check that the registry's repository answers; a folder is made by the first registration."""
    if is_url(location):
        references(location)
    yield from _not_shared("registry", location)


def storage(remote: str) -> Iterator[str]:
    """Check that DVC can put the weights of versions into a remote; without one they go beside a registry's folder."""
    scheme = remote.partition("://")[0]
    package = _PACKAGES.get(scheme)
    if package and importlib.util.find_spec(package) is None:
        yield f"weights_storage: {scheme}:// needs the package {package.replace('_', '-')} in the light image"
    elif remote:
        yield from _not_shared("weights_storage", remote)


def list_storage(config: RegisterConfig) -> list[str]:
    """List the storage of the weights, at the server that the registry knows, the config or the environment."""
    scheme = (config.storage or "").partition("://")[0]
    if scheme in _LISTED and importlib.util.find_spec(_PACKAGES[scheme]):
        known = _config_of(config.registry) if is_url(config.registry) else None
        check_storage(known or new_config(str(config.storage), config.storage_endpoint))
    return []


def _config_of(location: str) -> str | None:
    """DVC's config in a registry; None where nothing has been registered yet, or where it does not answer."""
    try:
        with read_registry(location) as snapshot:
            return snapshot.repository.try_git("show", f"HEAD:{CONFIG}")
    except PipelineError:  # reported by the check of the registry itself
        return None


def _not_shared(parameter: str, location: str) -> Iterator[str]:
    if not is_url(location) and not location.startswith(f"{MOUNT}/"):
        yield (
            f"{parameter}: {location} would be lost with the pod; accepted: a URL, or a folder of the shared volume, "
            f"{MOUNT}/..."
        )


def model_registry(url: str, remote: str) -> Iterator[str]:
    """Check that Kubeflow Model Registry answers, and that the weights it will point to can be reached by others."""
    Catalogue(url)
    if not is_url(remote):
        yield "weights_storage: is not a URL, so the weights cannot be found from Kubeflow Model Registry"


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
    """Check that secrets are complete; preflight has their keys as environment variables.

    Those with their default names may be missing: not every run needs them.
    """
    for kind, keys in SECRET_KEYS.items():
        name, default = getattr(deployment.secrets, kind), getattr(SecretsConfig(), kind)
        missing = [key for key in keys if key not in os.environ]
        if missing and (name != default or len(missing) < len(keys)):
            yield f"deployment.secrets.{kind}: no secret {name} with the keys {', '.join(missing)} in this namespace"


def incomparable(form: Form) -> list[str]:
    """Return a line if the newest version should be compared with and cannot be read from here."""
    if not form[SKIP_IF_UNCHANGED] or is_url(form["registry"]):
        return []
    return [f"{SKIP_IF_UNCHANGED}: needs registry to be a URL; preflight does not mount the volume"]


def refuse_repetition(form: Form, params: Params) -> None:
    """Raise UnchangedRunError if a run would reproduce the newest version, and the form says to end then.

    PipelineError if the registry does not answer.
    """
    if not form[SKIP_IF_UNCHANGED]:
        return
    with read_registry(form["registry"]) as snapshot:
        tags = [version.tag for version in snapshot.versions(params.register.name)]
        made_by = snapshot.lineage(tags[-1]) if tags else None
        undone = list(left_undone(snapshot, params.register.name, params.register.model_registry))
    if made_by is None:
        say("preflight", f"{form['registry']} has no version of {params.register.name} yet")
        return
    configs = {stage: getattr(params, stage) for stage in _MADE_BY}
    changed = changes_since(made_by, configs, lineage.code_digest())
    if not changed:
        message = f"{UnchangedRunError.beginning} {tags[-1]}; a run would reproduce the latest registered version"
        if undone:
            message += f"\nits registration is not complete: {'; '.join(undone)}; press Retry on the run that made it"
        raise UnchangedRunError(message)
    say("preflight", f"changed since {tags[-1]}: {', '.join(changed)}")


def changes_since(made_by: lineage.Lineage, configs: Mapping[str, Config], code: str) -> list[str]:
    """Return what differs from the lineage of a version; empty where a run would reproduce it.

    `configs` are the sections of the stages that make a policy, in which data are named by commit, or are none.
    """
    changes = [] if made_by.work.code == code else ["the code"]
    recorded = {work.stage: work.config for work in made_by.works}
    for stage, config in configs.items():
        try:
            before = without_operational(type(config).model_validate(recorded.get(stage, {})))
        except ValidationError:  # written by an older version of the code, with other keys
            before = {}
        now = without_operational(config)
        changes += [f"{stage}.{key}" for key in now if key not in before or now[key] != before[key]]
    return changes
