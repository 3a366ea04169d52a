"""Prepares and starts a run: a compiled pipeline with values from its defaults, a params file and `--set`.

A pipeline is published as a version of one pipeline, for people who start runs on Kubeflow's page.
"""

import copy
import difflib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
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
from pipelines.cluster.stages import LONGEST_DESCRIPTION, compiled_in

_CHECKOUT = Path(__file__).parents[2]
_IS_SUBSTRING = 9
"""Number of this filter operation in Kubeflow's API."""
_DIGITS = 12  # of git revisions and digests
_LONGEST_STEM = 40
_MAX_CHARACTERS = 10_000
"""Limit for all parameters of a run in Kubeflow's API server: https://github.com/kubeflow/pipelines/issues/12510"""
_IN_A_REGISTRY = re.compile(r"[^/]*[.:][^/]*/")
_KINDS: dict[str, tuple[Any, str]] = {
    "BOOLEAN": (bool, "true or false"),
    "LIST": (list, "a JSON list"),
    "NUMBER_DOUBLE": ((int, float), "a number"),
    "NUMBER_INTEGER": (int, "a whole number"),
    "STRUCT": (dict, "a JSON object"),
}
"""Kubeflow's types of parameters that are written in JSON, as Python types and in words; a STRING is plain text."""


@dataclass(frozen=True)
class Package:
    """A compiled pipeline in a file, with the images of its tasks and a digest of the content."""

    path: Path
    types: dict[str, str]
    """Kubeflow's type of each parameter, such as `NUMBER_INTEGER`."""
    defaults: Form
    """Default of each parameter that has one, and the compiled preset, which may be empty."""
    images: tuple[str, ...]
    digest: str


def compiled(folder: Path, params: Path, images: Mapping[str, str] | None = None) -> Path:
    """Compile the pipeline with a params file, whose images `images` overrides; return the file in `folder`."""
    from pipelines.graph import write

    path, loaded = folder / "pipeline.yaml", load_params(params)
    deployment = loaded.deployment.model_copy(update=dict(images or {}))
    write(path, loaded.model_copy(update={"deployment": deployment}))
    return path


def read(path: Path) -> Package:
    """Return the pipeline in a file; PipelineError if it is not a compiled pipeline."""
    try:
        documents = [each for each in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader) if each]
        definitions = documents[0]["root"].get("inputDefinitions", {}).get("parameters", {})
        images = {each["container"]["image"] for each in documents[0]["deploymentSpec"]["executors"].values()}
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError):
        raise PipelineError(f"{path}: not a compiled pipeline; `grpo-pipeline compile` writes one") from None
    return Package(
        path=path,
        types={name: definition["parameterType"] for name, definition in definitions.items()},
        defaults={
            **{name: each["defaultValue"] for name, each in definitions.items() if "defaultValue" in each},
            PRESET: compiled_in(documents[0], PRESET) or {},
        },
        images=tuple(sorted(images)),
        digest=lineage.value_digest(documents),
    )


def images_of_this_machine(images: Sequence[str]) -> list[str]:
    """Return a line for each image that no registry can have, as it names none or has a tag of local builds."""
    return [
        f"no registry has {image}; set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints, or build and push with "
        "`grpo-pipeline publish --build`"
        for image in images
        if _IN_A_REGISTRY.match(image) is None or ".invalid/" in image or image.endswith(":dev")
    ]


def parameters(package: Package, params: Path | None, settings: Sequence[str], *, scheduled: bool = False) -> Form:
    """Return the values of all parameters: defaults, or those of a params file, with `settings` applied.

    With a params file, `overrides` is its difference from the compiled preset. A setting is `name=value`, with the name
    of a parameter or a key of a params file such as `train_grpo.sampling.temperature`. A scheduled run ends at once if
    nothing has changed, unless a setting says otherwise. PipelineError for errors that preflight finds offline.
    """
    form = copy.deepcopy(package.defaults)
    form[OVERRIDES] = overrides_of(form)
    if params is not None:
        from_file = form_of(load_params(params))
        form |= {**from_file, PRESET: form[PRESET], OVERRIDES: _difference(form[PRESET], from_file[PRESET])}
    for setting in settings:
        _set(package, form, setting)
    raise_all(passwords(form))
    sections, errors = sections_of(form, DeploymentConfig(), secrets={})
    raise_all(errors + wrong_sections(sections))
    raise_all([in_the_form(line) for line in contradictions(Params.model_validate(sections))])
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
    is_set = any(setting.startswith(f"{SKIP_IF_UNCHANGED}=") for setting in settings)
    if scheduled and not is_set and is_url(form["registry"]):  # only a registry at a URL can be compared with
        form[SKIP_IF_UNCHANGED] = True
    return form


def description(package: Package, sources: Sequence[Path], values: Form) -> str:
    """Return the description of a run on Kubeflow's page: its files with their revision, and the changed parameters."""
    changed = [f"{name} {value}" for name, value in sorted(values.items()) if value != package.defaults.get(name)]
    changes = f"changed: {', '.join(changed)}" if changed else "nothing changed"
    return shorten(f"{', '.join(map(origin, sources))}; {changes}", LONGEST_DESCRIPTION, placeholder=" ...")


def start(
    kubeflow: Kubeflow, package: Package, values: Form, about: str, *, name: str, experiment: str, account: str | None
) -> str:
    """Start a run with the description `about`, for which the kfp client's methods have no argument; return its id."""
    from kfp_server_api import V2beta1Run

    client, unset = kubeflow.client, ("pipeline_id", "version_id", "enable_caching", "cache_key", "pipeline_root")
    job = client._create_job_config(params=values, pipeline_package_path=str(package.path), **dict.fromkeys(unset))
    run = V2beta1Run(
        experiment_id=kubeflow.experiment_id(experiment),
        display_name=name,
        description=about,
        pipeline_spec=job.pipeline_spec,
        runtime_config=job.runtime_config,
        service_account=account,
    )
    return str(client._run_api.run_service_create_run(run=run).run_id)


def build(base: str, variant: str, registry: str | None) -> dict[str, str]:
    """Build and push the images; return their names as keys of `deployment`: `image_light` and `image_gpu`."""
    if not registry:
        raise PipelineError("--build: name the registry to push to, with --registry or IMAGE_REGISTRY")
    command = [sys.executable, "-m", "images.build", "--push", "--registry", registry]
    command += ["--base", base, "--variant", variant]
    done = subprocess.run(command, cwd=_CHECKOUT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PipelineError("the images were not built and pushed; see above")
    names = done.stdout.split()
    return {f"image_{kind}": next(each for each in names if f"/python-{kind}:" in each) for kind in ("light", "gpu")}


def publish(kubeflow: Kubeflow, package: Package, params: Path) -> Iterator[str]:
    """Upload a compiled pipeline as a new version, unless a version has the same content; yield lines about it.

    Its name consists of the name of the params file, the git revision and a digest.
    """
    from pipelines.graph import DESCRIPTION, NAME

    client, digest = kubeflow.client, package.digest[:_DIGITS]
    known = kubeflow.pages(client.list_pipelines, "pipelines", page_size=100, namespace=kubeflow.user_namespace)
    pipeline = next((each for each in known if each.display_name == NAME), None)
    if pipeline is None:
        # It is created without a version, because its first version would get the name of the pipeline.
        body = {"name": NAME, "display_name": NAME, "description": DESCRIPTION, "namespace": kubeflow.user_namespace}
        pipeline = client._pipelines_api.pipeline_service_create_pipeline(body)
    predicate = {"operation": _IS_SUBSTRING, "key": "display_name", "stringValue": digest}
    options = {"page_size": 10, "filter": json.dumps({"predicates": [predicate]})}
    versions = partial(client.list_pipeline_versions, pipeline.pipeline_id)
    version = next(kubeflow.pages(versions, "pipeline_versions", **options), None)
    if version is None:
        stem = re.sub(r"[^a-z0-9]+", "-", params.stem.lower())[:_LONGEST_STEM].strip("-")
        name = "-".join(filter(None, [stem, revision(), digest]))
        about = f"{origin(params)}; {', '.join(package.images)}"
        with redirect_stdout(io.StringIO()):  # the client prints an address
            version = client.upload_pipeline_version(
                str(package.path), name, pipeline_id=pipeline.pipeline_id, description=about
            )
        yield f"{NAME}  version {name} published"
    else:
        yield f"{NAME}  unchanged: version {version.display_name} has the same content"
    yield f"{kubeflow.endpoint}/#/pipelines/details/{pipeline.pipeline_id}/version/{version.pipeline_version_id}"


def revision() -> str:
    """Return the git revision of the checkout, with `-dirty` if files differ from it; empty without git."""
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", f"--abbrev={_DIGITS}", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def origin(file: Path) -> str:
    """Return a file's path and revision for a description, such as `params/smoke.yaml at 0123456789ab`."""
    path, commit = file.resolve(), revision()
    name = path.relative_to(_CHECKOUT) if path.is_relative_to(_CHECKOUT) else path.name
    return f"{name} at {commit}" if commit else str(name)


def _difference(before: Any, after: Any) -> dict[str, Any]:
    """Return the changes that turn the sections `before` into `after`, with null for a removed key."""
    changes: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        nested = isinstance(value, dict) and isinstance(before.get(key), dict)
        if value != before.get(key):
            changes[key] = _difference(before[key], value) if nested else value
    return changes


def _set(package: Package, form: Form, setting: str) -> None:
    """Apply a `--set` to a form whose `overrides` are parsed; PipelineError for an unknown name or a wrong type."""
    name, equals, text = setting.partition("=")
    if not equals:
        raise PipelineError(f"--set {setting}: write name=value")
    key = tuple(name.split("."))
    parameter = name_of(key)
    if parameter in package.types:
        form[parameter] = text if package.types[parameter] == "STRING" else _json(text)
        expected, words = _KINDS.get(package.types[parameter], (str, ""))
        is_bool = isinstance(form[parameter], bool)  # which Python counts as an int
        if not isinstance(form[parameter], expected) or (is_bool and expected is not bool):
            raise PipelineError(f"--set {setting}: needs {words}")
        if parameter == OVERRIDES:
            form[OVERRIDES] = overrides_of(form)  # parses the YAML that was just set
    elif len(key) > 1:
        set_key(form[OVERRIDES], key, _json(text))
    else:
        close = difflib.get_close_matches(parameter, package.types, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(package.types))}"
        raise PipelineError(f"--set {name}: the pipeline has no such parameter; {hint}")


def _json(text: str) -> Any:
    """Return the value of a text in JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
