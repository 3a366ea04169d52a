"""Kubeflow Pipelines' API v2beta1, as far as its client calls it."""

from functools import partial

from tests.cluster.api_server.errors import ApiError
from tests.cluster.api_server.http import Answer, Request
from tests.cluster.api_server.kfp_pipelines import Pipelines
from tests.cluster.api_server.kfp_runs import Runs
from tests.cluster.api_server.kfp_state import KfpState
from tests.cluster.api_server.routes import Route, dispatch

PREFIX = "/apis/v2beta1/"
LOGS_PREFIX = "/apis/v1alpha1/runs/"
"""Under which logs are, in whichever version the rest is."""


class KfpApi(KfpState):
    """The state of Kubeflow Pipelines and its answers."""

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
            self.enter(self.runs[run_id], state)

    def _routes(self) -> list[Route]:
        return [
            ("GET", "healthz", self._health),
            ("POST", "experiments", self._create_experiment),
            ("GET", "experiments", partial(self.list, self.experiments, "experiments")),
            ("GET", "experiments/{}", partial(self.get, self.experiments, "Experiment")),
            *Pipelines(self).routes(),
            *Runs(self).routes(),
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

    def _log(self, _: Request, run_id: str, pod: str) -> Answer:
        self.existing(self.runs, "Run", run_id)
        if (run_id, pod) not in self.logs:
            raise ApiError(500, f'container "main" in pod "{pod}" is waiting to start: ContainerCreating')
        return Answer(self.logs[run_id, pod])

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
