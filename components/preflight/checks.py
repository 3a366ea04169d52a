"""The checks of a run that ask somebody else: the cluster, the repositories."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.launch.api import connect, own_namespace
from components.preflight import cluster, permissions, storage
from components.preflight.form import Form
from components.preflight.git_remote import commit_of
from components.preflight.side_by_side import Check
from components.shared.errors import PipelineError

REVISION = "data_revision"
"""The check whose answer is a commit; all others answer with a line for each thing that is wrong."""


def checks(form: Form, section: Mapping[str, Any]) -> dict[str, Check]:
    """Return every check that a form and its cluster section call for, by what it is about.

    Nothing of the section is taken for valid here: each check names what it does not find.
    """
    registry, remote = form["registry_repository"], form["registry_weights_remote"]
    found: dict[str, Check] = {
        "registry_repository": partial(storage.repository, registry),
        "registry_weights_remote": partial(storage.weights_remote, registry, remote),
        "secrets": partial(storage.secrets, form),
    }
    if form["data_repository"]:
        found[REVISION] = partial(_commit, form["data_repository"], form["data_revision"])
    return {**found, **_of_cluster(form, section)}


def _of_cluster(form: Form, section: Mapping[str, Any]) -> dict[str, Check]:
    try:
        api = connect()
        namespace = str(section.get("namespace") or own_namespace())
    except PipelineError as error:
        return {"cluster": partial(_raise, error)}
    runtime = "grpo-torch-vllm" if section.get("rollout_servers") else "grpo-torch"
    found: dict[str, Callable[[], list[str]]] = {
        "trainer": partial(cluster.trainer, api),
        "runtime": partial(cluster.runtime, api, namespace, runtime),
        "cluster_volume_claim": partial(cluster.volume, api, namespace, form["cluster_volume_claim"]),
        "permissions": partial(permissions.missing, api, namespace),
    }
    if form["cluster_queue"]:
        found["cluster_queue"] = partial(cluster.local_queue, api, namespace, form["cluster_queue"])
    return {name: partial(_asked, check) for name, check in found.items()}


def _asked(check: Callable[[], list[str]]) -> list[str]:
    """Ask the cluster; what it cannot answer is something to be corrected as well."""
    try:
        return check()
    except client.ApiException as error:
        raise PipelineError(f"the Kubernetes API answers {error.status} {error.reason}") from None
    except HTTPError as error:
        raise PipelineError(f"the Kubernetes API does not answer ({error})") from None


def _commit(repository: str, revision: str) -> str:
    if not revision:
        raise PipelineError("is empty; accepted: a branch, a tag or a commit of data_repository")
    return commit_of(repository, revision)


def _raise(error: PipelineError) -> None:
    raise error
