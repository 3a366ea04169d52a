"""The parameters of a run: the pipeline's defaults, then a params file, then single settings."""

import copy
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.preflight.config import DEPLOYMENT, DeploymentConfig, Params, contradictions, is_url, load_params
from components.preflight.form import (
    OVERRIDES,
    SKIP_IF_UNCHANGED,
    Form,
    form_of,
    in_the_form,
    name_of,
    sections_of,
    set_key,
    wrong_sections,
)
from components.preflight.remotes import passwords
from components.shared.errors import PipelineError, raise_all
from pipelines.cluster.runs import Package

_ANY_COMMIT = "0" * 40
"""In the place of that of the data, which preflight looks up."""
_WORDS = {
    "BOOLEAN": "true or false",
    "LIST": "a JSON list",
    "NUMBER_DOUBLE": "a number",
    "NUMBER_INTEGER": "a whole number",
    "STRUCT": "a JSON object",
}


def parameters(package: Package, params: Path | None, settings: Sequence[str]) -> Form:
    """Return a value for every parameter that has one.

    `settings` are `name=value` with a parameter's name, or a key of a params file such as
    `train_grpo.sampling.temperature`.
    """
    form = copy.deepcopy(package.defaults)
    if params is not None:
        form |= form_of(load_params(params))
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise PipelineError(f"--set {setting}: write name=value")
        _set(package, form, name, text)
    _check(form)
    return form


def _check(form: Form) -> None:
    """Refuse what preflight would refuse without asking anybody: a secret that got to Kubeflow would be kept there."""
    raise_all(passwords(form))
    sections, wrong = sections_of(form, DeploymentConfig(), commit=_ANY_COMMIT, secrets={})
    wrong += wrong_sections(sections)
    wrong += [] if wrong else map(in_the_form, contradictions(Params.model_validate(sections)))
    raise_all(wrong)


def skipping_repetition(form: Form, settings: Sequence[str]) -> Form:
    """Return the parameters of scheduled runs: one that would change nothing ends at once, if the registry can tell.

    `--set skip_if_unchanged=false` has it run all the same.
    """
    chosen = any(setting.startswith(f"{SKIP_IF_UNCHANGED}=") for setting in settings)
    if chosen or not is_url(form["register_registry"]):
        return form
    return {**form, SKIP_IF_UNCHANGED: True}


def _set(package: Package, form: Form, name: str, text: str) -> None:
    """Set a parameter, or a key of a params file whichever parameter holds it."""
    key = tuple(name.split("."))
    if len(key) > 1 and name_of(key) not in package.types:
        if key[0] == DEPLOYMENT:
            raise PipelineError(f"--set {name}: is compiled into the graph; set it in the params file")
        set_key(form[OVERRIDES], key, _json(text))
        return
    parameter = name_of(key)
    if parameter not in package.types:
        close = difflib.get_close_matches(parameter, package.types, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(package.types))}"
        raise PipelineError(f"--set {name}: the pipeline has no such parameter; {hint}")
    form[parameter] = _value(name, package.types[parameter], text)


def _value(name: str, kind: str, text: str) -> Any:
    """Return the value that a text stands for, as the pipeline declares it."""
    if kind == "STRING":
        return text
    value = _json(text)
    fits = {
        "BOOLEAN": isinstance(value, bool),
        "LIST": isinstance(value, list),
        "NUMBER_DOUBLE": isinstance(value, int | float) and not isinstance(value, bool),
        "NUMBER_INTEGER": isinstance(value, int) and not isinstance(value, bool),
        "STRUCT": isinstance(value, dict),
    }
    if not fits[kind]:
        raise PipelineError(f"--set {name}={text}: needs {_WORDS[kind]}")
    return value


def _json(text: str) -> Any:
    """What a text is in JSON; a word that is nothing there is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
