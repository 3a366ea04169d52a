"""Kubeflow Pipelines' API v2beta1 as far as the product calls it, and what its UI server says about pods."""

import itertools
import json
import operator
import uuid
from functools import partial

import jsonschema
import yaml

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.http import Answer, ApiError, Json, Request, Route, dispatch

_API, _PODS, _ARTIFACTS = "/apis/v2beta1/", "/k8s/pod", "/artifacts/get"
_FINISHED = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
_PAGE_SIZE = 20
_NEVER = "1970-01-01T00:00:00Z"
_OPERATIONS = {1: operator.eq, "EQUALS": operator.eq, 9: operator.contains}
"""Operations of filters: on a value, and what it is compared with or has to contain."""
_TYPES = {"STRING": "string", "BOOLEAN": "boolean", "LIST": "array", "STRUCT": "object"}
"""JSON types of parameters; the others are numbers."""
_PARTS = ("pipelineInfo", "root", "schemaVersion", "components", "deploymentSpec")
_JOB = ("display_name", "description", "pipeline_spec", "runtime_config", "service_account")
Table = dict[str, Json]


class KfpApi:
    """The state of Kubeflow Pipelines and its answers."""

    prefixes = (_API, _PODS, _ARTIFACTS)

    def __init__(self, clock: Clock, namespaces: tuple[str, ...]) -> None:
        self.clock = clock
        self.multi_user = False
        self.namespaces = namespaces  # which this user may use
        self.token: str | None = None
        self.cookie: str | None = None
        self.has_ui = True
        """Whether the address is that of the UI server, which answers about pods, or of the API server behind it."""
        self.version = "2.17.0"
        self.experiments: Table = {}
        self.pipelines: Table = {}
        self.versions: Table = {}
        self.runs: Table = {}
        self.recurring_runs: Table = {}
        self.pods: dict[str, str | None] = {}
        """What each pod of a run has printed; None where it has not begun."""
        self.events: dict[str, list[Json]] = {}
        self.artifacts: dict[tuple[str, str, str], str] = {}
        """The files in the object store, by source, bucket and key."""
        self.workflows: dict[str, str] = {}
        """The names of the workflows of scheduled runs, with which the names of their pods begin."""
        self._numbers = itertools.count(1)

    def refusal(self, request: Request, error: ApiError) -> Json | str:
        """Return a refusal as this API writes it; the UI server answers with plain text."""
        if request.path.startswith((_PODS, _ARTIFACTS)) and self.has_ui:
            return error.message
        return {"error": error.message, "message": error.message, "details": []}

    def answer(self, request: Request) -> Answer:
        """Answer a request, or raise ApiError."""
        valid = {("authorization", f"Bearer {self.token}"), ("cookie", self.cookie)}
        is_open = not (self.token or self.cookie) or request.path == f"{_API}healthz"
        if not is_open and not valid & set(request.headers.items()):
            raise ApiError(401, "Request header error: there is no user identity header.")
        if request.path.startswith((_PODS, _ARTIFACTS)) and not self.has_ui:
            raise ApiError(404, "Not Found")
        routes: list[Route] = [
            ("GET", f"{_API}healthz", self._health),
            ("POST", f"{_API}experiments", self._create_experiment),
            ("GET", f"{_API}experiments", partial(self._list, self.experiments, "experiments")),
            ("GET", f"{_API}pipelines", partial(self._list, self.pipelines, "pipelines")),
            ("POST", f"{_API}pipelines", self._create_pipeline),
            ("POST", f"{_API}pipelines/upload_version", self._upload_version),
            ("GET", f"{_API}pipelines/{{}}", partial(_one, self.pipelines)),
            ("GET", f"{_API}pipelines/{{}}/versions", self._list_versions),
            ("GET", f"{_API}experiments/{{}}", partial(_one, self.experiments)),
            ("GET", f"{_API}pipelines/{{}}/versions/{{}}", partial(_one, self.versions)),
            ("POST", f"{_API}runs", self._create_run),
            ("GET", f"{_API}runs", partial(self._list, self.runs, "runs")),
            ("GET", f"{_API}runs/{{}}", partial(_one, self.runs)),
            ("POST", f"{_API}runs/{{}}:terminate", self._terminate),
            ("POST", f"{_API}recurringruns", self._create_recurring),
            ("GET", f"{_API}recurringruns", partial(self._list, self.recurring_runs, "recurringRuns")),
            ("DELETE", f"{_API}recurringruns/{{}}", self._delete_recurring),
            ("POST", f"{_API}recurringruns/{{}}:enable", partial(self._switch, "ENABLED")),
            ("POST", f"{_API}recurringruns/{{}}:disable", partial(self._switch, "DISABLED")),
            ("GET", _ARTIFACTS, self._artifact),
            ("GET", _PODS, partial(self._pod, "")),
            *[("GET", f"{_PODS}/{part}", partial(self._pod, part)) for part in ("logs", "events")],
        ]
        with self.clock.changed:
            return dispatch(routes, request, request.path)

    def new(self, table: Table, key: str, **values: object) -> Json:
        """Add a row with its id and time; values that are None are left out."""
        id_ = str(uuid.UUID(int=next(self._numbers) << 64, version=4))
        row = {key: id_, "created_at": self.clock.stamp(), **values}
        table[id_] = {name: value for name, value in row.items() if value is not None}
        return table[id_]

    def set_state(self, run_id: str, state: str) -> None:
        """Put a run into a state."""
        with self.clock.changed:
            run = self.runs[run_id]
            run["state"] = state
            history = run.setdefault("state_history", [])
            history.append({"state": state, "update_time": self.clock.stamp()})
            run["finished_at"] = self.clock.stamp() if state in _FINISHED else _NEVER

    def fire(self, recurring: Json, workflow: str) -> Json:
        """Start a run of a schedule, as when its time has come."""
        job = {name: recurring.get(name) for name in ("recurring_run_id", "experiment_id", "namespace", *_JOB[2:4])}
        run = self.new(self.runs, "run_id", display_name=workflow, **job)
        self.workflows[run["run_id"]] = workflow
        self.set_state(run["run_id"], "RUNNING")
        return run

    def _health(self, _: Request) -> Answer:
        """Answer as the API server, or as the UI server, which uses other names."""
        api_server = {"commit_sha": "unknown", "tag_name": self.version}
        ui_server = {"apiServerCommitHash": "unknown", "apiServerTagName": self.version, "apiServerReady": True}
        return Answer({**(ui_server if self.has_ui else api_server), "multi_user": self.multi_user})

    def _check_namespace(self, namespace: str | None) -> None:
        if self.multi_user and not namespace:
            raise ApiError(400, "Namespace cannot be empty in multi-user mode")
        if self.multi_user and namespace not in self.namespaces:
            raise ApiError(403, f"User is not authorized in the namespace {namespace}")

    def _create_pipeline(self, request: Request) -> Answer:
        body = request.object()
        name, namespace = body.get("name"), body.get("namespace") or None
        self._check_namespace(namespace)
        if not name or (name, namespace) in {(row["name"], row.get("namespace")) for row in self.pipelines.values()}:
            raise ApiError(409, f"Failed to create a pipeline with name {name}. It already exists, or it is empty")
        values = {key: body[key] for key in ("name", "display_name", "description") if body.get(key)}
        return Answer(self.new(self.pipelines, "pipeline_id", **values, namespace=namespace))

    def _upload_version(self, request: Request) -> Answer:
        request.check_query("name", "pipelineid", "description")
        name, pipeline_id = request.query.get("name") or "", request.query.get("pipelineid") or ""
        _, text = request.upload("uploadfile")
        _existing(self.pipelines, pipeline_id)
        if any((row["pipeline_id"], row["name"]) == (pipeline_id, name) for row in self.versions.values()):
            raise ApiError(409, "Failed to create a pipeline version")
        spec, platform = [*(each for each in yaml.load_all(text, yaml.CSafeLoader) if each), None][:2]
        pipeline = {"pipeline_spec": spec, "platform_spec": platform}
        _check_pipeline(pipeline)
        values: Json = {"name": name, "display_name": name, "description": request.query.get("description")}
        values |= {"pipeline_id": pipeline_id, "pipeline_spec": pipeline}
        return Answer(self.new(self.versions, "pipeline_version_id", **values))

    def _list_versions(self, request: Request, id_: str) -> Answer:
        _existing(self.pipelines, id_)
        of_pipeline = {key: row for key, row in self.versions.items() if row["pipeline_id"] == id_}
        return self._list(of_pipeline, "pipeline_versions", request, self.pipelines[id_].get("namespace"))

    def _list(self, table: Table, key: str, request: Request, within: str | None = None) -> Answer:
        request.check_query("namespace", "filter", "sort_by", "page_size", "page_token")
        query, namespace = request.query, within or request.query.get("namespace", "")
        self._check_namespace(namespace)
        rows = [row for row in table.values() if within or not self.multi_user or row.get("namespace") == namespace]
        for predicate in json.loads(query.get("filter") or "{}").get("predicates", []):
            matches = _OPERATIONS[predicate["operation"]]
            rows = [row for row in rows if matches(row[predicate["key"]], predicate["stringValue"])]
        assert query.get("sort_by", "") in ("", "created_at desc")
        rows.sort(key=lambda row: str(row.get("created_at", "")), reverse=bool(query.get("sort_by")))
        start = int(query.get("page_token") or 0)
        end = start + (int(query.get("page_size") or 0) or _PAGE_SIZE)
        token = {"next_page_token": str(end)} if end < len(rows) else {}
        return Answer({key: rows[start:end], "total_size": len(rows), **token} if rows else {})

    def _create_experiment(self, request: Request) -> Answer:
        body = request.object()
        name, namespace = body.get("display_name"), body.get("namespace") or None
        self._check_namespace(namespace)
        taken = {(row["display_name"], row.get("namespace")) for row in self.experiments.values()}
        if not name or (name, namespace) in taken:
            raise ApiError(409, f"Experiment {name} already exists, or its name is empty")
        values = {"display_name": name, "namespace": namespace, "storage_state": "AVAILABLE"}
        return Answer(self.new(self.experiments, "experiment_id", **values))

    def _job(self, body: Json) -> Json:
        """Return what a run and a recurring run have in common, if it can be run."""
        experiment = _existing(self.experiments, body.get("experiment_id") or "")
        self._check_namespace(experiment.get("namespace"))
        _check_pipeline(body.get("pipeline_spec") or {})
        _check_parameters(body["pipeline_spec"], (body.get("runtime_config") or {}).get("parameters") or {})
        job = {name: body[name] for name in _JOB if name in body}
        return {**job, "experiment_id": experiment["experiment_id"], "namespace": experiment.get("namespace")}

    def _create_run(self, request: Request) -> Answer:
        run = self.new(self.runs, "run_id", **self._job(request.object()), storage_state="AVAILABLE")
        self.set_state(run["run_id"], "PENDING")
        return Answer(run)

    def _terminate(self, _: Request, id_: str) -> Answer:
        run = _existing(self.runs, id_)
        if run["state"] not in ("PENDING", "RUNNING", "PAUSED"):
            raise ApiError(400, f"Failed to terminate run {id_}: it is in the state {run['state']}")
        self.set_state(id_, "CANCELING")
        return Answer({})

    def _create_recurring(self, request: Request) -> Answer:
        body = request.object()
        settings: Json = {name: body[name] for name in ("trigger", "mode", "no_catchup") if name in body}
        # Protobuf writes 64 bits as text.
        settings |= {"max_concurrency": str(body["max_concurrency"]), "status": "ENABLED"}
        return Answer(self.new(self.recurring_runs, "recurring_run_id", **self._job(body), **settings))

    def _delete_recurring(self, _: Request, id_: str) -> Answer:
        """Delete a schedule; its workflows belong to it, and go with their pods, of which its runs learn nothing."""
        _existing(self.recurring_runs, id_)
        for run_id in [run_id for run_id, run in self.runs.items() if run.get("recurring_run_id") == id_]:
            workflow = self.workflows.pop(run_id)
            self.pods = {pod: text for pod, text in self.pods.items() if not pod.startswith(workflow)}
        del self.recurring_runs[id_]
        return Answer({})

    def _switch(self, status: str, _: Request, id_: str) -> Answer:
        _existing(self.recurring_runs, id_)["status"] = status
        return Answer({})

    def _artifact(self, request: Request) -> Answer:
        request.check_query("source", "bucket", "key", "namespace")
        file = (request.query["source"], request.query["bucket"], request.query["key"])
        if file not in self.artifacts:
            raise ApiError(500, "Failed to get object in bucket: The specified key does not exist.")
        return Answer(self.artifacts[file])

    def _pod(self, part: str, request: Request) -> Answer:
        pod = request.query["podname"] if request.query["podnamespace"] in self.namespaces else ""
        if part == "events":
            items = [{"type": "Warning", **each} for each in self.events.get(pod, [])]
            return Answer(json.dumps({"kind": "EventList", "items": items}))
        if part == "logs":
            printed = self.pods.get(pod)
            if printed is None:  # the pod has not begun, or is gone: then the archive is tried, and has nothing
                raise ApiError(500, "Could not get main container logs: S3Error: The specified key does not exist.")
            return Answer(printed)
        if pod not in self.pods:
            raise ApiError(500, f'Could not get pod {pod}: pods "{pod}" not found')
        return Answer(json.dumps({"kind": "Pod", "metadata": {"name": pod}}))


def _existing(table: Table, id_: str) -> Json:
    if id_ not in table:
        raise ApiError(404, f"{id_} not found")
    return table[id_]


def _one(table: Table, _: Request, *ids: str) -> Answer:
    return Answer(_existing(table, ids[-1]))


def _check_parameters(pipeline: Json, values: Json) -> None:
    """Refuse parameters that a pipeline does not have, lacks, or has of another type or with another value."""
    inputs = pipeline["pipeline_spec"]["root"].get("inputDefinitions", {}).get("parameters", {})
    schema = {
        "properties": {name: {"type": _TYPES.get(each["parameterType"], "number")} for name, each in inputs.items()},
        "required": [name for name, each in inputs.items() if not {"isOptional", "defaultValue"} & set(each)],
        "additionalProperties": False,
    }
    for error in jsonschema.Draft202012Validator(schema).iter_errors(values):
        raise ApiError(400, f"parameter {'.'.join(map(str, error.absolute_path))}: {error.message}")
    for name, each in inputs.items():
        if name in values and each.get("literals") and values[name] not in each["literals"]:
            raise ApiError(400, f'input parameter "{name}" value does not match any of the allowed literal values')


def _check_pipeline(pipeline: Json) -> None:
    """Refuse what is no pipeline with both its documents; the real server takes one without volumes and secrets."""
    spec, platform = pipeline.get("pipeline_spec") or {}, pipeline.get("platform_spec") or {}
    if any(part not in spec for part in _PARTS) or not spec["pipelineInfo"].get("name"):
        raise ApiError(400, "unknown template format: pipeline spec is invalid")
    executors = platform.get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {}).get("executors")
    if not executors or not set(executors) <= set(spec["deploymentSpec"].get("executors", {})):
        raise ApiError(400, "the pipeline has no document with the executors of platforms.kubernetes")
