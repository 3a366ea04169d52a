"""Where the weights, the versions and the secrets of a run are, as far as that can be seen before it starts."""

import importlib.util
import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from components.preflight.config import MOUNT, SECRET_KEYS, SECRET_NAMES
from components.preflight.form import Form
from components.preflight.git_remote import references
from components.register.catalogue import Catalogue

_TAG = re.compile(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$")
_PACKAGES = {"s3": "dvc_s3", "gs": "dvc_gs", "azure": "dvc_azure", "ssh": "dvc_ssh"}
"""Package without which DVC does not speak to a kind of remote."""


def is_url(location: str) -> bool:
    """Whether a location is served by someone, and no folder."""
    return "://" in location or "@" in location


def images(form: Form) -> list[str]:
    """Whether the images are named by a tag or digest that stays: Kubeflow's cache goes by the name."""
    moving = [name for name in ("image_gpu", "image_light") if _TAG.search(form[name]) is None]
    return [f"{name}: {form[name]} names another image another day; accepted: a tag or a digest" for name in moving]


def credentials(form: Form) -> list[str]:
    """Whether an address in the form holds a password: parameters are kept, and shown to everybody."""
    named = ("data_repository", "registry_kubeflow_url", "registry_repository", "registry_weights_remote")
    parts = {name: urlsplit(form[name]) for name in named}
    held = [name for name, part in parts.items() if part.password or (part.username and part.scheme.startswith("http"))]
    return [f"{name}: holds a password or a token; change it, and use a secret" for name in held]


def repository(location: str) -> list[str]:
    """Whether the registry's repository answers; a folder is made by the first registration."""
    if is_url(location):
        references(location)
        return []
    return [] if location.startswith(f"{MOUNT}/") else [_elsewhere("registry_repository", location)]


def weights_remote(registry: str, remote: str) -> list[str]:
    """Whether the weights of versions have a place, and DVC can speak to it."""
    if not remote:
        needed = "registry_weights_remote: is empty, a registry at a URL has no place for weights; name a DVC remote"
        return [needed] if is_url(registry) else []
    scheme = remote.partition("://")[0]
    package = _PACKAGES.get(scheme)
    if package and importlib.util.find_spec(package) is None:
        return [
            f"registry_weights_remote: {scheme}:// needs the package {package.replace('_', '-')} in the light image"
        ]
    return [] if is_url(remote) or remote.startswith(f"{MOUNT}/") else [_elsewhere("registry_weights_remote", remote)]


def model_registry(url: str, remote: str) -> list[str]:
    """Whether Kubeflow Model Registry answers, and what it is told of can be found from elsewhere."""
    Catalogue(url)
    if is_url(remote):
        return []
    return ["registry_weights_remote: is no URL, and nobody finds a folder by what Kubeflow Model Registry says of it"]


def _elsewhere(parameter: str, location: str) -> str:
    return (
        f"{parameter}: {location} would go with the pod; accepted: a URL, or a folder of the shared volume, {MOUNT}/..."
    )


def training_secrets(form: Form) -> dict[str, list[str]]:
    """Return the secrets that the pods of training jobs take, of those that are there, with their keys."""
    keys = SECRET_KEYS["hub"]
    return {form["secret_hub"]: list(keys)} if all(key in os.environ for key in keys) else {}


def secrets(form: Form) -> list[str]:
    """Whether the secrets that the form names are there: preflight has their keys as environment variables too.

    Those with their usual names may be missing: not every run needs them.
    """
    return list(_missing_secrets(form))


def _missing_secrets(form: Form) -> Iterator[str]:
    for kind, keys in SECRET_KEYS.items():
        parameter = f"secret_{kind}"
        missing = [key for key in keys if key not in os.environ]
        if missing and (form[parameter] != SECRET_NAMES[parameter] or len(missing) < len(keys)):
            yield f"{parameter}: no secret {form[parameter]} with the keys {', '.join(missing)} in this namespace"
