"""The training job of a run, shown to the cluster without being made there."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client

from components.cluster import kube
from components.cluster.config import ClusterConfig, ClusterStage
from components.cluster.job import Job
from components.cluster.kube import is_transient
from components.cluster.manifest import train_job
from components.shared.config import Params

_STAGE = "train_grpo"
_NAMED_ELSEWHERE = {403, 404}
"""Not allowed, or no such kind: what other checks say plainly."""


def dry_run(api: client.ApiClient, namespace: str, sections: Params) -> list[str]:
    """Whether the cluster would take the training job that valid sections lead to, field by field.

    Raises:
        kubernetes.client.ApiException: The cluster or a webhook is too busy to say.
    """
    config = ClusterConfig.model_validate(sections["cluster"])
    manifest = train_job(
        _job(sections[_STAGE]), ClusterStage(config, "preflight", _STAGE, Path(config.mount)), {}, None, _now()
    )
    try:
        client.CustomObjectsApi(api).create_namespaced_custom_object(
            kube.GROUP, kube.VERSION, namespace, kube.PLURAL, manifest, dry_run="All", field_validation="Strict"
        )
    except client.ApiException as error:
        if is_transient(error):
            raise
        if error.status in _NAMED_ELSEWHERE:
            return []
        return [f"the cluster refuses the training job: {_reason(error)}"]
    return []


def _job(section: dict[str, Any]) -> Job:
    """A job of the right size; what it would do makes no difference here."""
    return Job(
        folder=Path("/work/preflight"),
        function="",
        config={},
        folders={},
        outputs={},
        num_processes=section["engine"]["num_processes"],
        grace_s=section["checkpoint"]["grace_s"],
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _reason(error: client.ApiException) -> str:
    try:
        message = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    if "runtimePatches" in message:
        return f"Kubeflow Trainer is too old; 2.2 or newer is needed ({message})"
    return message
