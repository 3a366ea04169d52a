"""The parameters of a run: the pipeline's defaults, then a params file, then single settings."""

import copy
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.preflight.config import resolved
from components.preflight.form import KEYS, PREFIX, form_of, sections_of
from components.preflight.repetition import PARAMETER
from components.preflight.sections import contradicting, wrong_sections
from components.preflight.storage import credentials, is_url
from components.shared.errors import PipelineError, raise_all
from pipelines.cluster.package import Package

Form = dict[str, Any]

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
        form |= form_of(resolved(params))
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise PipelineError(f"--set {setting}: write name=value")
        _set(package, form, name, text)
    _check(form)
    return form


def _check(form: Form) -> None:
    """Refuse what preflight would refuse without asking anybody: a secret that got to Kubeflow would be kept there."""
    wrong = credentials({**dict.fromkeys(KEYS, ""), "data_repository": "", **form})
    if not wrong and set(KEYS) <= set(form):  # a shorter form has the rest compiled in
        sections, wrong = sections_of(form, _ANY_COMMIT, {})
        wrong += wrong_sections(sections)
        wrong += [] if wrong else contradicting(sections)
    raise_all(wrong)


def skipping_repetition(form: Form, settings: Sequence[str]) -> Form:
    """Return the parameters of scheduled runs: one that nothing is new for ends at once, where the registry can tell.

    Whoever sets it otherwise has it otherwise.
    """
    chosen = any(setting.startswith(f"{PARAMETER}=") for setting in settings)
    if chosen or PARAMETER not in form or not is_url(form["registry_repository"]):
        return form
    return {**form, PARAMETER: True}


def _set(package: Package, form: Form, name: str, text: str) -> None:
    if "." in name:
        _set_key(package, form, tuple(name.split(".")), text)
        return
    if name not in package.types:
        close = difflib.get_close_matches(name, package.types, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(package.types))}"
        raise PipelineError(f"--set {name}: the pipeline has no such parameter; {hint}")
    form[name] = _value(name, package.types[name], text)


def _set_key(package: Package, form: Form, key: tuple[str, ...], text: str) -> None:
    """Set a key of a params file, whichever parameter holds it."""
    for parameter, keys in KEYS.items():
        if key in keys:
            _set(package, form, parameter, text)
            return
    value = form.get(PREFIX + key[0])
    for part in key[1:-1]:
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise PipelineError(f"--set {'.'.join(key)}: no section of the params file has such a key")
    value[key[-1]] = _json(text)


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
