"""A run: the compiled pipeline that it is submitted with, its start and its end."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from components.shared import lineage
from components.shared.errors import PipelineError
from pipelines.cluster.kubeflow import Kubeflow, readable_errors
from pipelines.cluster.stages import FINISHED

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C where it was built: a pipeline is a long document."""


@dataclass(frozen=True)
class Package:
    """A compiled pipeline in a file."""

    path: Path
    types: dict[str, str]
    """Of each parameter, in Kubeflow's words: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT or LIST."""
    defaults: dict[str, Any]
    images: tuple[str, ...]
    """Those that its tasks run in."""
    digest: str
    """Of the content of the file."""


@contextmanager
def package(path: Path | None, params: Path) -> Iterator[Package]:
    """Yield the pipeline in a file, or else the one that this code compiles to with a params file."""
    if path is not None:
        yield read(path)
        return
    from components.preflight.config import load_params
    from pipelines.graph import write

    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as folder:
        compiled = Path(folder) / "pipeline.yaml"
        write(compiled, load_params(params))
        yield read(compiled)


def read(path: Path) -> Package:
    """Return the pipeline in a file.

    Raises:
        PipelineError: It is none.
    """
    try:
        documents = [each for each in yaml.load_all(path.read_text(encoding="utf-8"), _LOADER) if each]
        parameters = documents[0]["root"].get("inputDefinitions", {}).get("parameters", {})
        containers = [each["container"] for each in documents[0]["deploymentSpec"]["executors"].values()]
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError):
        raise PipelineError(f"{path}: not a compiled pipeline; `grpo-pipeline compile` writes one") from None
    return Package(
        path=path,
        types={each: definition["parameterType"] for each, definition in parameters.items()},
        defaults={each: one["defaultValue"] for each, one in parameters.items() if "defaultValue" in one},
        images=tuple(sorted({container["image"] for container in containers})),
        digest=lineage.value_digest(documents),
    )


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
