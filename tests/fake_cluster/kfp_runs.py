"""Runs and schedules: checked, started, stopped and switched."""

from functools import partial

from tests.fake_cluster import kfp_documents
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kfp_state import FINISHED, KfpState
from tests.fake_cluster.routes import Route

_STOPS_S = 5.0
"""How long a run takes from being told to stop until it has."""


class Runs:
    """What is asked of runs and of recurring runs."""

    def __init__(self, state: KfpState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """The paths below which they are."""
        return [
            ("POST", "runs", self._create_run),
            ("GET", "runs", partial(self._state.list, self._state.runs, "runs")),
            ("GET", "runs/{}", partial(self._state.get, self._state.runs, "Run")),
            ("DELETE", "runs/{}", partial(self._state.delete, self._state.runs, "Run")),
            ("POST", "runs/{}:terminate", self._terminate),
            ("POST", "recurringruns", self._create_recurring),
            ("GET", "recurringruns", partial(self._state.list, self._state.recurring_runs, "recurringRuns")),
            ("GET", "recurringruns/{}", partial(self._state.get, self._state.recurring_runs, "RecurringRun")),
            ("DELETE", "recurringruns/{}", self._delete_recurring),
            ("POST", "recurringruns/{}:enable", partial(self._switch, "ENABLED")),
            ("POST", "recurringruns/{}:disable", partial(self._switch, "DISABLED")),
        ]

    def _checked_job(self, body: Json) -> Json:
        """What a run and a recurring run have in common, if it can be run."""
        if not body.get("display_name"):
            raise ApiError(400, "The run name is empty. Please specify a valid name")
        experiment = self._state.existing(self._state.experiments, "Experiment", body.get("experiment_id") or "")
        reference = body.get("pipeline_version_reference")
        if bool(reference) == bool(body.get("pipeline_spec")):
            raise ApiError(400, "either a pipeline_spec or a pipeline_version_reference must be given")
        if reference:
            version = self._state.existing(
                self._state.versions, "PipelineVersion", reference.get("pipeline_version_id", "")
            )
            pipeline = version["pipeline_spec"]
        else:
            pipeline = kfp_documents.checked(body["pipeline_spec"])
        kfp_documents.check_parameters(pipeline, (body.get("runtime_config") or {}).get("parameters") or {})
        self._state.namespace_of(experiment["namespace"])
        kept = ("display_name", "description", "pipeline_version_reference", "runtime_config", "service_account")
        return {
            **{name: body[name] for name in kept if name in body},
            **({} if reference else {"pipeline_spec": pipeline}),
            "experiment_id": experiment["experiment_id"],
            "namespace": experiment["namespace"],
        }

    def _create_run(self, request: Request) -> Answer:
        job = self._checked_job(request.object())
        run = self._state.new(self._state.runs, "run_id", **job, storage_state="AVAILABLE")
        at = 0.0
        for state, seconds in self._state.history:
            self._enter_in(run, state, at)
            at += seconds
        return Answer(run)

    def _enter_in(self, run: Json, state: str, seconds: float) -> None:
        def enter() -> None:
            if run.get("state") not in {*FINISHED, "CANCELING"}:
                self._state.enter(run, state)

        if seconds:
            self._state.clock.call_in(seconds, enter)
        else:
            enter()

    def _terminate(self, _: Request, id_: str) -> Answer:
        run = self._state.existing(self._state.runs, "Run", id_)
        if run["state"] not in ("PENDING", "RUNNING", "PAUSED"):
            raise ApiError(400, f"Failed to terminate run {id_}: it is in the state {run['state']}")
        self._state.enter(run, "CANCELING")

        def end() -> None:
            # What becomes of a run is read from its workflow. A run that is stopped counts as failed.
            if "recurring_run_id" not in run or id_ in self._state.workflows:
                self._state.enter(run, "FAILED")

        self._state.clock.call_in(_STOPS_S, end)
        return Answer({})

    def _create_recurring(self, request: Request) -> Answer:
        body = request.object()
        kfp_documents.check_schedule(body)
        job = self._checked_job(body)
        status = {"ENABLE": "ENABLED", "DISABLE": "DISABLED"}.get(body.get("mode", ""))
        if status is None:
            raise ApiError(400, f"Invalid recurring run mode: {body.get('mode')}")
        kept = ("max_concurrency", "trigger", "mode", "no_catchup")
        settings = {name: body[name] for name in kept if name in body}
        return Answer(self._state.new(self._state.recurring_runs, "recurring_run_id", **job, **settings, status=status))

    def _delete_recurring(self, request: Request, id_: str) -> Answer:
        """Forget a schedule; its workflows belong to it, and go with their pods, of which its runs learn nothing."""
        of_it = [run_id for run_id, run in self._state.runs.items() if run.get("recurring_run_id") == id_]
        gone = tuple(self._state.workflows.pop(run_id) for run_id in of_it)
        self._state.pods = {pod: text for pod, text in self._state.pods.items() if not pod.startswith(gone)}
        return self._state.delete(self._state.recurring_runs, "RecurringRun", request, id_)

    def _switch(self, status: str, _: Request, id_: str) -> Answer:
        self._state.existing(self._state.recurring_runs, "RecurringRun", id_)["status"] = status
        return Answer({})
