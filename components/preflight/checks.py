"""The checks of a run that ask somebody else: the cluster, the repositories."""

from collections.abc import Callable
from functools import partial

from components.cluster.kube import Clock, RetryPolicy, connect, own_namespace
from components.preflight import cluster, permissions, storage
from components.preflight.dry_run import dry_run
from components.preflight.form import CLUSTER, Form
from components.preflight.git_remote import commit_of
from components.preflight.sections import models, rewards
from components.preflight.side_by_side import Check
from components.shared.config import Params
from components.shared.errors import PipelineError

_PATIENCE_S = 60.0
"""For how long the cluster is asked again that is busy, or that a webhook keeps waiting."""
REVISION = "data_revision"
"""The check whose answer is a commit; all others answer with a line for each thing that is wrong."""


def checks(form: Form, sections: Params, *, valid: bool, clock: Clock) -> dict[str, Check]:
    """Return every check that a form and its sections call for, by what it is about.

    Sections that are not valid are looked at where that makes sense all the same: each check names what it misses.
    """
    registry, remote = form["registry_repository"], form["registry_weights_remote"]
    found: dict[str, Check] = {
        "registry_repository": partial(storage.repository, registry),
        "registry_weights_remote": partial(storage.weights_remote, registry, remote),
        "secrets": partial(storage.secrets, form),
    }
    if form["registry_kubeflow_url"]:
        found["registry_kubeflow_url"] = partial(storage.model_registry, form["registry_kubeflow_url"], remote)
    if valid:
        found |= {"models": partial(models, sections), "rewards": partial(rewards, sections)}
    if form["data_repository"]:
        found[REVISION] = partial(_commit, form["data_repository"], form["data_revision"])
    return {**found, **_of_cluster(form, sections, RetryPolicy(clock, _PATIENCE_S), valid=valid)}


def _of_cluster(form: Form, sections: Params, retries: RetryPolicy, *, valid: bool) -> dict[str, Check]:
    section = sections[CLUSTER]
    try:
        api = connect()
        namespace = str(section.get("namespace") or own_namespace())
    except PipelineError as error:
        return {"cluster": partial(_raise, error)}
    runtime = "grpo-torch-vllm" if section.get("rollout_servers") else "grpo-torch"
    found: dict[str, Callable[[], list[str]]] = {
        "trainer": partial(cluster.trainer, api),
        "runtime": partial(cluster.runtime, api, namespace, runtime, _grace_s(sections) if valid else None),
        "cluster_volume_claim": partial(cluster.volume, api, namespace, form["cluster_volume_claim"]),
        "permissions": partial(permissions.missing, api, namespace),
    }
    if valid:
        found["training job"] = partial(dry_run, api, namespace, sections)
    if form["cluster_queue"]:
        found["cluster_queue"] = partial(cluster.local_queue, api, namespace, form["cluster_queue"])
    return {name: partial(retries.call, "answer", check) for name, check in found.items()}


def _grace_s(sections: Params) -> float:
    """Longest time that ranks of valid sections take to end."""
    return max(float(sections[stage]["checkpoint"]["grace_s"]) for stage in ("train_sft", "train_grpo"))


def _commit(repository: str, revision: str) -> str:
    if not revision:
        raise PipelineError("is empty; accepted: a branch, a tag or a commit of data_repository")
    return commit_of(repository, revision)


def _raise(error: PipelineError) -> None:
    raise error
