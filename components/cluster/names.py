"""What a run's objects in the cluster are called, and how they are told from all others."""

from collections.abc import Mapping
from typing import Any

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
"""The custom resource TrainJob."""

MANAGED_BY, OURS = "app.kubernetes.io/managed-by", "grpo-pipeline"
RUN_ID = "grpo-pipeline/run-id"
STAGE = "grpo-pipeline/stage"
"""Labels of all that a run makes."""
WORK = "grpo-pipeline/work"
"""Label of a training job: a digest of the folder with its checkpoints, which two jobs must not write to at once."""

HEARTBEAT = "grpo-pipeline/heartbeat"
"""Annotation: when the step that waits for a job was last known to live (RFC 3339)."""
STALE_AFTER_S = "grpo-pipeline/stale-after-s"
"""Annotation: seconds after which a job with an older heartbeat is nobody's any more."""
SPEC_DIGEST = "grpo-pipeline/spec-digest"
"""Annotation: SHA-256 of what was asked for, by which a step that is run again knows its job."""


def selector(labels: Mapping[str, str]) -> str:
    """Return a label selector for our objects that have these labels too."""
    return ",".join(f"{name}={value}" for name, value in {MANAGED_BY: OURS, **labels}.items())


def is_ours(document: Mapping[str, Any]) -> bool:
    """Tell whether a run of this project has made an object."""
    labels: Mapping[str, str] = document["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY) == OURS and RUN_ID in labels
