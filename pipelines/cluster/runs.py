"""Runs on the cluster: which there are, and starting and stopping one."""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from components.shared.errors import PipelineError
from pipelines.cluster.explained import explained
from pipelines.cluster.package import Package
from pipelines.cluster.tasks import FINISHED

if TYPE_CHECKING:
    import kfp

EXPERIMENT = "grpo-pipeline"
_RECENT = 100
_FULL_ID = 36
STANDALONE = "kubeflow"
"""Namespace of the runs where Kubeflow has one user only."""


@dataclass(frozen=True)
class Cluster:
    """A Kubeflow Pipelines that was reached."""

    client: "kfp.Client"
    endpoint: str
    namespace: str | None
    _specs: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Pipelines of the versions that runs refer to."""

    def url(self, run_id: str) -> str:
        """Return the page of a run."""
        return f"{self.endpoint}/#/runs/details/{run_id}"

    def experiment(self, name: str) -> str:
        """Return the id of an experiment, made if there is none of this name."""
        with explained(self.endpoint), redirect_stdout(io.StringIO()):  # the client prints an address of its own
            return str(self.client.create_experiment(name, namespace=self.namespace).experiment_id)

    def get(self, run_id: str) -> Any:
        """Return a run by its whole id, with its pipeline also where that was uploaded before."""
        with explained(self.endpoint, missing=f"{run_id}: no such run; `grpo-pipeline status` lists them"):
            run = self.client.get_run(run_id)
        if not run.pipeline_spec and run.pipeline_version_reference:
            run.pipeline_spec = self._spec(run.pipeline_version_reference)
        return run

    def _spec(self, version: Any) -> Any:
        """The pipeline of a version; None once the version has been deleted."""
        from kfp_server_api import ApiException

        id_ = version.pipeline_version_id
        if id_ not in self._specs:
            with explained(self.endpoint):
                try:
                    self._specs[id_] = self.client.get_pipeline_version(version.pipeline_id, id_).pipeline_spec
                except ApiException as error:
                    if error.status != 404:
                        raise
                    self._specs[id_] = None
        return self._specs[id_]

    def newest(self, page_size: int = _RECENT) -> Iterator[Any]:
        """Yield all runs, the newest first; a page is asked for when the one before it is used up."""
        token = ""
        while True:
            with explained(self.endpoint):
                page = self.client.list_runs(
                    page_token=token, page_size=page_size, sort_by="created_at desc", namespace=self.namespace
                )
            yield from page.runs or []
            token = page.next_page_token
            if not token:
                return

    def recent(self, count: int = _RECENT) -> list[Any]:
        """Return the newest runs first."""
        return list(islice(self.newest(count), count))

    def find(self, name: str) -> Any:
        """Return the run with this id, beginning of an id, or name; PipelineError where none or several have it."""
        if len(name) == _FULL_ID:
            return self.get(name)
        found = [run for run in self.recent() if run.run_id.startswith(name) or run.display_name == name]
        if not found:
            raise PipelineError(f"{name}: no such run among the last {_RECENT}; `grpo-pipeline status` lists them")
        if len(found) > 1:
            ids = ", ".join(run.run_id for run in found[:5])
            raise PipelineError(f"{name}: may be {ids}; give more of the id")
        return self.get(found[0].run_id)


def submit(
    cluster: Cluster, package: Package, parameters: dict[str, Any], *, name: str, experiment: str, account: str | None
) -> Any:
    """Start a run and return it."""
    experiment_id = cluster.experiment(experiment)
    with explained(cluster.endpoint), redirect_stdout(io.StringIO()):
        return cluster.client.run_pipeline(
            experiment_id,
            job_name=name,
            pipeline_package_path=str(package.path),
            params=parameters,
            service_account=account,
        )


def stop(cluster: Cluster, run: Any) -> Iterator[str]:
    """Tell Kubeflow to end a run, then remove its training jobs, and say what became of each."""
    if run.state in FINISHED:
        yield f"{run.display_name}  had ended already: {run.state.lower()}"
    else:
        with explained(cluster.endpoint):
            cluster.client.terminate_run(run.run_id)
        yield f"{run.display_name}  stopping"
    yield from _remove_jobs(_namespace(cluster, run), run.run_id)


def _namespace(cluster: Cluster, run: Any) -> str:
    """Where the training jobs of a run are."""
    section = (run.runtime_config.parameters or {}).get("section_cluster") or {}
    return str(section.get("namespace") or cluster.namespace or STANDALONE)


def _remove_jobs(namespace: str, run_id: str) -> Iterator[str]:
    """Remove what a step that was ended within a second may have left; steps do so themselves where they can."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect
    from components.cluster.reaper import delete_run

    try:
        removed = delete_run(connect(), namespace, run_id)
    except PipelineError as error:
        yield f"training jobs are left to their steps and to the reaper: {error}"
    except (ApiException, HTTPError) as error:
        reason = error.reason if isinstance(error, ApiException) else "no answer"
        yield f"training jobs are left to their steps and to the reaper: the Kubernetes API says {reason}"
    else:
        yield from (f"training job {name} removed" for name in removed)


def run_name(stem: str, now: datetime | None = None) -> str:
    """Return a name that tells runs of the same params apart."""
    return f"{stem}-{(now or datetime.now(UTC)).strftime('%Y%m%dT%H%M%SZ')}"
