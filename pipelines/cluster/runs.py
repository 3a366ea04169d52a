"""Starting and stopping a run."""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime
from typing import Any

from components.shared.errors import PipelineError
from pipelines.cluster.kubeflow import Kubeflow, readable_errors
from pipelines.cluster.package import Package
from pipelines.cluster.stages import FINISHED


def submit(
    kubeflow: Kubeflow,
    package: Package,
    parameters: dict[str, Any],
    *,
    name: str,
    experiment: str,
    service_account: str | None,
) -> Any:
    """Start a run and return it."""
    experiment_id = kubeflow.experiment(experiment)
    with readable_errors(kubeflow.endpoint), redirect_stdout(io.StringIO()):
        return kubeflow.client.run_pipeline(
            experiment_id,
            job_name=name,
            pipeline_package_path=str(package.path),
            params=parameters,
            service_account=service_account,
        )


def stop(kubeflow: Kubeflow, run: Any) -> Iterator[str]:
    """Stop a run, then remove its training jobs, which a step does not where it is killed within a second.

    Yields:
        A line about the run and about each job.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect
    from components.cluster.reaper import delete_run

    if run.state in FINISHED:
        yield f"{run.display_name}  had already ended: {run.state.lower()}"
    else:
        with readable_errors(kubeflow.endpoint):
            kubeflow.client.terminate_run(run.run_id)
        yield f"{run.display_name}  stopping"
    try:
        removed = delete_run(connect(), _namespace_of_jobs(kubeflow, run), run.run_id)
    except (PipelineError, ApiException, HTTPError) as error:
        reason = f"the Kubernetes API says {error.reason}" if isinstance(error, ApiException) else str(error)
        yield f"training jobs not removed; their steps or the reaper will remove them: {reason}"
    else:
        yield from (f"training job {name} removed" for name in removed)


def run_name(stem: str) -> str:
    """Return a name that tells runs of the same params apart."""
    return f"{stem}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"


def _namespace_of_jobs(kubeflow: Kubeflow, run: Any) -> str:
    section = ((run.runtime_config.parameters or {}).get("overrides") or {}).get("cluster") or {}
    return str(section.get("namespace") or kubeflow.namespace)
