"""What a run needs from outside the cluster: git repositories, DVC remotes, the model registry; images and secrets."""

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.preflight.config import MOUNT, SECRET_KEYS, DeploymentConfig, Params, SecretsConfig
from components.preflight.form import SKIP_IF_UNCHANGED, Form
from components.register.catalogue import Catalogue
from components.register.registry import is_url
from components.shared import lineage
from components.shared.errors import PipelineError, UnchangedRunError
from components.shared.progress import say
from components.shared.versioning import Workspace, changes_since, newest_version

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_REFERENCES_SHOWN = 5
_FIXED_TAG = re.compile(r"@sha256:[0-9a-f]{64}$|:(?!latest$)[\w.-]+$")
_PACKAGES = {"s3": "dvc_s3", "gs": "dvc_gs", "azure": "dvc_azure", "ssh": "dvc_ssh"}
"""Package that DVC needs for a kind of remote."""
_MADE_BY = ("prepare_data", "train_sft", "train_grpo")
"""Stages whose config decides what a policy is."""


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
        listed = Workspace(Path(scratch), Path(scratch)).git("ls-remote", url)
    return {name: commit for commit, name in (line.split("\t") for line in listed.splitlines())}


def registry(location: str) -> Iterator[str]:
    """Check that the registry's repository answers; a folder is made by the first registration."""
    if is_url(location):
        references(location)
    yield from _not_shared("register_registry", location)


def storage(remote: str) -> Iterator[str]:
    """Check that DVC can put the weights of versions into a remote; without one they go beside a registry's folder."""
    scheme = remote.partition("://")[0]
    package = _PACKAGES.get(scheme)
    if package and importlib.util.find_spec(package) is None:
        yield f"register_storage: {scheme}:// needs the package {package.replace('_', '-')} in the light image"
    elif remote:
        yield from _not_shared("register_storage", remote)


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
        yield "register_storage: is not a URL, so the weights cannot be found from Kubeflow Model Registry"


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
    return [
        f"{name}: contains a password or a token; revoke it and use a Kubernetes secret"
        for name in _with_password("", form)
    ]


def _with_password(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _with_password(f"{name}.{key}" if name else key, each)
    elif isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        if parts.password or (parts.username and parts.scheme.startswith("http")):
            yield name


def training_secrets(deployment: DeploymentConfig) -> dict[str, list[str]]:
    """Return those of the secrets for pods of training jobs that exist, with their keys."""
    keys = SECRET_KEYS["hub"]
    return {deployment.secrets.hub: list(keys)} if all(key in os.environ for key in keys) else {}


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
    if not form[SKIP_IF_UNCHANGED] or is_url(form["register_registry"]):
        return []
    return [f"{SKIP_IF_UNCHANGED}: needs register_registry to be a URL; preflight does not mount the volume"]


def refuse_repetition(form: Form, params: Params) -> None:
    """Raise UnchangedRunError if a run would reproduce the newest version, and the form says to end then.

    PipelineError if the registry does not answer.
    """
    if not form[SKIP_IF_UNCHANGED]:
        return
    promoted = newest_version(form["register_registry"], params.register.name)
    if promoted is None:
        say("preflight", f"{form['register_registry']} has no version of {params.register.name} yet")
        return
    configs = {stage: getattr(params, stage) for stage in _MADE_BY}
    changed = changes_since(promoted, configs, lineage.code_digest())
    if not changed:
        raise UnchangedRunError(
            f"code, data and config are those of {promoted.tag}; a run would reproduce the latest registered version"
        )
    say("preflight", f"changed since {promoted.tag}: {', '.join(changed)}")
