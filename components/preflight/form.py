"""The run form: a typed parameter for each of a dozen keys of the params file, and a text in YAML for all others.

A key is either a parameter or in the text, never both. The text is empty where nothing but parameters was changed: the
other keys of the params file are the preset, which is compiled into the graph.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, get_args

import yaml

from components.cluster.config import ClusterConfig
from components.preflight.config import CLUSTER, DEPLOYMENT, SHARED_KEYS, Params, Sections, wrong_params
from components.shared.config import laid_over, parse_sections
from components.shared.deployment import LONGEST_TRAINING_S, MOUNT, DeploymentConfig
from components.shared.page import render

Form = dict[str, Any]
"""A value for each parameter, and the preset of the graph."""
Key = tuple[str, ...]

OVERRIDES = "overrides"
"""The parameter for keys without a separate one: sections of a params file, laid over the preset."""
PRESET = "preset"
"""Sections of the params file that was compiled, with the keys that have no parameter."""
SKIP_IF_UNCHANGED = "skip_if_unchanged"
TYPED_KEYS: dict[str, Key] = {
    name: tuple(key.split("."))
    for name, key in {
        "base_model": "train_sft.model.base",
        "cluster_gpu_type": "cluster.gpu_type",
        "cluster_gpus_per_node": "cluster.gpus_per_node",
        "cluster_nodes": "cluster.nodes",
        "cluster_queue": "cluster.queue",
        "data_repository": "prepare_data.repository.url",
        "data_revision": "prepare_data.repository.commit",
        "grpo_kl_coefficient": "train_grpo.loss.kl.coefficient",
        "grpo_learning_rate": "train_grpo.learning_rate",
        "grpo_num_steps": "train_grpo.num_steps",
        "registry": "register.registry",
        "weights_storage": "register.storage",
    }.items()
}
"""The key of the params file for each typed parameter. Kubeflow's form shows only the name of a parameter."""
_NAMES = {key: name for name, key in TYPED_KEYS.items()}
_REPOSITORY = ("prepare_data", "repository")
_NUM_PROCESSES = (("train_sft", "engine", "num_processes"), ("train_grpo", "engine", "num_processes"))
_DERIVED: dict[Key, str] = {
    **dict.fromkeys(_NUM_PROCESSES, "cluster_nodes times cluster_gpus_per_node"),
    (CLUSTER, "image"): "deployment.image_gpu, which is compiled into the graph",
    (CLUSTER, "volume"): "deployment.volume, which is compiled into the graph",
    (CLUSTER, "secrets"): "deployment.secrets, which is compiled into the graph",
    (DEPLOYMENT,): "the compiled graph; set it in the params file that is compiled or submitted",
    (CLUSTER, "mount"): f"the graph, which mounts the volume at {MOUNT}",
}
"""Keys that the text must not set, each with the origin of its value."""
_MARGIN_S = 3600
"""Time that a step takes in addition to its job: to be scheduled, and to collect the outputs."""
_ANY_COMMIT = "0" * 40
"""Takes the place of a commit that is not known yet."""
_MISSING = object()


class Parameter(NamedTuple):
    """A field of the form."""

    type: type
    description: str


def parameters() -> dict[str, Parameter]:
    """Return every parameter of the form in alphabetical order, described as in the config models."""
    typed = {name: _parameter(key) for name, key in TYPED_KEYS.items()}
    others = {
        SKIP_IF_UNCHANGED: Parameter(bool, "End at once if code, data and config are those of the newest version."),
        OVERRIDES: Parameter(
            str, "Every other key, as in a params file: `{train_grpo: {group_size: 16}}`; null resets one."
        ),
    }
    return dict(sorted({**typed, **others}.items()))


def name_of(key: Key) -> str:
    """Return the name of the parameter for a key, or the key itself where it has none."""
    return _NAMES.get(key, ".".join(key))


def form_of(params: Params) -> Form:
    """Return the run form that is equivalent to params; its preset has the other keys that differ from defaults."""
    rest = params.model_dump(mode="json", exclude_defaults=True, exclude={DEPLOYMENT})
    everything = params.model_dump(mode="json")
    typed = {}
    for name, key in TYPED_KEYS.items():
        value = _get(everything, key)
        typed[name] = "" if value is None else value
        _remove(rest, key)
    for key in (*_NUM_PROCESSES, *SHARED_KEYS, _REPOSITORY):
        _remove(rest, key)
    if not {"nodes", "gpus_per_node"} & params.cluster.model_fields_set:  # then each process gets a GPU of one node
        num_processes = max(_get(everything, key) for key in _NUM_PROCESSES)
        typed |= {"cluster_nodes": 1, "cluster_gpus_per_node": num_processes}
    for name in ("registry", "weights_storage"):
        location = typed[name]
        is_relative = location and not location.startswith("/") and "://" not in location and "@" not in location
        if is_relative:  # a folder of a laptop becomes one of the shared volume
            typed[name] = f"{MOUNT}/{PurePosixPath(location).name}"
    preset = {name: section for name, section in rest.items() if section}
    return {**typed, SKIP_IF_UNCHANGED: False, OVERRIDES: "", PRESET: preset}


def overrides_of(form: Form) -> Sections:
    """Return the sections that the text sets, or those that have replaced it; PipelineError if it is not YAML."""
    text = form[OVERRIDES]
    return parse_sections(text, OVERRIDES) if isinstance(text, str) else text


def as_overrides(sections: Sections) -> str:
    """Return sections as a text in YAML of one line, as the field of Kubeflow's page has only one."""
    text = yaml.safe_dump(sections, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip() if sections else ""


def sections_of(
    form: Form, deployment: DeploymentConfig, *, commit: str = _ANY_COMMIT, secrets: Mapping[str, list[str]]
) -> tuple[Sections, list[str]]:
    """Return all sections that are equivalent to a form, and a line for each key that is set twice.

    `commit` is that of the form's branch or tag of the data; `secrets` are the keys of each secret for the pods of
    training jobs. PipelineError if `overrides` is not a mapping in YAML.
    """
    sections = laid_over(form.get(PRESET, {}), overrides_of(form))
    sections.setdefault(CLUSTER, {})
    twice = [
        f"{OVERRIDES}.{'.'.join(key)}: follows from {origin}; leave it out here"
        for key, origin in {**_NAMES, **_DERIVED}.items()
        if _get(sections, key, _MISSING) is not _MISSING
    ]
    for name, key in TYPED_KEYS.items():
        value = form[name]
        # KFP has no null: an empty field of the form stands for it.
        if value not in ("", None) and key[:2] != _REPOSITORY:
            set_key(sections, key, value)
    if form["data_repository"]:  # without one, a revision means nothing
        set_key(sections, _REPOSITORY, {"url": form["data_repository"], "commit": commit})
    for key in _NUM_PROCESSES:
        set_key(sections, key, form["cluster_nodes"] * max(1, form["cluster_gpus_per_node"]))
    cluster = {"image": deployment.image_gpu, "volume": deployment.volume, "mount": MOUNT, "secrets": dict(secrets)}
    for name, value in cluster.items():
        set_key(sections, (CLUSTER, name), value)
    return sections, twice


def wrong_sections(sections: Sections) -> list[str]:
    """Return a line for each error in the sections of a form, which begins with the parameter of the form."""
    lines = [in_the_form(line) for line in wrong_params(sections)]
    longest_s = LONGEST_TRAINING_S - _MARGIN_S
    if not lines and (limit_s := ClusterConfig.model_validate(sections[CLUSTER]).deadline_s) > longest_s:
        lines.append(
            f"{OVERRIDES}.{CLUSTER}: the time limits add up to {limit_s:.0f} s over all restarts; "
            f"accepted: {longest_s} s, after which the step itself is ended"
        )
    return list(dict.fromkeys(lines))


def complete(params: Params) -> Sections:
    """Return all sections with every key, as stages and training jobs receive them."""
    return params.model_dump(mode="json", exclude_none=True, exclude={DEPLOYMENT})


def in_the_form(line: str) -> str:
    """Return a line about a key of a params file (`cluster.nodes: ...`) as one about the form's parameter."""
    key, separator, rest = line.partition(": ")
    return f"{_NAMES.get(tuple(key.split('.')), f'{OVERRIDES}.{key}')}{separator}{rest}"


def set_key(values: Any, key: Key, new: Any) -> None:
    """Set a key in nested mappings; if a value on the way is no mapping, leave the error to validation."""
    for part in key[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            return
    values[key[-1]] = new


def page(form: Form, sections: Sections, notes: Mapping[str, str]) -> str:
    """Return the configuration of a run as HTML: the parameters, with `notes`, and every section in full.

    Markdown is no alternative: Kubeflow's UI cannot fold it, and shows it wider than its side panel.
    """
    values = sorted((name, value) for name, value in form.items() if name != PRESET)
    rows = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values}
    return render(
        Path(__file__).with_name("configuration.html.jinja"),
        rows={name: value for name, value in rows.items() if value} | dict(notes),
        empty=[name for name, value in rows.items() if not value],
        sections={name: json.dumps(section, indent=2, ensure_ascii=False) for name, section in sections.items()},
    )


def _parameter(key: Key) -> Parameter:
    """Return the type and the description of a key in the config models."""
    model: Any = Params
    for part in key[:-1]:
        kind = model.model_fields[part].annotation
        model = next(each for each in (kind, *get_args(kind)) if hasattr(each, "model_fields"))
    field = model.model_fields[key[-1]]
    kind = next(each for each in (*get_args(field.annotation), field.annotation) if each is not type(None))
    return Parameter(kind, " ".join((field.description or "").replace("null", "empty").split()))


def _get(values: Any, key: Key, default: Any = None) -> Any:
    for part in key:
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values


def _remove(values: Any, key: Key) -> None:
    """Remove a key, and the mappings around it that become empty."""
    holder = _get(values, key[:-1])
    if isinstance(holder, dict) and key[-1] in holder:
        del holder[key[-1]]
        if not holder and len(key) > 1:
            _remove(values, key[:-1])
