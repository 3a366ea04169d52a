"""The run form: typed parameters, each for a key of the params file, and a JSON parameter per section for the rest.

One table says which key a parameter stands for. It takes a params file apart into a form, and a form together into
sections; a key is either in the form's typed part or in its JSON, never in both.
"""

import copy
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from components.preflight.config import MOUNT
from components.shared.config import Params

Form = dict[str, Any]
Key = tuple[str, ...]

CLUSTER = "cluster"
"""The section that no params file has: what a training job asks of the cluster."""
PREFIX = "section_"
"""Of the JSON parameters: `section_train_grpo` holds the rest of `train_grpo`."""

KEYS: dict[str, tuple[Key, ...]] = {
    "base_model": (("validate_data", "model", "base"), ("train_sft", "model", "base")),
    "cluster_gpu_product": ((CLUSTER, "gpu_type"),),
    "cluster_gpus_per_node": ((CLUSTER, "gpus_per_node"),),
    "cluster_node_selector": ((CLUSTER, "node_selector"),),
    "cluster_num_nodes": ((CLUSTER, "nodes"),),
    "cluster_queue": ((CLUSTER, "queue"),),
    "cluster_tolerations": ((CLUSTER, "tolerations"),),
    "cluster_volume_claim": ((CLUSTER, "volume"),),
    "grpo_group_size": (("train_grpo", "group_size"),),
    "grpo_kl_coefficient": (("train_grpo", "loss", "kl", "coefficient"),),
    "grpo_learning_rate": (("train_grpo", "learning_rate"),),
    "grpo_num_steps": (("train_grpo", "num_steps"),),
    "image_gpu": ((CLUSTER, "image"),),
    "registry_kubeflow_url": (("register", "model_registry"),),
    "registry_repository": (("register", "registry"),),
    "registry_weights_remote": (("register", "storage"),),
}
"""The keys that each typed parameter stands for."""

_NUM_PROCESSES = (("train_sft", "engine", "num_processes"), ("train_grpo", "engine", "num_processes"))
_REPOSITORY = ("prepare_data", "repository")
_MOUNT, _SECRETS = (CLUSTER, "mount"), (CLUSTER, "secrets")

_FOLLOWS: dict[Key, str] = {
    **dict.fromkeys(_NUM_PROCESSES, "cluster_num_nodes times cluster_gpus_per_node"),
    _REPOSITORY: "data_repository and data_revision",
    _SECRETS: "secret_hub",
    _MOUNT: f"the pipeline, which mounts the volume at {MOUNT}",
}
"""Keys that no parameter holds by itself, and what they follow from."""


def form_of(params: Params) -> Form:
    """Return the run form that means what a params file without nulls means, with its defaults for the cluster."""
    rest = copy.deepcopy(params)
    processes = max(_pop(rest, key) for key in _NUM_PROCESSES)
    repository = rest["prepare_data"].pop("repository", {})
    typed = {name: [_pop(rest, key) for key in keys][-1] for name, keys in KEYS.items() if keys[0][0] != CLUSTER}
    return {
        **typed,
        "registry_repository": _on_volume(typed["registry_repository"]),
        "registry_weights_remote": _on_volume(typed["registry_weights_remote"] or ""),
        "registry_kubeflow_url": typed["registry_kubeflow_url"] or "",
        "cluster_num_nodes": 1,
        "cluster_gpus_per_node": processes,
        "data_repository": repository.get("url", ""),
        "data_revision": repository.get("commit", ""),
        **{PREFIX + stage: section for stage, section in rest.items()},
    }


def sections_of(form: Form, data_commit: str, secrets: Mapping[str, list[str]]) -> tuple[Params, list[str]]:
    """Return the sections that a form means, the cluster's among them, and a line for each key that is given twice.

    Args:
        form: A value for every parameter.
        data_commit: The commit that its data_revision is.
        secrets: Secrets for the pods of training jobs, with their keys.
    """
    sections = {
        name.removeprefix(PREFIX): copy.deepcopy(form[name]) for name in sorted(form) if name.startswith(PREFIX)
    }
    twice = [_twice(key, name) for name, keys in KEYS.items() for key in keys if _has(sections, key)]
    twice += [_twice(key, origin) for key, origin in _FOLLOWS.items() if _has(sections, key)]
    for name, keys in KEYS.items():
        for key in keys:
            # An empty field of the form is what null is in a params file: KFP has no value for it.
            if form[name] not in ("", None):
                _put(sections, key, form[name])
    for key in _NUM_PROCESSES:
        _put(sections, key, form["cluster_num_nodes"] * max(1, form["cluster_gpus_per_node"]))
    if form["data_repository"]:
        _put(sections, _REPOSITORY, {"url": form["data_repository"], "commit": data_commit})
    _put(sections, _MOUNT, MOUNT)
    _put(sections, _SECRETS, dict(secrets))
    return sections, twice


def is_rest(key: Key) -> bool:
    """Tell whether a key may stand in the JSON of its section: no parameter stands for it, and none implies it."""
    return key not in _FOLLOWS and all(key not in keys for keys in KEYS.values())


def _twice(key: Key, origin: str) -> str:
    return f"{PREFIX}{'.'.join(key)}: follows from {origin}; leave it out here"


def _on_volume(location: str) -> str:
    """A relative folder of a laptop becomes one of the shared volume; URLs and absolute folders stay."""
    if not location or "://" in location or "@" in location or location.startswith("/"):
        return location
    return f"{MOUNT}/{PurePosixPath(location).name}"


def _has(sections: Mapping[str, Any], key: Key) -> bool:
    value: Any = sections
    for part in key:
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _pop(sections: Params, key: Key) -> Any:
    """Take a key out; None where it was left out, which is how a null comes."""
    value: Any = sections
    for part in key[:-1]:
        value = value[part]
    return value.pop(key[-1], None)


def _put(sections: Params, key: Key, new: Any) -> None:
    value: Any = sections
    for part in key[:-1]:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):  # what stands there is refused with the section
            return
    value[key[-1]] = new
