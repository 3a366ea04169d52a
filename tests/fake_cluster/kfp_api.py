"""Kubeflow Pipelines' API v2beta1, as far as its client calls it, and what its UI server tells about pods."""

import json
from functools import partial

from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kfp_pipelines import Pipelines
from tests.fake_cluster.kfp_runs import Runs
from tests.fake_cluster.kfp_state import KfpState
from tests.fake_cluster.routes import Route, dispatch

PREFIX = "/apis/v2beta1/"
PODS_PREFIX = "/k8s/pod"
"""Of what the UI server answers by itself; it passes the rest on to the API."""


class KfpApi(KfpState):
    """The state of Kubeflow Pipelines and its answers."""

    def answer(self, request: Request) -> Answer:
        """Answer a request.

        Raises:
            ApiError: It is refused.
        """
        path = request.path.removeprefix(PREFIX)
        if request.path.startswith(PODS_PREFIX):
            self._authenticate(request)
            if not self.has_ui:
                return Answer({"code": 5, "message": "Not Found"}, 404)
            return dispatch(self._pod_routes(), request, request.path)
        if path != "healthz":
            self._authenticate(request)
        with self.clock.changed:
            return dispatch(self._routes(), request, path)

    def set_state(self, run_id: str, state: str) -> None:
        """Have a run be in a state from now on."""
        with self.clock.changed:
            self.enter(self.runs[run_id], state)

    def fire(self, recurring: Json, workflow: str) -> Json:
        """Start a run of a schedule, as when its time has come."""
        kept = ("pipeline_spec", "pipeline_version_reference", "runtime_config", "experiment_id", "namespace")
        job = {name: recurring[name] for name in ("recurring_run_id", *kept) if name in recurring}
        with self.clock.changed:
            run = self.new(self.runs, "run_id", display_name=workflow, **job)
            self.workflows[run["run_id"]] = workflow
            self.enter(run, "RUNNING")
        return run

    def _routes(self) -> list[Route]:
        return [
            ("GET", "healthz", self._health),
            ("POST", "experiments", self._create_experiment),
            ("GET", "experiments", partial(self.list, self.experiments, "experiments")),
            ("GET", "experiments/{}", partial(self.get, self.experiments, "Experiment")),
            *Pipelines(self).routes(),
            *Runs(self).routes(),
        ]

    def _pod_routes(self) -> list[Route]:
        return [
            ("GET", PODS_PREFIX, self._pod),
            ("GET", f"{PODS_PREFIX}/logs", self._log),
            ("GET", f"{PODS_PREFIX}/events", self._events),
        ]

    def _authenticate(self, request: Request) -> None:
        if self.token is None and self.cookie is None:
            return
        by_token = self.token is not None and request.headers.get("authorization") == f"Bearer {self.token}"
        by_cookie = self.cookie is not None and request.headers.get("cookie") == self.cookie
        if not (by_token or by_cookie):
            raise ApiError(401, "Request header error: there is no user identity header.", reason="Unauthenticated")

    def _health(self, _: Request) -> Answer:
        return Answer({"multi_user": self.multi_user})

    def _log(self, request: Request) -> Answer:
        printed = self.pods.get(_pod_of(request))
        if printed is None:  # the pod has not begun, or is gone: then the archive is tried, and has nothing
            raise ApiError(500, "Could not get main container logs: S3Error: The specified key does not exist.")
        return Answer(printed)

    def _pod(self, request: Request) -> Answer:
        pod = _pod_of(request)
        if pod not in self.pods:
            raise ApiError(500, f'Could not get pod {pod}: pods "{pod}" not found')
        return Answer(json.dumps({"kind": "Pod", "metadata": {"name": pod}}))

    def _events(self, request: Request) -> Answer:
        items = [{"type": "Warning", **each} for each in self.events.get(_pod_of(request), [])]
        return Answer(json.dumps({"kind": "EventList", "items": items}))

    def _create_experiment(self, request: Request) -> Answer:
        body = request.object()
        name, namespace = body.get("display_name"), self.namespace_of(body.get("namespace"))
        if not name:
            raise ApiError(400, "Experiment name is empty. Please specify a valid experiment name")
        rows = self.experiments.values()
        if any((row["display_name"], row["namespace"]) == (name, namespace) for row in rows):
            raise ApiError(409, f"Experiment {name} already exists", reason="AlreadyExists")
        row = self.new(
            self.experiments,
            "experiment_id",
            display_name=name,
            namespace=namespace,
            description=body.get("description"),
            storage_state="AVAILABLE",
        )
        return Answer(row)


def _pod_of(request: Request) -> str:
    for name in ("podname", "podnamespace"):
        if not request.query.get(name):
            raise ApiError(422, f"{name} argument is required")
    return request.query["podname"]
