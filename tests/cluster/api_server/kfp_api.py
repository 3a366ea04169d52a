"""Kubeflow Pipelines' API v2beta1, as far as its client calls it."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.cluster.api_server import kfp_documents
from tests.cluster.api_server.clock import Clock
from tests.cluster.api_server.errors import ApiError, Json
from tests.cluster.api_server.http import Answer, Request
from tests.cluster.api_server.kfp_listing import page
from tests.cluster.api_server.routes import Route, dispatch

PREFIX = "/apis/v2beta1/"
LOGS_PREFIX = "/apis/v1alpha1/runs/"
"""Under which logs are, in whichever version the rest is."""
_FINISHED = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
_STOPS_S = 5.0
"""How long a run takes from being told to stop until it has."""


@dataclass
class KfpApi:
    """The state of Kubeflow Pipelines and its answers.

    Attributes:
        multi_user: Whether there are profiles: each has its namespace, which requests must name.
        namespaces: Those that this user may use.
        token: What the client has to present as bearer.
        cookie: What it may present as cookie instead. With neither nobody is asked.
        history: The states that a run goes through, each with its seconds; the last one stays.
        logs: What a run's pods have printed, by run and pod; a pod that has not begun has none.
    """

    clock: Clock
    multi_user: bool = False
    namespaces: tuple[str, ...] = ("team",)
    token: str | None = None
    cookie: str | None = None
    history: tuple[tuple[str, float], ...] = (("PENDING", 5), ("RUNNING", 60), ("SUCCEEDED", 0))
    experiments: dict[str, Json] = field(default_factory=dict)
    pipelines: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    recurring_runs: dict[str, Json] = field(default_factory=dict)
    logs: dict[tuple[str, str], str] = field(default_factory=dict)
    _count: int = 0

    def answer(self, request: Request) -> Answer:
        """Answer a request.

        Raises:
            ApiError: It is refused.
        """
        path = request.path.removeprefix(PREFIX)
        if request.path.startswith(LOGS_PREFIX):
            self._authenticate(request)
            return dispatch([("GET", "{}/nodes/{}/log", self._log)], request, path.removeprefix(LOGS_PREFIX))
        if path != "healthz":
            self._authenticate(request)
        with self.clock.changed:
            return dispatch(self._routes(), request, path)

    def set_state(self, run_id: str, state: str) -> None:
        """Have a run be in a state from now on."""
        with self.clock.changed:
            self._enter(self.runs[run_id], state)

    def _routes(self) -> list[Route]:
        return [
            ("GET", "healthz", self._health),
            ("POST", "experiments", self._create_experiment),
            ("GET", "experiments", partial(self._list, self.experiments, "experiments")),
            ("GET", "experiments/{}", partial(self._get, self.experiments, "Experiment")),
            ("POST", "pipelines/upload", self._upload),
            ("POST", "pipelines/upload_version", self._upload_version),
            ("GET", "pipelines", partial(self._list, self.pipelines, "pipelines")),
            ("GET", "pipelines/names/{}", self._pipeline_by_name),
            ("GET", "pipelines/{}", partial(self._get, self.pipelines, "Pipeline")),
            ("DELETE", "pipelines/{}", partial(self._delete, self.pipelines, "Pipeline")),
            ("GET", "pipelines/{}/versions", self._list_versions),
            ("GET", "pipelines/{}/versions/{}", self._get_version),
            ("DELETE", "pipelines/{}/versions/{}", self._delete_version),
            ("POST", "runs", self._create_run),
            ("GET", "runs", partial(self._list, self.runs, "runs")),
            ("GET", "runs/{}", partial(self._get, self.runs, "Run")),
            ("DELETE", "runs/{}", partial(self._delete, self.runs, "Run")),
            ("POST", "runs/{}:terminate", self._terminate),
            ("POST", "recurringruns", self._create_recurring),
            ("GET", "recurringruns", partial(self._list, self.recurring_runs, "recurringRuns")),
            ("GET", "recurringruns/{}", partial(self._get, self.recurring_runs, "RecurringRun")),
            ("DELETE", "recurringruns/{}", partial(self._delete, self.recurring_runs, "RecurringRun")),
            ("POST", "recurringruns/{}:enable", partial(self._switch, "ENABLED")),
            ("POST", "recurringruns/{}:disable", partial(self._switch, "DISABLED")),
        ]

    def _authenticate(self, request: Request) -> None:
        if self.token is None and self.cookie is None:
            return
        by_token = self.token is not None and request.headers.get("authorization") == f"Bearer {self.token}"
        by_cookie = self.cookie is not None and request.headers.get("cookie") == self.cookie
        if not (by_token or by_cookie):
            raise ApiError(401, "Request header error: there is no user identity header.", reason="Unauthenticated")

    def _namespace(self, given: str | None) -> str:
        """The namespace of a request: required, and one of the user's, where there are profiles."""
        if not self.multi_user:
            return given or ""
        if not given:
            raise ApiError(400, "Namespace cannot be empty in multi-user mode", reason="InvalidArgument")
        if given not in self.namespaces:
            raise ApiError(403, f"User is not authorized in the namespace {given}", reason="PermissionDenied")
        return given

    def _health(self, _: Request) -> Answer:
        return Answer({"multi_user": self.multi_user})

    def _new(self, table: dict[str, Json], key: str, **values: object) -> Json:
        self._count += 1
        id_ = str(uuid.UUID(int=self._count << 64, version=4))
        row = {key: id_, "created_at": self.clock.now().isoformat().replace("+00:00", "Z"), **values}
        table[id_] = {name: value for name, value in row.items() if value is not None}
        return table[id_]

    def _get(self, table: dict[str, Json], kind: str, _: Request, id_: str) -> Answer:
        return Answer(self._existing(table, kind, id_))

    def _log(self, _: Request, run_id: str, pod: str) -> Answer:
        self._existing(self.runs, "Run", run_id)
        if (run_id, pod) not in self.logs:
            raise ApiError(500, f'container "main" in pod "{pod}" is waiting to start: ContainerCreating')
        return Answer(self.logs[run_id, pod])

    def _existing(self, table: dict[str, Json], kind: str, id_: str) -> Json:
        if id_ not in table:
            raise ApiError(404, f"{kind} {id_} not found")
        return table[id_]

    def _list(self, table: dict[str, Json], called: str, request: Request) -> Answer:
        namespace = request.query.get("namespace", "")
        experiment = request.query.get("experiment_id", "")
        if table is not self.pipelines and not experiment:
            namespace = self._namespace(namespace)
        rows = [
            row
            for row in table.values()
            if (not experiment or row.get("experiment_id") == experiment)
            and (not self.multi_user or not namespace or row.get("namespace", namespace) == namespace)
        ]
        return page(rows, request, called)

    def _delete(self, table: dict[str, Json], kind: str, _: Request, id_: str) -> Answer:
        self._existing(table, kind, id_)
        if table is self.pipelines and any(each["pipeline_id"] == id_ for each in self.versions.values()):
            raise ApiError(400, f"as it has existing pipeline versions, pipeline {id_} cannot be deleted")
        del table[id_]
        return Answer({})

    def _create_experiment(self, request: Request) -> Answer:
        body = request.object()
        name, namespace = body.get("display_name"), self._namespace(body.get("namespace"))
        if not name:
            raise ApiError(400, "Experiment name is empty. Please specify a valid experiment name")
        rows = self.experiments.values()
        if any((row["display_name"], row["namespace"]) == (name, namespace) for row in rows):
            raise ApiError(409, f"Experiment {name} already exists", reason="AlreadyExists")
        row = self._new(
            self.experiments,
            "experiment_id",
            display_name=name,
            namespace=namespace,
            description=body.get("description"),
            storage_state="AVAILABLE",
        )
        return Answer(row)

    def _upload(self, request: Request) -> Answer:
        pipeline = kfp_documents.uploaded(request)
        name = request.query.get("name") or pipeline["pipeline_spec"]["pipelineInfo"]["name"]
        if any(row["name"] == name for row in self.pipelines.values()):
            raise ApiError(409, f"Already exist error: The name {name} already exist. Please specify a new name")
        row = self._new(
            self.pipelines,
            "pipeline_id",
            name=name,
            display_name=request.query.get("display_name") or name,
            description=request.query.get("description"),
            namespace=request.query.get("namespace"),
        )
        self._add_version(row["pipeline_id"], name, request, pipeline)
        return Answer(row)

    def _upload_version(self, request: Request) -> Answer:
        parent = self._existing(self.pipelines, "Pipeline", request.query.get("pipelineid", ""))["pipeline_id"]
        name = request.query.get("name", "")
        return Answer(self._add_version(parent, name, request, kfp_documents.uploaded(request)))

    def _add_version(self, pipeline_id: str, name: str, request: Request, pipeline: Json) -> Json:
        rows = self.versions.values()
        if not name or any((row["pipeline_id"], row["name"]) == (pipeline_id, name) for row in rows):
            raise ApiError(409, f"Already exist error: The name {name} already exist. Please specify a new name")
        return self._new(
            self.versions,
            "pipeline_version_id",
            pipeline_id=pipeline_id,
            name=name,
            display_name=name,
            description=request.query.get("description"),
            pipeline_spec=pipeline,
        )

    def _pipeline_by_name(self, _: Request, name: str) -> Answer:
        for row in self.pipelines.values():
            if row["name"] == name:
                return Answer(row)
        raise ApiError(404, f"Pipeline {name} not found")

    def _list_versions(self, request: Request, pipeline_id: str) -> Answer:
        self._existing(self.pipelines, "Pipeline", pipeline_id)
        rows = [row for row in self.versions.values() if row["pipeline_id"] == pipeline_id]
        return page(rows, request, "pipeline_versions")

    def _get_version(self, _: Request, __: str, id_: str) -> Answer:
        return Answer(self._existing(self.versions, "PipelineVersion", id_))

    def _delete_version(self, request: Request, _: str, id_: str) -> Answer:
        return self._delete(self.versions, "PipelineVersion", request, id_)

    def _checked_job(self, body: Json) -> Json:
        """What a run and a recurring run have in common, if it can be run."""
        if not body.get("display_name"):
            raise ApiError(400, "The run name is empty. Please specify a valid name")
        experiment = self._existing(self.experiments, "Experiment", body.get("experiment_id") or "")
        reference = body.get("pipeline_version_reference")
        if bool(reference) == bool(body.get("pipeline_spec")):
            raise ApiError(400, "either a pipeline_spec or a pipeline_version_reference must be given")
        if reference:
            version = self._existing(self.versions, "PipelineVersion", reference.get("pipeline_version_id", ""))
            pipeline = version["pipeline_spec"]
        else:
            pipeline = kfp_documents.checked(body["pipeline_spec"])
        kfp_documents.check_parameters(pipeline, (body.get("runtime_config") or {}).get("parameters") or {})
        self._namespace(experiment["namespace"])
        kept = ("display_name", "description", "pipeline_version_reference", "runtime_config", "service_account")
        return {
            **{name: body[name] for name in kept if name in body},
            "pipeline_spec": pipeline,
            "experiment_id": experiment["experiment_id"],
            "namespace": experiment["namespace"],
        }

    def _create_run(self, request: Request) -> Answer:
        job = self._checked_job(request.object())
        run = self._new(self.runs, "run_id", **job, storage_state="AVAILABLE")
        at = 0.0
        for state, seconds in self.history:
            self._enter_in(run, state, at)
            at += seconds
        return Answer(run)

    def _enter_in(self, run: Json, state: str, seconds: float) -> None:
        def enter() -> None:
            if run.get("state") not in {*_FINISHED, "CANCELING"}:
                self._enter(run, state)

        if seconds:
            self.clock.call_in(seconds, enter)
        else:
            enter()

    def _enter(self, run: Json, state: str) -> None:
        now = self.clock.now().isoformat().replace("+00:00", "Z")
        run["state"] = state
        run.setdefault("state_history", []).append({"state": state, "update_time": now})
        if state in _FINISHED:
            run["finished_at"] = now

    def _terminate(self, _: Request, id_: str) -> Answer:
        run = self._existing(self.runs, "Run", id_)
        if run["state"] not in ("PENDING", "RUNNING", "PAUSED"):
            raise ApiError(400, f"Failed to terminate run {id_}: it is in the state {run['state']}")
        self._enter(run, "CANCELING")
        stopped: Callable[[], None] = partial(self._enter, run, "CANCELED")
        self.clock.call_in(_STOPS_S, stopped)
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
        return Answer(self._new(self.recurring_runs, "recurring_run_id", **job, **settings, status=status))

    def _switch(self, status: str, _: Request, id_: str) -> Answer:
        self._existing(self.recurring_runs, "RecurringRun", id_)["status"] = status
        return Answer({})
