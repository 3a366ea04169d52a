"""What is submitted: a compiled pipeline, and for each parameter its default, a params file's value or a setting."""

import copy
import difflib
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from components.preflight.config import Params, contradictions, load_params
from components.preflight.form import (
    OVERRIDES,
    PRESET,
    SKIP_IF_UNCHANGED,
    Form,
    as_overrides,
    form_of,
    in_the_form,
    name_of,
    overrides_of,
    sections_of,
    set_key,
    wrong_sections,
)
from components.preflight.inputs import passwords
from components.shared import lineage
from components.shared.config import laid_over
from components.shared.deployment import DeploymentConfig
from components.shared.errors import PipelineError, raise_all
from components.shared.versioning import is_url
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.publish import origin
from pipelines.cluster.stages import LONGEST_DESCRIPTION, compiled_in

_ANY_COMMIT = "0" * 40
_MAX_CHARACTERS = 10_000
"""Of all parameters together; Kubeflow's API server refuses more: https://github.com/kubeflow/pipelines/issues/12510"""
_IN_A_REGISTRY = re.compile(r"[^/]*[.:][^/]*/")
_KINDS: dict[str, tuple[Any, str]] = {
    "BOOLEAN": (bool, "true or false"),
    "LIST": (list, "a JSON list"),
    "NUMBER_DOUBLE": ((int, float), "a number"),
    "NUMBER_INTEGER": (int, "a whole number"),
    "STRUCT": (dict, "a JSON object"),
}
"""Kubeflow's types of parameters that are written in JSON; a STRING is written as it is."""


@dataclass(frozen=True)
class Package:
    """A compiled pipeline in a file, with the images that its tasks run in and a digest of the content."""

    path: Path
    types: dict[str, str]
    """Type of each parameter, in Kubeflow's words."""
    defaults: Form
    """Default of each parameter, and the preset where one is compiled in."""
    images: tuple[str, ...]
    digest: str


def compiled(folder: Path, params: Path, images: Mapping[str, str] | None = None) -> Path:
    """Write the pipeline that this code compiles to with a params file, perhaps with other images; return its file."""
    from pipelines.graph import write

    path, loaded = folder / "pipeline.yaml", load_params(params)
    deployment = loaded.deployment.model_copy(update=dict(images or {}))
    write(path, loaded.model_copy(update={"deployment": deployment}))
    return path


def read(path: Path) -> Package:
    """Return the pipeline in a file; PipelineError where it is not a compiled pipeline."""
    try:
        documents = [each for each in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader) if each]
        parameters = documents[0]["root"].get("inputDefinitions", {}).get("parameters", {})
        containers = [each["container"] for each in documents[0]["deploymentSpec"]["executors"].values()]
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError):
        raise PipelineError(f"{path}: not a compiled pipeline; `grpo-pipeline compile` writes one") from None
    return Package(
        path=path,
        types={each: definition["parameterType"] for each, definition in parameters.items()},
        defaults={
            **{each: one["defaultValue"] for each, one in parameters.items() if "defaultValue" in one},
            PRESET: compiled_in(documents[0], PRESET) or {},
        },
        images=tuple(sorted({container["image"] for container in containers})),
        digest=lineage.value_digest(documents),
    )


def images_of_this_machine(images: Sequence[str]) -> list[str]:
    """Return a line for each image that no registry can have: it names none, or has the tag of images built here."""
    return [
        f"no registry has {image}; set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints, or build and push with "
        "`grpo-pipeline publish --build`"
        for image in images
        if _IN_A_REGISTRY.match(image) is None or ".invalid/" in image or image.endswith(":dev")
    ]


def parameters(package: Package, params: Path | None, settings: Sequence[str], *, scheduled: bool = False) -> Form:
    """Return a value for every parameter that has one.

    A params file takes the place of all defaults, and `overrides` is what it changes of the preset. A setting is
    `name=value` with a parameter's name, or a key of a params file such as `train_grpo.sampling.temperature`. A
    scheduled run that would change nothing ends at once, if a registry can tell and no setting decides otherwise.
    PipelineError where preflight would refuse the form without asking anybody.
    """
    form = copy.deepcopy(package.defaults)
    form[OVERRIDES] = overrides_of(form)
    if params is not None:
        wanted = form_of(load_params(params))
        form |= {**wanted, PRESET: form[PRESET], OVERRIDES: _difference(form[PRESET], wanted[PRESET])}
    for setting in settings:
        _set(package, form, setting)
    raise_all(passwords(form))
    sections, wrong = sections_of(form, DeploymentConfig(), commit=_ANY_COMMIT, secrets={})
    wrong += wrong_sections(sections)
    raise_all(wrong or list(map(in_the_form, contradictions(Params.model_validate(sections)))))
    del form[PRESET]
    is_text = package.types[OVERRIDES] == "STRING"  # in pipelines of earlier releases it is an object, without nulls
    form[OVERRIDES] = as_overrides(form[OVERRIDES]) if is_text else laid_over({}, form[OVERRIDES])
    sizes = {name: len(json.dumps(value)) for name, value in form.items()}
    if sum(sizes.values()) > _MAX_CHARACTERS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise PipelineError(
            f"{largest}: has {sizes[largest]:,} characters; Kubeflow takes {_MAX_CHARACTERS:,} for all parameters of a "
            "run: compile the pipeline with these params"
        )
    decided = any(setting.startswith(f"{SKIP_IF_UNCHANGED}=") for setting in settings)
    if scheduled and not decided and is_url(form["registry"]):
        form[SKIP_IF_UNCHANGED] = True
    return form


def description(package: Package, sources: Sequence[Path], values: Form) -> str:
    """Return what a run says of itself on Kubeflow's page: the files and revision it is from, and what it changes."""
    changed = [f"{name} {value}" for name, value in sorted(values.items()) if value != package.defaults.get(name)]
    text = f"{', '.join(map(origin, sources))}; {'changed: ' if changed else 'nothing changed'}{', '.join(changed)}"
    return shorten(text, LONGEST_DESCRIPTION, placeholder=" ...")


def start(
    kubeflow: Kubeflow, package: Package, values: Form, about: str, *, name: str, experiment: str, account: str | None
) -> str:
    """Start a run; return its id. `about` is its description, for which the client of Kubeflow has no argument."""
    from kfp_server_api import V2beta1Run

    client, unset = kubeflow.client, ("pipeline_id", "version_id", "enable_caching", "cache_key", "pipeline_root")
    with redirect_stdout(io.StringIO()):  # the client prints addresses
        made = client.create_experiment(experiment, namespace=kubeflow.user_namespace)
    job = client._create_job_config(params=values, pipeline_package_path=str(package.path), **dict.fromkeys(unset))
    run = V2beta1Run(
        experiment_id=made.experiment_id,
        display_name=name,
        description=about,
        pipeline_spec=job.pipeline_spec,
        runtime_config=job.runtime_config,
        service_account=account,
    )
    return str(client._run_api.run_service_create_run(run=run).run_id)


def _difference(before: Any, after: Any) -> dict[str, Any]:
    """Return what has to be laid over sections to have others: null for a key that they do not have."""
    changes: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        nested = isinstance(value, dict) and isinstance(before.get(key), dict)
        if value != before.get(key):
            changes[key] = _difference(before[key], value) if nested else value
    return changes


def _set(package: Package, form: Form, setting: str) -> None:
    # `overrides` has its sections here.
    name, equals, text = setting.partition("=")
    if not equals:
        raise PipelineError(f"--set {setting}: write name=value")
    key = tuple(name.split("."))
    parameter = name_of(key)
    if parameter in package.types:
        form[parameter] = text if package.types[parameter] == "STRING" else _json(text)
        types, words = _KINDS.get(package.types[parameter], (str, ""))
        if not isinstance(form[parameter], types) or (isinstance(form[parameter], bool) and types is not bool):
            raise PipelineError(f"--set {setting}: needs {words}")
        if parameter == OVERRIDES:
            form[OVERRIDES] = overrides_of(form)
    elif len(key) > 1:
        set_key(form[OVERRIDES], key, _json(text))
    else:
        close = difflib.get_close_matches(parameter, package.types, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(package.types))}"
        raise PipelineError(f"--set {name}: the pipeline has no such parameter; {hint}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
